"""`harvester demo`: perform the main job on real servers, from nothing to a verdict, and leave nothing behind.

`prepared` sets up servers, a database with an outbox, a topic and a configuration; `perform` lets a real `harvester
start` move what the pump writes, stops it gracefully, drains the rest and judges the result.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester.errors import BrokerError, HarvesterError, LeadershipError, VerificationFailed
from harvester_cli.options import JsonOption
from harvester_cli.output import print_json, print_rich

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.outbox.connection import Connection
    from harvester.stack import StackInfo
    from harvester.verify.check import VerifyReport
    from harvester.verify.load import Load

DSN = "HARVESTER_TEST_DSN"
BOOTSTRAP = "HARVESTER_TEST_BOOTSTRAP"
PARTITIONS = 8


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """Everything the demo uses. `config_path` is read by `harvester start -f`; `own_servers`: started here."""

    directory: Path
    config_path: Path
    config: Config
    topic: str
    own_servers: bool


@contextmanager
def prepared(say: Callable[[str], None], *, keep: bool) -> Iterator[DemoPaths]:
    """Set everything up; remove it again at the end, however it ends, unless `keep`.

    HARVESTER_TEST_DSN and HARVESTER_TEST_BOOTSTRAP can name the user's own servers; in those, only what was created
    here is removed. Raises StackError, DatabaseUnavailable, BrokerError.
    """
    from harvester import stack

    name = f"harvester-demo-{uuid.uuid4().hex[:8]}"
    # Started by root, PostgreSQL runs under another account, which must be able to enter the directory.
    directory = Path(tempfile.mkdtemp(prefix="harvester-demo-"))
    directory.chmod(0o755)
    place: DemoPaths | None = None
    try:
        options = stack.StackOptions(dsn=os.environ.get(DSN) or None, bootstrap=os.environ.get(BOOTSTRAP) or None)
        info = stack.up(directory, options, progress=say)
        place = _describe(info, directory, name, own_servers=options.dsn is None and options.bootstrap is None)
        say(f"creating database and topic {name}")
        _create(info, place, name)
        yield place
    finally:
        with _signals(_ignore):
            if keep:
                _explain(say, directory, place)
            else:
                say("cleaning up")
                if place is not None and not place.own_servers:
                    _remove(info, place, name)
                stack.down(directory, delete=True)
                shutil.rmtree(directory, ignore_errors=True)


def _describe(info: StackInfo, directory: Path, name: str, *, own_servers: bool) -> DemoPaths:
    from psycopg.conninfo import make_conninfo

    from harvester.config import load_config

    settings = {
        "name": "demo",
        "leader_group_id": name,
        "data_source": make_conninfo(info.dsn, dbname=name),
    }
    path = directory / "harvester.toml"
    path.touch(mode=0o600)  # the DSN may contain a password
    # A JSON string is a TOML string; $ introduces a variable in it.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["[base_kafka_config]", f'"bootstrap.servers" = {json.dumps(info.bootstrap)}']
    path.write_text("\n".join(lines).replace("$", "$$") + "\n")
    return DemoPaths(directory, path, load_config(path), topic=name, own_servers=own_servers)


def _create(info: StackInfo, place: DemoPaths, name: str) -> None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    from harvester.bounds import SILENT, answer
    from harvester.outbox.connection import connect, database_errors
    from harvester.outbox.schema import init

    with connect(info.dsn, application_name="harvester demo") as connection, database_errors(f"create database {name}"):
        connection.execute(f'CREATE DATABASE "{name}"')
    with connect(place.config.dsn, application_name="harvester demo") as connection:
        init(connection, place.config.table, notify=True)
    # With the broker's clock, read when a record is appended, the measured latency ends there.
    config = {"message.timestamp.type": "LogAppendTime"}
    try:
        admin = AdminClient({**place.config.common_options(), **SILENT})
        answer(admin.create_topics([NewTopic(name, PARTITIONS, -1, config=config)])[name], 30)
    except KafkaException as error:
        raise BrokerError(f"the topic {name} could not be created: {error.args[0]}") from error


def _remove(info: StackInfo, place: DemoPaths, name: str) -> None:
    """Best effort: what cannot be removed is harmless, and the verdict is more important than a complaint."""
    from concurrent.futures import wait

    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    from harvester.bounds import SILENT
    from harvester.outbox.connection import connect, database_errors

    with (
        suppress(HarvesterError),
        connect(info.dsn, application_name="harvester demo") as connection,
        database_errors(f"drop database {name}"),
    ):
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
    with suppress(KafkaException):
        admin = AdminClient({**place.config.common_options(), **SILENT})
        removed = [
            *admin.delete_topics([name, place.config.leader_topic]).values(),
            *admin.delete_consumer_groups([name]).values(),
        ]
        wait(removed, timeout=30)


def _explain(say: Callable[[str], None], directory: Path, place: DemoPaths | None) -> None:
    if place is None:
        say(f"kept {directory}")
        return
    say(f"kept; inspect it with: harvester verify -f {place.config_path}")
    if place.own_servers:
        say(f"remove it with: harvester stack down --delete -d {directory}")


@contextmanager
def _signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let this handle the signals that end a process, including a terminal that hangs up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _ignore(_number: int, _frame: Any) -> None:
    """During the clean-up, which is limited in time: half of it would leave servers behind. Unlike SIG_IGN, not
    inherited.
    """


START_S = 60.0  # for starting shards and the first election
STOP_S = 30.0  # much more than draining and leaving the group take
STUCK_S = 60.0  # a backlog that does not move for this long is given up
_LOOK_S = 0.1


class DemoRelay:
    """`harvester start` as a process, ended with the `with` block.

    It has its own process group: Ctrl-C reaches us, and only we signal it.
    """

    def __init__(self, place: DemoPaths, *extra: str, dashboard: bool = False, output: Any = None) -> None:
        command = [sys.executable, "-P", "-m", "harvester_cli", "start", "-f", str(place.config_path), *extra]
        command += ["--dashboard", "on" if dashboard else "off"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, process_group=0)

    def check(self) -> None:
        """Raise if it has ended although nobody asked it to."""
        if self._process.poll() is not None:
            raise _ended("harvester start", self._process.returncode)

    def wait(self, timeout_s: float) -> bool:
        """Wait for it to end, with exit code 0; False if it had to be killed."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return False
        if code != 0:
            raise _ended("harvester start", code)
        return True

    def stop(self) -> None:
        """Stop it gracefully; it must end with exit code 0."""
        self._process.send_signal(signal.SIGTERM)
        if not self.wait(STOP_S):
            raise HarvesterError(
                f"harvester start did not stop within {STOP_S:g} s of SIGTERM and was killed",
                hint="its log lines above show what it waited for; please report this",
            )

    def end(self) -> None:
        """Whatever happened, it is gone afterwards, and so are its shards: those of a killed supervisor end by
        themselves, but what they still send would create a topic again that has just been deleted.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S / 3)
        with suppress(ProcessLookupError):  # there are none, as after every end of its own accord
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> DemoRelay:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()


def perform(
    place: DemoPaths,
    load: Load,
    *,
    shards: int,
    seconds: float | None,
    dashboard: bool,
    output: Any,
    say: Callable[[str], None],
) -> VerifyReport:
    """Pump while the harvester is running, stop it, drain what is left, and judge the result.

    `seconds` None pumps the whole load, however long that takes; otherwise the pump stops then. `output` is where the
    harvester's standard output goes (None: ours). `say` is not used while a dashboard is shown.
    """
    from harvester.outbox.connection import connect
    from harvester.verify.check import verify
    from harvester.verify.pump import pump

    config = place.config
    arguments = ("--shards", str(shards))
    with connect(config.dsn, application_name="harvester demo") as connection:
        say(f"starting the harvester with {shards} shards")
        with DemoRelay(place, *arguments, dashboard=dashboard, output=output) as relay:
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
            with DemoRelay(place, *arguments, "--until-empty", output=output) as relay:
                relay.wait(STUCK_S)
    say("verifying")
    return verify(
        config.dsn,
        config.table,
        config.common_options(),
        header=config.record_header,
        claim_check=config.oversize.store_settings,
    )


def _wait_for_leader(connection: Connection, place: DemoPaths, relay: DemoRelay, shards: int) -> None:
    """Wait until the first term is taken and every shard has its session, so that starting up does not count as
    latency.
    """
    # The database is the demo's own: all sessions in it except ours are the harvester's.
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    deadline = time.monotonic() + START_S
    query = f"SELECT term > 0 AND ({sessions}) > {shards} FROM {place.config.table.term}"
    while _one(connection, query) != (True,):
        relay.check()
        if time.monotonic() > deadline:
            raise LeadershipError(
                f"the harvester did not become leader of {shards} shards within {START_S:g} s",
                hint="its log lines above show why",
            )
        time.sleep(_LOOK_S)


def _wait_until_empty(connection: Connection, place: DemoPaths, relay: DemoRelay) -> None:
    """Wait until no row is left, or nothing has moved for STUCK_S: the verdict will show what remained."""
    before, since = _standing(connection, place), time.monotonic()
    while before[0]:
        relay.check()
        time.sleep(_LOOK_S)
        now = _standing(connection, place)
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            return


def _standing(connection: Connection, place: DemoPaths) -> tuple[int, int]:
    """The number of rows in the outbox, and their smallest id."""
    count, smallest = _one(connection, f"SELECT count(*), coalesce(min(id), 0) FROM {place.config.table.sql}")
    return count, smallest


def _one(connection: Connection, query: str) -> Any:
    from harvester.outbox.connection import database_errors

    with database_errors("look at the outbox"):
        return connection.execute(query).fetchone()


def _ended(what: str, code: int) -> Exception:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return HarvesterError(f"{what} {how} in the middle of the demo", hint="its own message is above")


DEFAULT_SECONDS = 3.0
DEFAULT_RATE = 500.0
_TRANSACTIONS_PER_S = 250  # what a small machine commits while running a broker and a harvester, with NOTIFY
_ROWS_UNBOUND = 25


def demo(
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long to pump; with --records the pump continues until it is done.")
    ] = DEFAULT_SECONDS,
    records: Annotated[int | None, typer.Option(min=0, help="Records to pump.")] = None,
    keys: Annotated[int, typer.Option(min=1, help="Number of keys.")] = 1_000,
    rate: Annotated[
        float | None,
        typer.Option(help=f"Records per second (default: {DEFAULT_RATE:g}; with --records as fast as possible)."),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Shard processes of the harvester.")] = 8,
    keep: Annotated[bool, typer.Option("--keep", help="Keep servers, database and topic for inspection.")] = False,
    json_: JsonOption = False,
) -> None:
    """Start servers, run a harvester under load, stop it, verify, clean up.

    On a terminal the harvester shows its dashboard. HARVESTER_TEST_DSN and HARVESTER_TEST_BOOTSTRAP can name your own
    servers to use. With --json the last line of the output is the verdict. Exits with 0 only if nothing is lost or out
    of order.
    """
    from harvester_cli.dashboard.live import should_show
    from harvester_cli.verify import answer, render

    load = _load(records, rate, seconds, keys)
    dashboard = not json_ and should_show("auto", sys.stdout)

    def say(text: str) -> None:
        # A terminal that has hung up must not prevent the clean-up.
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    with _signals(signal.default_int_handler):  # like Ctrl-C: everything is cleaned up
        with prepared(say, keep=keep) as place:
            report = perform(
                place,
                replace(load, topics=(place.topic,)),
                shards=shards,
                seconds=seconds if records is None else None,
                dashboard=dashboard,
                output=sys.stderr if json_ else None,
                say=say,
            )
        if json_:
            print_json(report.summary())
        else:
            print_rich(render(report))
    if not (report.verdict.holds and report.verdict.final):
        raise VerificationFailed(answer(report), hint="run it with --keep to inspect what it left")


def _load(records: int | None, rate: float | None, seconds: float, keys: int) -> Load:
    """Some of everything that makes order difficult: concurrent writers, late commits, rollbacks."""
    from harvester.verify.load import Load

    if records is None:
        rate = DEFAULT_RATE if rate is None else rate
        records = max(1, round(rate * seconds))
    return Load(
        records=records,
        topics=("demo",),
        keys=keys,
        rate_per_s=rate,
        rows_per_transaction=_ROWS_UNBOUND if rate is None else max(1, min(100, round(rate / _TRANSACTIONS_PER_S))),
        writers=4,
        late=0.01,
        rollbacks=0.01,
    )
