"""The file that records a cluster, so that it can be found again whatever happened to the process that started it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harvester.errors import StackError
from harvester.stack.processes import ProcessId

_FORMAT = 1


@dataclass(slots=True)
class State:
    """`port` is the master's, `ui` that of its page; both keep their value while the master runs."""

    port: int = 0
    ui: int = 0
    master: ProcessId | None = None
    workers: list[ProcessId | None] = field(default_factory=list)


def read(directory: Path) -> State:
    """What is written there; an empty state where nothing is."""
    file = directory / "cluster.json"
    try:
        raw = json.loads(file.read_text())
        if raw.pop("format") != _FORMAT:
            raise ValueError("unknown format")
        return State(raw["port"], raw["ui"], _process(raw["master"]), [_process(one) for one in raw["workers"]])
    except (FileNotFoundError, NotADirectoryError):
        return State()
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"{file} is no state of a cluster", hint="end its processes by hand and remove it") from error


def write(directory: Path, state: State) -> None:
    """Replace the file at once."""
    new = directory / "cluster.json.new"
    new.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=2) + "\n")
    new.replace(directory / "cluster.json")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; it goes with the process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StackError(f"cannot use the directory {directory}: {error.strerror}", hint="name another one") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _process(raw: dict[str, object] | None) -> ProcessId | None:
    return ProcessId(**raw) if raw else None  # type: ignore[arg-type]
