"""`scripts/release VERSION`: makes a release of the commit that is checked out, and uploads nothing.

Everything happens in a clone, `build/release/checkout`: version and changelog are written, committed and tagged there;
wheel and sdist are built twice and must be equal byte for byte; the index page is rendered; the wheel is installed into
an empty environment of every Python that the project names and is found here; a bill of materials (CycloneDX) is made
of what such an environment then holds. Only when all of it went well does this checkout get the commit and the tag.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "release"
TOOLS = ("build==1.6.1", "twine==7.0.0", "cyclonedx-bom==7.5.0")
BACKEND = ("hatchling", "hatch-fancy-pypi-readme")
UNRELEASED = "## Unreleased"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")
_STAGES = {"a": 0, "b": 1, "rc": 2, None: 3}


class Refused(Exception):
    """The release cannot be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A file that names the version, and how: the first group of `pattern` stands before it.

    `semantic`: as Helm has versions, 0.2.0-rc.1 for 0.2.0rc1.
    """

    file: str
    pattern: str
    semantic: bool = False


# Whatever names the version of the product. tests/packaging/test_release.py sees that none differs from another.
VERSIONED = (
    Place("pyproject.toml", r'(?m)(^version = ")([^"]+)'),
    Place("deploy/helm/harvester/Chart.yaml", r"(?m)(^version: )(\S+)", semantic=True),
    Place("deploy/helm/harvester/Chart.yaml", r'(?m)(^appVersion: ")([^"]+)'),
)


def order(version: str) -> tuple[int, int, int, int, int]:
    """What versions are compared by; Refused where it is none: 1.2.3, 1.2.3rc1."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise Refused(f"{version} is not a version such as 1.2.3 or 1.2.3rc1")
    major, minor, patch, stage, number = found.groups()
    return int(major), int(minor), int(patch), _STAGES[stage], int(number or 0)


def changelog_of(text: str, version: str, day: date) -> str:
    """The changelog in which what was unreleased is this version; Refused where nothing was, or it is there already."""
    if f"## [{version}]" in text:
        raise Refused(f"the changelog has a section for {version} already")
    head, found, rest = text.partition(f"{UNRELEASED}\n")
    if not found:
        raise Refused(f"the changelog has no section {UNRELEASED!r}")
    changes = re.split(r"(?m)^## ", rest)[0]
    if not re.search(r"(?m)^- ", changes):
        raise Refused("the changelog has nothing that is unreleased")
    return f"{head}{UNRELEASED}\n\n## [{version}] - {day.isoformat()}\n{rest}"


