"""A physical standby of a private PostgreSQL: it can be left behind, and promoted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from harvester.stack import postgres
from harvester.stack.processes import run
from harvester.stack.stack import free_ports

from .private import Private
from .wait import eventually


class Standby:
    """A copy that follows `primary`. `db` is a session with it, `address` its host:port."""

    def __init__(self, primary: Private, directory: Path) -> None:
        pid = primary.info.postgres_pid
        assert pid is not None
        programs = Path(f"/proc/{pid}/exe").readlink().parent  # what the primary runs, reachable for its account
        place = postgres.choose_place(directory, None)
        place.home.mkdir(exist_ok=True)
        if place.account is not None:
            os.chown(place.home, place.account.uid, place.account.gid)
        command = [
            *(str(programs / "pg_basebackup"), "--dbname", primary.servers.dsn, "--pgdata", str(place.data)),
            *("--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"),
        ]
        run(
            command,
            what="pg_basebackup",
            timeout_s=60,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            cwd=place.home,
            run_as=place.account,
        )
        (port,) = free_ports(1, [])
        self._home = place.home
        self.address = f"127.0.0.1:{port}"
        self._process = postgres.launch(place, programs, port=port, durable=False)
        self.db: psycopg.Connection[Any]

        def connected() -> bool:
            try:
                self.db = psycopg.connect(postgres.dsn(port), autocommit=True)
            except psycopg.OperationalError:
                return False
            return True

        try:
            eventually(connected, what="the standby")
        except BaseException:
            self.end()
            raise

    def leave_behind(self, primary: psycopg.Connection[Any]) -> None:
        """Stop following once everything that `primary` has written by now is here."""
        lsn = primary.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert lsn is not None
        eventually(lambda: self._one("SELECT pg_last_wal_replay_lsn() >= %s", lsn[0]), what="the standby caught up")
        self.db.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.db.execute("SELECT pg_reload_conf()")
        eventually(lambda: self._one("SELECT count(*) = 0 FROM pg_stat_wal_receiver"), what="the end of replication")

    def promote(self) -> None:
        """It takes writes from now on, on a timeline of its own."""
        assert self._one("SELECT pg_promote(true, 60)")

    def end(self) -> None:
        """Kill it and remove what it wrote, which may stand outside of the test's directory."""
        postgres.halt(self._process, kill=True)
        shutil.rmtree(self._home, ignore_errors=True)

    def _one(self, query: str, *parameters: object) -> Any:
        row = self.db.execute(query, parameters).fetchone()
        assert row is not None
        return row[0]


@contextmanager
def standby_of(primary: Private, directory: Path) -> Iterator[Standby]:
    """Start one that follows."""
    made = Standby(primary, directory)
    try:
        yield made
    finally:
        made.db.close()
        made.end()
