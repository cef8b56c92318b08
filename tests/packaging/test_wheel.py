"""The wheel and the sdist: what is in them, and that the wheel works where there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DISTRIBUTION = "outbox_harvester"  # as file names have it
pytestmark = pytest.mark.timeout(600)
BUILD = ("pyproject.toml", "README.md", "LICENSE", "harvester", "cli", "docs/man")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def build(kind: str, source: Path, into: Path, env: dict[str, str] | None = None) -> Path:
    """By the backend itself, as a frontend without isolation would."""
    into.mkdir(exist_ok=True)
    program = f"from hatchling import build; print(build.build_{kind}({str(into)!r}))"
    return into / run(sys.executable, "-c", program, cwd=source, env=env).stdout.splitlines()[-1]


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is made of, and nothing else."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILD:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=NOT_SHIPPED)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it, and nothing of this checkout: dependencies are those of this environment."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--disable-pip-version-check", wheel, cwd=place,
    )  # fmt: skip
    # A line of a .pth file is one more directory; .pth files in there, such as that of the checkout, are not followed.
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).stdout.strip()
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (Path(own) / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return place


def clean() -> dict[str, str]:
    """An environment in which nothing points at the checkout or at a configuration."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HARVESTER", "PYTHON"))}


def test_the_wheel_has_all_files_of_the_tree_and_no_others(wheel: Path) -> None:
    expected = set()
    for folder, package in (("harvester", "harvester"), ("cli/harvester_cli", "harvester_cli")):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                expected.add(f"{package}/{file.relative_to(ROOT / folder)}")
    found = members(wheel)
    assert {name for name in found if name.startswith(("harvester/", "harvester_cli/"))} == expected
    version = PROJECT["version"]
    tops = {name.split("/")[0] for name in found}
    assert tops == {
        "harvester",
        "harvester_cli",
        f"{DISTRIBUTION}-{version}.dist-info",
        f"{DISTRIBUTION}-{version}.data",
    }
    assert "harvester/py.typed" in found
    assert any(name.endswith("licenses/LICENSE") for name in found)
    assert f"{DISTRIBUTION}-{version}.data/data/share/man/man1/harvester.1" in found


def test_the_wheel_says_what_the_project_says(wheel: Path) -> None:
    info = f"{DISTRIBUTION}-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["Name"] == "outbox-harvester"
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])
    required = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert len(required) == len(PROJECT["dependencies"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert "harvester = harvester_cli.main:main" in entry_points


def test_the_index_page_gets_what_it_shows(wheel: Path) -> None:
    """All addresses beside the description, and in it only links that work where the repository is not."""
    info = f"{DISTRIBUTION}-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or ())
    assert urls == PROJECT["urls"]
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    for minor in range(11, 15):
        assert f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", [])
    source, tag = PROJECT["urls"]["Source"], f"v{PROJECT['version']}"
    targets = re.findall(r"\]\(([^)\s]+)", page)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", page)
    assert len(targets) > 30
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(source):
            kind, at, path = target.removeprefix(f"{source}/").split("/", 2)
            file = ROOT / path.partition("#")[0]
            assert file.exists(), target
            assert (kind, at) == ("raw" if target in pictures else "tree" if file.is_dir() else "blob", tag), target
    assert len(pictures) == README.count("![")
    assert all(picture.startswith(f"{source}/raw/{tag}/docs/images/") for picture in pictures)
    without_links = re.sub(r"(\]\()[^)\s]+", r"\1", page)
    assert without_links.strip() == re.sub(r"(\]\()[^)\s]+", r"\1", README).strip()  # nothing else is changed
    code = re.compile(r"(?ms)^```.*?^```[ ]*$")
    assert code.findall(page) == code.findall(README)


def test_two_builds_are_equal(source: Path, wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """Of copies that differ in times, modes, directory and place in the file system, at another moment."""
    other = tmp_path / "elsewhere"
    shutil.copytree(source, other)
    for number, file in enumerate(sorted(other.rglob("*"), reverse=True)):
        os.utime(file, (10**9 + number, 10**9 + number))
        file.chmod((0o700 if file.is_dir() else 0o600) | (file.stat().st_mode & 0o100))
    elsewhere = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    for kind, first in (("wheel", wheel), ("sdist", sdist)):
        second = build(kind, other, tmp_path / kind, elsewhere)
        assert second.name == first.name
        assert second.read_bytes() == first.read_bytes(), kind
    with zipfile.ZipFile(wheel) as archive:
        assert {member.date_time[0] for member in archive.infolist()} == {2020}


def test_the_sdist_is_the_repository(tmp_path: Path) -> None:
    """Everything that is under version control, so that whoever has only this can run the tests."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    sdist = build("sdist", tmp_path / "source", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        entries = {entry.name.partition("/")[2]: entry for entry in archive.getmembers()}
    assert set(entries) - {"PKG-INFO"} == tracked
    assert {entry.mode for entry in entries.values()} == {0o644, 0o755}
    assert entries["scripts/setup"].mode == 0o755
    assert {(entry.uid, entry.uname, entry.type) for entry in entries.values()} == {(0, "", tarfile.REGTYPE)}


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert build("wheel", unpacked, tmp_path / "again").read_bytes() == wheel.read_bytes()


def test_the_wheel_works_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    python, harvester = installed / "bin" / "python", installed / "bin" / "harvester"
    where = "import harvester, harvester_cli; print(harvester.__file__); print(harvester_cli.__file__)"
    for file in run(python, "-c", where, cwd=tmp_path, env=clean()).stdout.split():
        assert Path(file).is_relative_to(installed), file
    for name in ("cli", "tests", "scripts"):
        lookup = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert run(python, "-c", lookup, cwd=tmp_path, env=clean()).stdout.strip() == "None"
    version = run(harvester, "--version", cwd=tmp_path, env=clean()).stdout
    assert version == f"harvester {PROJECT['version']}\n"
    assert "  pipeline  " in run(harvester, "--help", cwd=tmp_path, env=clean()).stdout
    # Files beside the code: the schema as SQL, and the settings.
    assert "CREATE TABLE" in run(
        harvester, "init", "--print", "--set", "data_source=host=127.0.0.1 port=1", cwd=tmp_path, env=clean()
    ).stdout  # fmt: skip
    run(harvester, "config", "check", cwd=tmp_path, env=clean())
    assert (installed / "share" / "man" / "man1" / "harvester.1").is_file()


def test_every_module_of_the_wheel_is_found_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    """Compiled, not imported: some need an extra."""
    program = """if True:
        import compileall, harvester, harvester_cli, pathlib, sys
        for package in (harvester, harvester_cli):
            if not compileall.compile_dir(pathlib.Path(package.__file__).parent, quiet=1, force=True):
                sys.exit(1)
    """
    run(installed / "bin" / "python", "-c", program, cwd=tmp_path, env=clean())


def test_shells_can_complete(installed: Path, tmp_path: Path) -> None:
    harvester = installed / "bin" / "harvester"
    for shell in ("bash", "zsh", "fish"):
        source = {**clean(), "_HARVESTER_COMPLETE": f"source_{shell}"}
        assert "_HARVESTER_COMPLETE" in run(harvester, cwd=tmp_path, env=source).stdout
    typed = {**clean(), "_HARVESTER_COMPLETE": "complete_bash", "COMP_WORDS": "harvester docto", "COMP_CWORD": "1"}
    assert run(harvester, cwd=tmp_path, env=typed).stdout.split() == ["doctor"]
