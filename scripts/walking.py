"""Prints the way of one record through the code, from the mark that reads it to the mark after its purge.

The functions are the real ones, and so is PostgreSQL. Kafka's client is replaced by a few lines that acknowledge at
once, and threads and processes by this script, which calls what each of them would call next: supervisor and shard
live in one process here, with a real pipe between them. So nothing but the record's own way is recorded.

A *file* counts when a function of it was entered, an *object* when a method of it was, and a *call across files* when
a function of one file called one of another.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg

from harvester import FakeGroup, OutboxRecord, Stasher, stack
from harvester.announcer import Announcer
from harvester.config import Config
from harvester.delivery.lane import Lane, Witness
from harvester.delivery.progress_topic import ProgressTopic
from harvester.failpoints import VARIABLE
from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from harvester.relay.core.frames import Ready, Remark
from harvester.relay.core.messages import Mark, TakeTerm
from harvester.relay.exactly_once import Transactor
from harvester.relay.ipc import Channel, ShardPipe, set_in_flight
from harvester.relay.shard import Shard
from harvester.relay.transaction_intake import TransactionIntake
from harvester.status_recorder import StatusRecorder
from harvester.wiring import Parts, assemble, shard_specs

ROOT = Path(__file__).parents[1]
PACKAGE, COMMANDS = str(ROOT / "harvester") + os.sep, str(ROOT / "cli") + os.sep


class Way:
    """What was called while a step was recorded."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, list[tuple[str | None, str, str]]]] = []
        self.objects: set[tuple[str, int]] = set()
        self._kept: list[object] = []  # so that no two objects get the same id
        self._seen: set[int] = set()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record what happens within, on this thread."""
        self.steps.append((name, []))
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        file, name = _place(frame), frame.f_code.co_qualname
        if file is None or name.rpartition(".")[2].startswith("<") or id(frame) in self._seen:
            return
        if frame.f_code.co_flags & 0x20:  # a generator is entered with each value
            self._seen.add(id(frame))
            self._kept.append(frame)
        caller = frame.f_back
        while caller is not None and _place(caller) is None:
            caller = caller.f_back
        self.steps[-1][1].append((_place(caller) if caller is not None else None, file, name))
        owner = frame.f_locals.get("self")
        if owner is not None and type(owner).__module__.startswith("harvester"):
            self.objects.add((type(owner).__name__, id(owner)))
            self._kept.append(owner)

    def figures(self) -> dict[str, int]:
        """The counts."""
        calls = [call for _, made in self.steps for call in made]
        return {
            "files": len({file for _, file, _ in calls}),
            "objects": len(self.objects),
            "calls": len(calls),
            "calls_across_files": sum(1 for caller, file, _ in calls if caller is not None and caller != file),
        }

    def text(self, *, calls: bool) -> str:
        """Each step with its files in the order in which they were entered; with `calls` what was called, too."""
        lines = []
        for name, made in self.steps:
            lines.append(f"{name}")
            if calls:
                lines += [f"    {file}: {function}" for _, file, function in made]
            else:
                lines += [f"    {file}" for file in dict.fromkeys(file for _, file, _ in made)]
        return "\n".join(lines)


def _place(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return next((path[len(root) :] for root in (PACKAGE, COMMANDS) if path.startswith(root)), None)


# -- what stands in for Kafka, threads and processes


class Message:
    """An acknowledged record."""

    def offset(self) -> int:
        """Where it stands in its log."""
        return 0


class Producer:
    """Acknowledges everything, when it is polled or flushed."""

    def __init__(self) -> None:
        self._reports: list[Any] = []

    def produce(
        self, _topic: str, _value: Any, _key: Any, _partition: int = -1, report: Any = None, *_more: Any
    ) -> None:
        """Take a record."""
        self._reports.append(report)

    def poll(self, _timeout: float = 0) -> int:
        """Deliver."""
        reports, self._reports = self._reports, []
        for report in reports:
            report(None, Message())
        return len(reports)

    def flush(self, _timeout: float = 0) -> int:
        """Deliver."""
        self.poll()
        return 0

    def begin_transaction(self) -> None:
        """Begin one."""

    def commit_transaction(self, _timeout: float) -> None:
        """Commit it."""


class Standins:
    """The failpoints of this script: no places, and the producer above."""

    def hit(self, _place: str, **_facts: Any) -> None:
        """Go on."""

    def producer(self, _options: dict[str, Any]) -> Producer:
        """One that acknowledges."""
        return Producer()


class Turns(threading.Event):
    """An event that is set after it was asked so often."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self._left = turns

    def is_set(self) -> bool:
        """Whether that is over."""
        self._left -= 1
        return self._left < 0


