"""The run's servers: one stack, shared by all workers, started by the first test that asks.

The process that begins the run (xdist's controller, or pytest itself) chooses a directory and hands it on in the
environment; `harvester.stack.up` is safe to call from every worker at once, so the first one starts the servers
and the others find them. A reaper process takes the stack down when the run ends, however it ends.

HARVESTER_TEST_DSN and HARVESTER_TEST_BOOTSTRAP name servers of your own; with both, nothing is started.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from harvester import stack

from .class_data import prepared

DSN = "HARVESTER_TEST_DSN"
BOOTSTRAP = "HARVESTER_TEST_BOOTSTRAP"
_DIRECTORY = "HARVESTER_TEST_DIRECTORY"
_RUN = "HARVESTER_TEST_RUN"

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 6 << 30

FAST = stack.StackOptions(durable=False, kafka_heap_mb=512)


@dataclass(frozen=True, slots=True)
class Servers:
    """`dsn` is an administrator's. Somebody else's servers have to be left as they were found: `given`."""

    dsn: str
    bootstrap: str
    given: bool


class Run:
    """What the beginning process holds for the length of the run."""

    def __init__(self) -> None:
        os.environ[_RUN] = uuid.uuid4().hex[:8]
        self._directory = Path(tempfile.mkdtemp(prefix="harvester-tests-", dir=in_memory()))
        self._directory.chmod(0o755)  # started by root, PostgreSQL runs under another account
        os.environ[_DIRECTORY] = str(self._directory)
        # It gets end-of-file on its standard input when this process is gone: also by SIGKILL or os._exit.
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.reaper", str(self._directory)],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )

    def end(self) -> None:
        """Take everything down."""
        if given := os.environ.get(DSN):
            with psycopg.connect(given, autocommit=True) as connection:
                name = sql.Identifier(template_name())
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
        self._reaper.communicate()


def in_memory() -> Path | None:
    """A directory in memory for the servers' files; None if memory has no room or runs no programs.

    A test's database is 300 small files, which a file system on a disk makes and removes at several times the CPU time.
    """
    try:
        place = os.statvfs(_MEMORY)
        (available_kb,) = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    except (OSError, ValueError):
        return None
    room = min(place.f_bavail * place.f_frsize, int(available_kb) << 10) >= _MEMORY_BYTES
    return _MEMORY if room and not place.f_flag & os.ST_NOEXEC and os.access(_MEMORY, os.W_OK) else None


def start() -> Servers:
    """The servers, running."""
    dsn, bootstrap = os.environ.get(DSN), os.environ.get(BOOTSTRAP)
    if dsn and bootstrap:
        return Servers(dsn, bootstrap, given=True)
    options = dataclasses.replace(FAST, dsn=dsn, bootstrap=bootstrap)
    with prepared():
        info = stack.up(Path(os.environ[_DIRECTORY]), options)
    return Servers(info.dsn, info.bootstrap, given=bool(dsn or bootstrap))


def template_name() -> str:
    """The database of this run that others are cloned from."""
    return f"harvester_template_{os.environ[_RUN]}"
