"""The main job of the demo: a real `harvester start` at work while the pump writes, then a graceful stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvester.outbox.connect import Connection
    from harvester.verify.check import Report
    from harvester.verify.load import Load
    from harvester_cli.demo_place import Place

START_S = 60.0  # spawning shards and the first election
STOP_S = 30.0  # the drain and leaving the group, many times over
STUCK_S = 60.0  # a backlog that does not move for so long is given up
_LOOK_S = 0.1


class Relay:
    """`harvester start` as a process, in a process group of its own: Ctrl-C reaches us, and only we signal it."""

    def __init__(self, place: Place, *extra: str, dashboard: bool = False, output: Any = None) -> None:
        command = [sys.executable, "-m", "harvester_cli", "start", "-f", str(place.config_path), *extra]
        command += ["--dashboard", "on" if dashboard else "off"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, process_group=0)

    def check(self) -> None:
        """Raise when it has ended although nobody asked it to."""
        if self._process.poll() is not None:
            raise _ended("harvester start", self._process.returncode)

    def wait(self, timeout_s: float) -> None:
        """Wait for it to end by itself, with exit code 0."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return
        if code != 0:
            raise _ended("harvester start", code)

    def stop(self) -> None:
        """Stop it gracefully; it has to end with exit code 0."""
        from harvester.errors import HarvesterError

        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise HarvesterError(
                f"harvester start did not stop within {STOP_S:g} s of SIGTERM and was killed",
                hint="its log lines above tell what it waited for; please report it",
            ) from None
        if code != 0:
            raise _ended("harvester start", code)

    def end(self) -> None:
        """Whatever happened, it is gone afterwards. The shards of a killed supervisor end by themselves."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_S / 3)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def _running(relay: Relay) -> Iterator[Relay]:
    try:
        yield relay
    finally:
        relay.end()


def perform(
    place: Place,
    load: Load,
    *,
    shards: int,
    seconds: float | None,
    dashboard: bool,
    output: Any,
    say: Callable[[str], None],
) -> Report:
    """Pump while the harvester runs, stop it, drain what is left, and judge.

    `seconds` None pumps the load to its end, however long that takes; else the pump stops then. `output` is where
    the harvester's standard output goes (None: ours). `say` is not used while a dashboard is up.
    """
    import threading

    from harvester.outbox.connect import connect
    from harvester.verify.check import verify
    from harvester.verify.pump import pump

    config = place.config
    arguments = ("--shards", str(shards))
    with connect(config.dsn, application_name="harvester demo") as connection:
        say(f"starting the harvester with {shards} shards")
        with _running(Relay(place, *arguments, dashboard=dashboard, output=output)) as relay:
            _wait_for_leader(connection, place, relay, shards)
            if not dashboard:
                say(f"pumping {load.records:,} records")
            stop = threading.Event()
            deadline = None if seconds is None else time.monotonic() + seconds

            def watch(_records: int) -> None:
                relay.check()
                if deadline is not None and time.monotonic() > deadline:
                    stop.set()

            pump(config.dsn, config.table, load, stop=stop, on_progress=watch)
            _wait_until_empty(connection, place, relay)
            relay.stop()
        if _standing(connection, place)[0]:
            say("draining what is left")
            with _running(Relay(place, *arguments, "--until-empty", output=output)) as relay:
                relay.wait(STUCK_S)
    say("verifying")
    return verify(config.dsn, config.table, config.common_options(), header=config.record_header)


def _wait_for_leader(connection: Connection, place: Place, relay: Relay, shards: int) -> None:
    """Until somebody has taken the first term and every shard has its session, so that starting up does not count
    as latency."""
    from harvester.errors import LeadershipError

    # The database is the demo's own: besides ours, every session in it is the harvester's.
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    deadline = time.monotonic() + START_S
    while not _one(connection, f"SELECT term > 0 AND ({sessions}) > {shards} FROM {place.config.table.term}"):
        relay.check()
        if time.monotonic() > deadline:
            raise LeadershipError(
                f"the harvester did not become leader of {shards} shards within {START_S:g} s",
                hint="its log lines above tell why",
            )
        time.sleep(_LOOK_S)


def _wait_until_empty(connection: Connection, place: Place, relay: Relay) -> None:
    """Until no row is left, or nothing has moved for STUCK_S: the verdict will tell what stayed."""
    before, since = _standing(connection, place), time.monotonic()
    while before[0]:
        relay.check()
        time.sleep(_LOOK_S)
        now = _standing(connection, place)
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            return


def _standing(connection: Connection, place: Place) -> tuple[int, int]:
    """How many rows stand in the outbox, and the smallest id."""
    from harvester.outbox.connect import database_errors

    with database_errors("look at the outbox"):
        row = connection.execute(f"SELECT count(*), coalesce(min(id), 0) FROM {place.config.table.sql}").fetchone()
    return (row[0], row[1]) if row else (0, 0)


def _one(connection: Connection, query: str) -> Any:
    from harvester.outbox.connect import database_errors

    with database_errors("look at the term"):
        row = connection.execute(query).fetchone()
    return row[0] if row else None


def _ended(what: str, code: int) -> Exception:
    from harvester.errors import HarvesterError

    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return HarvesterError(f"{what} {how} in the middle of the demo", hint="its own message stands above")