def with_version(place: Place, text: str, version: str) -> str:
    """The text of a file with another version; Refused where it names none."""
    written = re.sub(r"(a|b|rc)(\d+)$", r"-\1.\2", version) if place.semantic else version
    changed, count = re.subn(place.pattern, rf"\g<1>{written}", text)
    if not count:
        raise Refused(f"{place.file} names no version")
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the release stands, 1 when it cannot be made."""
    parser = argparse.ArgumentParser(prog="scripts/release", description="Make a release; upload nothing.")
    parser.add_argument("version", help="such as 0.2.0, or 0.2.0rc1")
    parser.add_argument("--rehearse", action="store_true", help="leave this checkout as it is: no commit, no tag")
    parser.add_argument("--sign", action="store_true", help="sign the tag with your key")
    options = parser.parse_args(arguments)
    try:
        release(options.version, rehearse=options.rehearse, sign=options.sign)
    except Refused as refusal:
        print(f"release: {refusal}", file=sys.stderr)
        return 1
    return 0


def release(version: str, *, rehearse: bool, sign: bool) -> None:
    checkout, out = PLACE / "checkout", PLACE / "dist"
    tag = f"v{version}"
    _preconditions(version, tag, rehearse=rehearse)
    for directory in (checkout, out):
        shutil.rmtree(directory, ignore_errors=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    _run("git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout)
    if rehearse:  # of what is being worked on, too
        _overlay(checkout)
    _say(f"writing version {version}")
    for place in VERSIONED:
        file = checkout / place.file
        file.write_text(with_version(place, file.read_text(), version))
    _say("rendering the manifests")
    _run(
        checkout / "scripts" / "chart",
        "--write",
        env={**os.environ, "HARVESTER_CHART_TOOLS": str(ROOT / "build/chart")},
    )
    changes = checkout / "CHANGELOG.md"
    changes.write_text(changelog_of(changes.read_text(), version, datetime.now(UTC).date()))
    who = () if _succeeds("git", "-C", ROOT, "config", "user.email") else _NOBODY
    _run("git", "-C", checkout, *who, "commit", "--quiet", "--all", "--message", f"Version {version}")
    kind = "--sign" if sign else "--annotate"
    _run("git", "-C", checkout, *who, "tag", kind, tag, "--message", f"Version {version}")

    tools = _tools()
    _say("building twice")
    archives = _built_twice(checkout, tag, out, tools)
    _run(tools / "twine", "check", "--strict", *archives)
    wheel = next(archive for archive in archives if archive.suffix == ".whl")
    pythons = _pythons()
    for number, (name, python) in enumerate(pythons.items()):
        _say(f"installing the wheel with Python {name}")
        environment = _tried(wheel, python, version)
        if number == 0:
            _materials(environment, checkout, out / f"{wheel.name.split('-')[0]}-{version}.cdx.json", tools)
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums)
    if not rehearse:
        _run("git", "-C", ROOT, "fetch", "--quiet", checkout, f"refs/tags/{tag}:refs/tags/{tag}")
        _run("git", "-C", ROOT, "merge", "--quiet", "--ff-only", tag)
    _say(f"made {', '.join(sorted(file.name for file in out.iterdir()))} in {out.relative_to(ROOT)}")
    missing = [name for name in named_pythons() if name not in pythons]
    if missing:
        _say(f"not tried, for want of them here: Python {', '.join(missing)}")
    if rehearse:
        _say("a rehearsal: nothing was committed or tagged here")
    else:
        _say(f"left to do: git push origin HEAD {tag}; twine upload {out.relative_to(ROOT)}/*.whl and *.tar.gz")


_NOBODY = ("-c", "user.name=release", "-c", "user.email=release@invalid")


def _preconditions(version: str, tag: str, *, rehearse: bool) -> None:
    current = _project()["version"]
    if order(version) < order(current):
        raise Refused(f"{version} is older than {current}")
    if _succeeds("git", "-C", ROOT, "rev-parse", "--verify", f"refs/tags/{tag}"):
        raise Refused(f"the tag {tag} exists")
    if rehearse:
        return
    if _run("git", "-C", ROOT, "status", "--porcelain"):
        raise Refused("there are changes that are not committed")
    # The index page links to this repository: a release from another one would lead its readers astray.
    source = _project()["urls"]["Source"]
    remotes = _run("git", "-C", ROOT, "remote", "--verbose")
    if not any(_same(source, line.split()[1]) for line in remotes.splitlines()):
        raise Refused(f"no remote of this checkout is {source}, which pyproject.toml names as its source")


def _same(source: str, remote: str) -> bool:
    """Whether a remote is the repository of that address, by whichever protocol."""
    plain = re.sub(r"^(?:\w+://)?(?:[^@/]+@)?", "", remote).replace(":", "/").removesuffix(".git")
    return plain == source.partition("://")[2]


def _overlay(checkout: Path) -> None:
    """Copies what differs from the last commit, as a commit of its own."""
    listed = _run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, checkout / name
        if not source.exists():
            target.unlink(missing_ok=True)
        elif not target.exists() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    _run("git", "-C", checkout, "add", "--all")
    _run("git", "-C", checkout, *_NOBODY, "commit", "--quiet", "--allow-empty", "--message", "Work in progress")


def _tools() -> Path:
    """The directory of programs that build and check, in an environment of their own."""
    home = PLACE / "tools"
    stamp = home / "made-for"
    # The backend that builds is the one that the tests know.
    wanted = "\n".join((*TOOLS, *(f"{name}=={installed(name)}" for name in BACKEND)))
    if not stamp.is_file() or stamp.read_text() != wanted:
        _say("installing the tools (once)")
        shutil.rmtree(home, ignore_errors=True)
        _run(sys.executable, "-m", "venv", home)
        _run(home / "bin" / "python", *_PIP, *wanted.split())
        stamp.write_text(wanted)
    return home / "bin"


_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def _built_twice(checkout: Path, tag: str, out: Path, tools: Path) -> list[Path]:
    """Wheel and sdist in `out`; Refused if a second build, elsewhere and at another time, differs."""
    stamp = _run("git", "-C", checkout, "log", "-1", "--format=%ct", tag).strip()
    results: list[Path] = []
    for name, umask in (("first", 0o022), ("second", 0o077)):
        source = PLACE / name
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        archive = PLACE / f"{name}.tar"
        _run("git", "-C", checkout, "archive", "--output", archive, tag)
        before = os.umask(umask)
        try:
            # The wheel is built from the sdist, as whoever gets only that will build it.
            shutil.unpack_archive(archive, source)
            archive.unlink()
            _run(
                tools / "python", "-m", "build", "--no-isolation", source,
                env={**os.environ, "SOURCE_DATE_EPOCH": stamp, "PYTHONHASHSEED": str(len(results))},
            )  # fmt: skip
        finally:
            os.umask(before)
        results.append(source / "dist")
    first, second = results
    names = sorted(file.name for file in first.iterdir())
    _match, differing, errors = filecmp.cmpfiles(first, second, names, shallow=False)
    if differing or errors or names != sorted(file.name for file in second.iterdir()):
        raise Refused(f"two builds differ: {', '.join(differing + errors) or 'in what they made'}")
    shutil.copytree(first, out)
    return sorted(out.iterdir())


def named_pythons() -> list[str]:
    """The versions that the classifiers name, the oldest first."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in _project()["classifiers"]]
    return [match[1] for match in found if match]


