"""A server of a test file's own, to be stopped, killed and frozen; the other server is the run's shared one.

    @pytest.fixture(scope="module")
    def postgres(servers): with private(servers, "postgres") as server: yield server

One for each file: a private PostgreSQL takes some two seconds to come up, a private Kafka some eight.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg

from harvester import stack
from harvester.outbox import schema
from harvester.stack import kafka as stack_kafka
from harvester.stack.processes import children_of, identify
from harvester.stack.state import ServerName

from .class_data import prepared
from .databases import TABLE, fresh_database
from .harvesting import Scene
from .servers import Servers, in_memory
from .topics import Topics


class Private:
    """One server of our own. `servers` are the addresses of both."""

    def __init__(self, directory: Path, name: ServerName, servers: Servers, settings: Mapping[str, str]) -> None:
        self.directory, self.name, self._settings = directory, name, settings
        options = stack.StackOptions(
            durable=False,
            kafka_heap_mb=400,
            dsn=None if name == "postgres" else servers.dsn,
            bootstrap=None if name == "kafka" else servers.bootstrap,
        )
        with self._configured():
            self.info = stack.up(directory, options)
        self.servers = Servers(self.info.dsn, self.info.bootstrap, given=False)

    def stop(self, *, kill: bool = False) -> None:
        """Shut it down in order, or kill all of its processes."""
        assert stack.stop(self.directory, self.name, kill=kill)

    def start(self) -> None:
        """Start it again, at the same address."""
        with self._configured():
            self.info = stack.start(self.directory, self.name)
        # Somebody else may have been given the port meanwhile; the test can only be repeated then.
        assert (self.info.dsn, self.info.bootstrap) == (self.servers.dsn, self.servers.bootstrap), "the port is taken"

    def freeze(self) -> None:
        """SIGSTOP to every one of its processes."""
        for pid in self._pids():
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        for pid in self._pids():
            _signal(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        pid = self.info.postgres_pid if self.name == "postgres" else self.info.kafka_pid
        assert pid is not None
        process = identify(pid)
        assert process is not None
        return [pid, *(child.pid for child in children_of(process))]

    @contextmanager
    def _configured(self) -> Iterator[None]:
        original = stack_kafka.properties

        def properties(**given: Any) -> dict[str, str]:
            return {**original(**given), **self._settings}

        with prepared(), mock.patch.object(stack_kafka, "properties", properties):
            yield

    @contextmanager
    def scene(self, directory: Path, partitions: int = 4) -> Iterator[Scene]:
        """An outbox and a topic on these servers."""
        with fresh_database(self.servers, "template0") as dsn:
            with psycopg.connect(dsn) as connection:
                schema.init(connection, TABLE)
            topic = Topics(self.servers).make(partitions)
            made = Scene(self.servers, dsn, topic, f"test-group-{uuid.uuid4().hex[:12]}", directory)
            try:
                yield made
            finally:
                made.db.close()


@contextmanager
def private(servers: Servers, name: ServerName, settings: Mapping[str, str] | None = None) -> Iterator[Private]:
    """Start one; `settings` are the broker's. It goes with this process, however that ends."""
    directory = Path(tempfile.mkdtemp(prefix=f"harvester-{name}-", dir=in_memory()))
    directory.chmod(0o755)  # started by root, PostgreSQL runs under another account
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.support.reaper", str(directory)],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        yield Private(directory, name, servers, settings or {})
    finally:
        reaper.communicate()
        shutil.rmtree(directory, ignore_errors=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # a session that has just ended
        os.kill(pid, number)