class Process:
    """A shard's process, as the pool sees it."""

    sentinel, pid = -1, 0

    def __init__(self, channel: Channel) -> None:
        self.channel = channel


class Host:
    """Whom the parts are part of."""

    def emptied(self) -> None:
        """Go on."""

    def fail(self, error: BaseException) -> None:
        """Nothing may fail here."""
        raise error


class Scene:
    """A harvester with one shard whose threads do not run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        log = logging.getLogger("walk")
        announcer = Announcer(None, log)
        group = FakeGroup()
        recorder = StatusRecorder(config, announcer, log)
        self.parts: Parts = assemble(
            config, group=group, announcer=announcer, recorder=recorder, host=Host(), log_of=lambda _shard: log
        )
        self.supervisor, self.marker = self.parts.supervisor, self.parts.marker
        assert self.marker.mode is not None
        self.marker.mode.find = lambda _recorded: ProgressTopic("walk", "walk", 1)
        to_shard, from_supervisor = os.pipe()
        to_supervisor, from_shard = os.pipe()
        shared = self.supervisor._shared
        set_in_flight(shared, 0, config.limits.max_in_flight_records)  # so that nothing waits for the record
        self.supervisor.pool.slots[0].process = Process(Channel(to_supervisor, from_supervisor))  # type: ignore[assignment]
        self.shard = Shard(shard_specs(config)[0], ShardPipe(to_shard, from_shard), shared, supervisor_fd=-1)
        self.shard.session.close = lambda: None  # type: ignore[method-assign] # the purger's thread ends each time

    def turn(self) -> None:
        """What the supervisor's thread does when it is woken."""
        while self.supervisor._inbox:
            self.supervisor._inbox.popleft()(time.monotonic())

    def hear(self) -> None:
        """What it does when a shard has said something."""
        self.supervisor._hear(0, time.monotonic())

    def obey(self) -> None:
        """What the shard's main thread does when a frame is there."""
        self.shard._read()

    @property
    def transactor(self) -> Transactor:
        """The shard's."""
        assert self.shard.transactor is not None
        return self.shard.transactor

    def answer(self) -> None:
        """Have the transactor answer a remark; its lanes are open already."""
        intake = self.shard.records
        if not isinstance(intake, TransactionIntake):
            return
        frame = intake.pending
        assert isinstance(frame, Remark)
        if frame.term is not None and intake.lane is None:
            patient = {"retry.backoff.ms": "2000"}  # so that a commit is clear however slow the machine is
            idle, lane = (Lane(number, "walk", Producer(), Witness({}), patient) for number in range(2))
            intake.batches.most_named = 1000
            intake.lane, self.transactor._idle = lane, idle
            self.transactor._opened = (frame.term, frame.lanes)
            assert frame.incarnation is not None
            self.transactor._writer.begin(frame.term, frame.incarnation)
        self.transactor._answer(frame)

    def command(self) -> Any:
        """What the marker has to do next."""
        return self.marker._commands.popleft()

    def lead(self) -> None:
        """Until the first mark has found nothing, and the second one is asked for."""
        self.supervisor.trust.extend(time.clock_gettime(time.CLOCK_BOOTTIME) + 600)
        self.shard._pipe.send(Ready(os.getpid()))
        self.hear()
        self.obey()
        if isinstance(self.shard.records, TransactionIntake):
            self.answer()
        self.hear()
        self.supervisor.acquire()
        self.turn()
        while not self.marker._commands:
            self.obey()
            self.answer()
            self.hear()
        take = self.command()
        assert isinstance(take, TakeTerm)
        self.marker._take(take)
        self.turn()
        while not self.marker._commands:
            self.obey()
            self.answer()
            self.hear()
        self.shard.session.ready()
        self.hear()  # the session is named in the term row by the next mark, which is that of the first way
        self.marker._mark(self.command())
        self.turn()