def _pythons() -> dict[str, Path]:
    from scripts.version_matrix import Missing, interpreter

    found: dict[str, Path] = {}
    for name in named_pythons():
        try:
            found[name] = interpreter(name)
        except Missing:
            continue
    if not found:
        raise Refused("none of the Pythons that the project names is here")
    return found


def _tried(wheel: Path, python: Path, version: str) -> Path:
    """The interpreter of an empty environment into which the wheel was installed, and in which it works."""
    home = PLACE / f"with-{python.name}-{hashlib.sha256(str(python).encode()).hexdigest()[:8]}"
    shutil.rmtree(home, ignore_errors=True)
    _run(python, "-m", "venv", home)
    inside = home / "bin" / "python"
    _run(inside, *_PIP, "--only-binary=:all:", wheel)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HARVESTER", "PYTHON"))}
    said = _run(home / "bin" / "harvester", "--version", env=environment, cwd=PLACE).strip()
    if said != f"harvester {version}":
        raise Refused(f"the installed command says {said!r}")
    _run(home / "bin" / "harvester", "config", "check", env=environment, cwd=PLACE)
    _run(inside, "-m", "pip", "check", "--disable-pip-version-check")
    return inside


def _materials(environment: Path, checkout: Path, into: Path, tools: Path) -> None:
    """The bill of materials of an installation: the product and all it depends on, without pip."""
    _run(environment, "-m", "pip", "uninstall", "--quiet", "--yes", "--disable-pip-version-check", "pip", "setuptools")
    _run(
        tools / "cyclonedx-py", "environment", environment, "--pyproject", checkout / "pyproject.toml",
        "--mc-type", "application", "--output-reproducible", "--output-format", "JSON", "--output-file", into,
    )  # fmt: skip
    bill = json.loads(into.read_text())
    names = {_normal(component["name"]) for component in bill["components"]}
    needed = {_normal(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in _project()["dependencies"]}
    if missing := sorted(needed - names):
        raise Refused(f"the bill of materials lacks {', '.join(missing)}")


def _normal(name: str) -> str:
    """A distribution's name as indexes compare it: tomli_w is tomli-w."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def _succeeds(*command: str | Path) -> bool:
    return subprocess.run(list(map(str, command)), capture_output=True, check=False).returncode == 0


def _run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=1800, env=env, cwd=cwd
    )
    if done.returncode:
        raise Refused(
            f"{Path(command[0]).name}: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}"
        )
    return done.stdout


def _say(text: str) -> None:
    print(f"release: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
