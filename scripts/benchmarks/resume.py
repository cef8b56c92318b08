"""`resume`: the time until publishing resumes after the leader was stopped gracefully or killed with all its processes.

Two harvesters under a steady load (`harvester pump --rate`). In each round the leader gets SIGTERM, or its process
group SIGKILL, or its supervisor alone, and the time counts from its exit to the next record of its successor in Kafka;
then a new harvester takes the place beside the survivor. In the end everything must have arrived, in order (`harvester
verify`). What limits the time after SIGKILL of all is limits.session_timeout: it is measured with the default, with the
least that a broker permits as it comes, and with less, down to what the harvester's own rules leave room for.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from harvester.bounds import passes
from scripts.benchmarks._place import PARTITIONS, ROOT, Place, command, fresh, harvester
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import wait_until

RATE_PER_S = 600
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """One way to lose a leader, under these settings."""

    number: signal.Signals
    session_s: float
    settings: tuple[str, ...] = ()
    alone: bool = False  # the supervisor, and none of its other processes


def _limits(heartbeat: str, session: str, drain: str) -> tuple[str, ...]:
    return (f"heartbeat_timeout={heartbeat}", f"session_timeout={session}", f"drain_interval={drain}")


CASES = {
    "sigterm": Case(signal.SIGTERM, 6.0),
    # The least that a broker permits as it comes (group.min.session.timeout.ms).
    "sigkill": Case(signal.SIGKILL, 6.0),
    "sigkill_alone": Case(signal.SIGKILL, 6.0, alone=True),
    "sigkill_15s": Case(signal.SIGKILL, 15.0, _limits("5s", "15s", "9500ms")),
    "sigkill_3s": Case(signal.SIGKILL, 3.0, _limits("1s", "3s", "1500ms")),
    # A third of the session for each: trust, a delivery, and the second in which the client looks for expired ones.
    "sigkill_1_8s": Case(signal.SIGKILL, 1.8, _limits("500ms", "1800ms", "1s")),
}


def resume(bench: Bench, samples: Samples) -> None:
    """All cases, `bench.rounds` times each."""
    samples.note("group.min.session.timeout.ms", _least_session_ms(bench.bootstrap))
    for name, case in CASES.items():
        settings = tuple(f"limits.{setting}" for setting in case.settings)
        with fresh(bench) as place:
            found = _Trial(bench, place, case, settings).run()
        for value in found.resumed_s:
            samples.add(f"{name}.resume_s", value)
        if case.number is signal.SIGKILL and not case.alone:
            samples.add(f"{name}.beyond_session_s", max(found.resumed_s) - case.session_s)
        samples.add(f"{name}.repeats", found.repeats)
        samples.add(f"{name}.records", found.records)
        samples.use(name, settings)
        bench.say(f"{name}: resumed after {', '.join(f'{value:.2f}' for value in found.resumed_s)} s")


@dataclass(frozen=True, slots=True)
class _Found:
    resumed_s: list[float]
    records: int
    repeats: int


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    log: Path

    def leads(self) -> bool:
        return "leads as" in self.log.read_text()

    def send(self, number: signal.Signals, *, alone: bool = False) -> None:
        """SIGKILL goes to the whole process group, as when a machine dies, unless the supervisor is to die alone."""
        with suppress(ProcessLookupError):
            (os.killpg if number is signal.SIGKILL and not alone else os.kill)(self.process.pid, number)


@dataclass(slots=True)
class _Trial:
    bench: Bench
    place: Place
    case: Case
    settings: tuple[str, ...]
    _started: int = 0
    _admin: AdminClient = field(init=False)

    def __post_init__(self) -> None:
        self._admin = AdminClient({"bootstrap.servers": self.place.bootstrap, "broker.address.family": "v4"})

    def run(self) -> _Found:
        exits: list[float] = []
        running = [self._start(), self._start()]
        try:
            self._wait(self._are_two, "two members")
            with self._load(), self.place.connect() as connection:
                self._wait_settled(connection)
                for _ in self.bench.each_round():
                    leader = next(each for each in running if each.leads())
                    leader.send(self.case.number, alone=self.case.alone)
                    leader.process.wait(_PATIENCE_S)
                    exits.append(time.time())
                    running.remove(leader)
                    self._wait(running[0].leads, "a successor")
                    self._wait_settled(connection)
                    running.append(self._start())
                    self._wait(self._are_two, "two members")
            self._wait(self._is_empty, "an empty outbox")
        finally:
            for each in running:
                each.send(signal.SIGTERM)
            for each in running:
                try:
                    each.process.wait(_PATIENCE_S)
                finally:
                    each.send(signal.SIGKILL)
        verdict = json.loads(harvester("verify", "-f", str(self.place.config), "--json").splitlines()[-1])
        moments = appended_s(self.place)
        resumed_s = [_resumed_s(moments, *pair) for pair in itertools.pairwise([*exits, math.inf])]
        return _Found(resumed_s, verdict["inserted"], verdict["duplicates"])

    def _start(self) -> _Running:
        self._started += 1
        log = self.bench.place / f"{self.place.name}-{self._started}.log"
        settings = (f"name=h{self._started}", *self.settings, *self.bench.settings)
        arguments = ["--dashboard", "off", "--shards", str(self.bench.shards[-1] if self.bench.shards else 2)]
        arguments += [part for setting in settings for part in ("--set", setting)]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command("start", "-f", str(self.place.config), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=ROOT,
                process_group=0,
            )
        return _Running(process, log)

    @contextmanager
    def _load(self) -> Iterator[None]:
        arguments = ["--topic", self.place.name, "--records", "100000000", "--rate", str(RATE_PER_S)]
        arguments += ["--keys", "100", "--rows-per-transaction", "5", "--writers", "2"]
        pump = subprocess.Popen(
            command("pump", "-f", str(self.place.config), *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        try:
            yield
        finally:
            pump.send_signal(signal.SIGINT)
            pump.wait(_PATIENCE_S)

    def _are_two(self) -> bool:
        try:
            group = self._admin.describe_consumer_groups([self.place.name])[self.place.name].result(30)
        except KafkaException as error:
            if not passes(error.args[0]):
                raise
            return False  # the broker has just started
        return group.state.name == "STABLE" and len(group.members) == 2

    def _is_empty(self) -> bool:
        with self.place.connect() as connection:
            return connection.execute("SELECT count(*) FROM outbox").fetchall() == [(0,)]

    def _wait_settled(self, connection: psycopg.Connection[tuple[int]]) -> None:
        """Until as many more records as two seconds bring have come and gone."""
        query = "SELECT (SELECT last_value FROM outbox_id_seq) - (SELECT count(*) FROM outbox)"

        def settled() -> int:
            return connection.execute(query).fetchall()[0][0]

        goal = settled() + 2 * RATE_PER_S
        self._wait(lambda: settled() >= goal, "records published")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, f"{self.place.name}: {what}", _PATIENCE_S)


def _resumed_s(moments: list[float], ended: float, next_ended: float) -> float:
    """Seconds from an exit until its successor publishes.

    That is the end of the longest gap before the next exit: shards whose supervisor died alone finish what is on the
    wire first.
    """
    last = min(next_ended, ended + _PATIENCE_S / 4)
    after = [moment for moment in moments if ended <= moment <= last]
    return max(itertools.pairwise([ended, *after]), key=lambda gap: gap[1] - gap[0])[1] - ended


def appended_s(place: Place) -> list[float]:
    """When each record was appended, in order."""
    options = {"bootstrap.servers": place.bootstrap, "broker.address.family": "v4", "group.id": "bench"}
    consumer = Consumer({**options, "enable.partition.eof": True})  # the last offset may be a transaction's marker
    try:
        left = set(range(PARTITIONS))
        consumer.assign([TopicPartition(place.name, partition, 0) for partition in left])
        found: list[float] = []
        while left:
            for message in consumer.consume(5_000, 1.0):
                error = message.error()
                if error is None:
                    found.append(message.timestamp()[1] / 1000)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition() or 0)
                else:
                    raise SystemExit(f"{place.name}: {error.str()}")
        return sorted(found)
    finally:
        consumer.close()


def _least_session_ms(bootstrap: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap, "broker.address.family": "v4"})
    broker = str(next(iter(admin.list_topics(timeout=30).brokers)))
    (described,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, broker)]).values()
    return int(described.result(30)["group.min.session.timeout.ms"].value)


SCENARIOS = {"resume": Scenario(resume, "from the leader's exit to the next record: stopped, or killed", chosen=True)}