def record(config: Config) -> Way:
    """The way of a record; not that of the first one, for which statements are prepared and sessions named."""
    scene = Scene(config)
    scene.lead()
    travel(scene, Way())
    way = Way()
    travel(scene, way)
    scene.marker._session.close()
    return way


def travel(scene: Scene, way: Way) -> None:
    """Write a row, and bring it to Kafka and out of the table."""
    with psycopg.connect(scene.config.dsn) as connection:
        Stasher("outbox").stash(connection, OutboxRecord(topic="t", key="k", value="v"))
    mark = scene.command()
    assert isinstance(mark, Mark)
    with way.step("the marker reads it"):
        scene.marker._mark(mark)
    with way.step("the supervisor dispatches it"):
        scene.turn()
    with way.step("the shard takes it"):
        scene.obey()
    sender = scene.shard.records
    if isinstance(sender, TransactionIntake):
        assert sender.lane is not None
        with way.step("the transactor publishes it"):
            scene.transactor._transact(sender.lane, 0.0)
    else:
        with way.step("the delivery thread hears that Kafka has it"):
            scene.shard._producer.poll()
            sender.collect()
    scene.shard.purger._ended = Turns(3)
    with way.step("the purger deletes it"):
        scene.shard.purger.run()
    with way.step("the supervisor hears that it is settled"):
        scene.hear()
    with psycopg.connect(scene.config.dsn) as connection:
        left = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert left == (0,)
    assert not len(scene.supervisor.machine.ledger)


def failpoints() -> Standins:
    """What HARVESTER_TEST_HOOKS names."""
    return Standins()


@contextmanager
def database() -> Iterator[str]:
    """A PostgreSQL with an outbox; its DSN."""
    with tempfile.TemporaryDirectory(prefix="harvester-walk-") as place:
        options = stack.StackOptions(durable=False, bootstrap="localhost:1")
        try:
            yield stack.up(Path(place), options).dsn
        finally:
            stack.down(Path(place))


def show(what: str, description: str, record: Callable[[], Way]) -> int:
    """The command line of a walk other than a record's, `--claim` or `--command`."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/walk --{what}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", action="store_true", help="every call, not only the files")
    parser.add_argument("--json", action="store_true", help="the figures alone, for programs")
    options = parser.parse_args()
    way = record()
    figures = way.figures()
    if options.json:
        sys.stdout.write(json.dumps({what: figures}) + "\n")
    else:
        counts = ", ".join(f"{count} {of.replace('_', ' ')}" for of, count in figures.items())
        sys.stdout.write(f"== {what}\n{way.text(calls=options.calls)}\n{what}: {counts}\n")
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="scripts/walk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", action="store_true", help="every call, not only the files")
    parser.add_argument("--json", action="store_true", help="the figures alone, for programs")
    options = parser.parse_args()
    os.environ[VARIABLE] = "scripts.walking:failpoints"
    found = {}
    with database() as dsn:
        for delivery in ("at-least-once", "exactly-once"):
            name = f"walk_{uuid.uuid4().hex[:8]}"
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}".encode())
            own = psycopg.conninfo.make_conninfo(dsn, dbname=name)
            with psycopg.connect(own, autocommit=True) as connection:
                init(connection, OutboxTable.parse("outbox"))
            config = Config(
                leader_group_id="walk",
                data_source=own,
                delivery=delivery,
                limits={"shards": 1},  # type: ignore[arg-type]
            )
            way = record(config)
            found[delivery] = way.figures()
            if not options.json:
                sys.stdout.write(f"== {delivery}\n{way.text(calls=options.calls)}\n")
    for delivery, figures in found.items():
        if not options.json:
            sys.stdout.write(
                f"{delivery}: " + ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in figures.items()) + "\n"
            )
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    from scripts import walking

    sys.exit(walking.main())
