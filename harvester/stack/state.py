"""Describes what a stack should be and what it is, and stores that in a file.

`state.json` is written atomically and only under the directory's lock, right after each process is started, so that a
stack can be found again whatever happened to the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from harvester.errors import StackError
from harvester.stack.processes import ProcessId, is_alive

ServerName = Literal["postgres", "kafka"]
SERVERS: tuple[ServerName, ...] = ("postgres", "kafka")

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StackOptions:
    """How to build a stack. Servers that are already running are kept as they are, whatever the options.

    `durable=False` gives up surviving a power failure (fsync off) for faster tests; a killed process loses nothing
    either way. `dsn` and `bootstrap` name your own servers: those are used, and never started or stopped.
    `postgres_bin` is a directory with `initdb` and `postgres`; None means the wheel's, or an installed one.
    """

    durable: bool = True
    kafka_heap_mb: int = 1024
    postgres_bin: Path | None = None
    dsn: str | None = None
    bootstrap: str | None = None
    timeout_s: float = 90.0


@dataclass(frozen=True, slots=True)
class StackInfo:
    """A running stack. Pids and log are None for a user's own server; `socket_dir` is set if there is one."""

    directory: Path
    dsn: str
    bootstrap: str
    socket_dir: Path | None
    postgres_pid: int | None
    kafka_pid: int | None
    postgres_log: Path | None
    kafka_log: Path | None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server: `address` is a DSN or a bootstrap list, None if it was never started here."""

    name: ServerName
    state: Literal["running", "stopped", "given"]
    address: str | None
    pid: int | None
    log: Path | None


@dataclass(frozen=True, slots=True)
class StackStatus:
    """The state of a stack; `running` if every server is (given ones count if they answer)."""

    directory: Path
    servers: tuple[ServerStatus, ...]

    @property
    def running(self) -> bool:
        return all(server.state in ("running", "given") for server in self.servers)


@dataclass(slots=True)
class Server:
    """One server's entry in the file. `ports` stay the same across restarts if they are still free.

    `home` is where its data is; `given` the address of a server that is not ours.
    """

    process: ProcessId | None = None
    ports: list[int] = field(default_factory=list)
    home: str | None = None
    given: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the process that we started is running."""
        return self.process is not None and is_alive(self.process)

    @property
    def log(self) -> Path | None:
        return Path(self.home) / "server.log" if self.home and self.given is None else None


@dataclass(slots=True)
class StackState:
    """The whole file."""

    servers: dict[ServerName, Server] = field(default_factory=lambda: {name: Server() for name in SERVERS})
    durable: bool = True
    kafka_heap_mb: int = 1024
    postgres_bin: str | None = None

    def dump(self) -> str:
        """As JSON text."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str) -> StackState:
        """From JSON text; ValueError, KeyError or TypeError if it is not what `dump` writes."""
        raw = json.loads(text)
        if raw.pop("format") != _FORMAT:
            raise ValueError("unknown format")
        return TypeAdapter(cls).validate_python(raw)


def default_directory() -> Path:
    """$HARVESTER_STACK, or `.stack` in the current directory."""
    return Path(os.environ.get("HARVESTER_STACK") or ".stack")


def read(directory: Path) -> StackState | None:
    """The stack's state; None if there never was one. StackError if the file is invalid."""
    file = directory / "state.json"
    try:
        return StackState.parse(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StackError(
            f"{file} is not a state file of this version",
            hint="stop the servers running from this directory manually, then remove it",
        ) from error


def write(directory: Path, state: StackState) -> None:
    """Replace the state file atomically."""
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".state-", delete=False) as file:
        file.write(state.dump())
    Path(file.name).replace(directory / "state.json")


@contextlib.contextmanager
def locked(
    directory: Path,
    what: str = "directory",
    hint: str = "use --directory or HARVESTER_STACK to name another one",
) -> Iterator[None]:
    """Hold the directory's lock; it ends with the process, so a crash leaves nothing locked."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StackError(f"cannot use the {what} {directory}: {error.strerror}", hint=hint) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
