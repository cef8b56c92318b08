"""docs/migration.md with traffic: a writer of each kind writes before, during and after the move, and is never stopped
unless the page says so. Nothing is lost, and each key keeps its order.

The former relays are stand-ins that do to the table what the real ones do; the writers' statements are the real ones.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer

from harvester import LeaderAcquired
from tests.conftest import MakeTopic
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.outboxes import seed_ddl, seed_insert
from tests.support.servers import Servers
from tests.support.wait import eventually

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]
KEYS = 5
Write = Callable[[psycopg.Connection[Any], str, str], None]
Row = tuple[str, str, list[tuple[str, bytes]]]  # key, value, headers


class Writer(threading.Thread):
    """One application: short transactions, a tenth of which are rolled back; each key's values count up."""

    def __init__(self, dsn: str, write: Write) -> None:
        super().__init__(name="writer", daemon=True)
        self._dsn, self._write = dsn, write
        self._go, self._end = threading.Event(), threading.Event()
        self._go.set()
        self._idle = threading.Event()
        self._fate = random.Random(7)
        self.committed: dict[str, list[str]] = {f"key-{number}": [] for number in range(KEYS)}
        self.failure: BaseException | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self.committed.values()))

    def run(self) -> None:
        try:
            with psycopg.connect(self._dsn) as db:
                while not self._end.is_set():
                    if not self._go.is_set():
                        self._idle.set()
                        self._go.wait(0.05)
                        continue
                    key = f"key-{self._fate.randrange(KEYS)}"
                    value = str(len(self.committed[key]) + 1)
                    self._write(db, key, value)
                    if self._fate.random() < 0.1:
                        db.rollback()
                    else:
                        db.commit()
                        self.committed[key].append(value)
        except BaseException as error:  # told by the test
            self.failure = error

    def more(self, count: int = 60) -> None:
        """Returns when so many more are committed."""
        target = self.count + count
        eventually(lambda: self.count >= target or self.failure, 60, "the writer to go on")
        assert self.failure is None, self.failure

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Between two transactions."""
        self._go.clear()
        self._idle.clear()
        assert self._idle.wait(30)
        yield
        self._go.set()

    def finish(self) -> None:
        self._end.set()
        self.join(30)
        assert self.failure is None, self.failure


class OldRelay(threading.Thread):
    """Runs `turn` until it is stopped, which publishes what it finds and returns when Kafka has acknowledged it."""

    def __init__(self, dsn: str, turn: Callable[[psycopg.Connection[Any]], object]) -> None:
        super().__init__(name="old relay", daemon=True)
        self._dsn, self._turn, self._end = dsn, turn, threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as db:
            while not self._end.is_set():
                self._turn(db)

    def stop(self) -> None:
        self._end.set()
        self.join(30)
        assert not self.is_alive()


@pytest.fixture
def place(servers: Servers, empty_database: str, make_topic: MakeTopic, group: str, tmp_path: Path) -> Iterator[Scene]:
    """An empty database, and a topic of one partition, in which the whole order is seen."""
    scene = Scene(servers, empty_database, make_topic(1), group, tmp_path)
    try:
        yield scene
    finally:
        scene.db.close()


@pytest.fixture
def send(place: Scene) -> Callable[[list[Row]], None]:
    """Publishes rows in order, as the old relay's client does."""
    options = {"bootstrap.servers": place.bootstrap, "broker.address.family": "v4", "enable.idempotence": True}
    producer = Producer({**options, "linger.ms": 0})

    def send_all(rows: list[Row]) -> None:
        for key, value, headers in rows:
            producer.produce(place.topic, value, key, headers=list(headers))
        assert producer.flush(30) == 0

    return send_all


@contextmanager
def writing(place: Scene, write: Write) -> Iterator[Writer]:
    writer = Writer(place.dsn, write)
    writer.start()
    try:
        yield writer
    finally:
        writer.finish()


def judge(place: Scene, writer: Writer) -> None:
    """Everything committed is there, once, and each key's in order."""
    assert place.published() == writer.committed
    assert place.quarantined() == {}


def test_from_goharvest(place: Scene, make_topic: MakeTopic, send: Callable[[list[Row]], None]) -> None:
    leader_topic = make_topic(1)
    place.db.execute(seed_ddl().encode())
    leader = uuid.uuid4()

    def write(db: psycopg.Connection[Any], key: str, value: str) -> None:
        db.execute(seed_insert().encode(), (place.topic, key, value, ["applicationId"], ["my-app"]))

    def turn(db: psycopg.Connection[Any]) -> None:
        """Marked for itself from the head, sent, purged."""
        marked = db.execute(
            """UPDATE outbox SET leader_id = %s WHERE id IN (SELECT id FROM outbox
               WHERE leader_id IS NULL OR leader_id <> %s ORDER BY id LIMIT 20) RETURNING id, kafka_key, kafka_value""",
            (leader, leader),
        ).fetchall()
        send([(key, value, [("applicationId", b"my-app")]) for _, key, value in sorted(marked)])
        db.execute("DELETE FROM outbox WHERE id = ANY(%s)", ([row[0] for row in marked],))

    member = Consumer({
        "bootstrap.servers": place.bootstrap, "broker.address.family": "v4", "group.id": place.group,
        "partition.assignment.strategy": "range,roundrobin", "session.timeout.ms": 6000, "log_level": 0,
    })  # fmt: skip
    leads = threading.Event()
    member.subscribe([leader_topic], on_assign=lambda _consumer, _partitions: leads.set())
    eventually(lambda: member.poll(0.1) or leads.is_set(), 60, "goharvest to lead")

    def stay_and_turn(db: psycopg.Connection[Any]) -> None:
        member.poll(0)
        turn(db)

    old = OldRelay(place.dsn, stay_and_turn)
    with writing(place, write) as writer:
        old.start()
        writer.more()
        run_cli("init", "-f", str(place.config_file()))
        with place.member(leader_topic=leader_topic) as harvester:
            eventually(lambda: harvester.harvester.status().problem, 60, "a harvester that waits")
            writer.more()
            assert not harvester.of(LeaderAcquired)
            old.stop()
            member.close()
            writer.more()
            harvester.wait_for(LeaderAcquired, timeout_s=90)
            writer.more()
            writer.finish()
            place.wait_left(timeout_s=60)
    judge(place, writer)
    assert {record.headers[0] for record in place.log()} == {("applicationId", b"my-app")}


DEBEZIUM = """CREATE TABLE outboxevent (
    id uuid NOT NULL, aggregatetype character varying(255) NOT NULL, aggregateid character varying(255) NOT NULL,
    type character varying(255) NOT NULL, payload jsonb)"""


class Connector:
    """Stands in for Debezium: publishes each inserted row once, in the order of the commits.

    A server without logical decoding has no log to read, so it reads the table, in which the rows of the test's one
    writer lie in that order.
    """

    def __init__(self, send: Callable[[list[Row]], None]) -> None:
        self._send, self._seen = send, set[uuid.UUID]()

    def turn(self, db: psycopg.Connection[Any]) -> None:
        rows = db.execute("SELECT id, aggregateid, payload->>'n' FROM outboxevent ORDER BY ctid").fetchall()
        new = [row for row in rows if row[0] not in self._seen]
        self._send([(key, f'{{"n": {value}}}', [("id", str(id_).encode())]) for id_, key, value in new])
        self._seen.update(row[0] for row in new)


def write_event(db: psycopg.Connection[Any], key: str, value: str) -> None:
    db.execute(
        "INSERT INTO outboxevent VALUES (%s, 'Order', %s, 'OrderChanged', %s)",
        (uuid.uuid4(), key, f'{{"n": {value}}}'),
    )


def adopt(place: Scene, *options: str) -> None:
    run_cli("adopt", *options, "--topic", place.topic, "-f", str(place.config_file()))


def test_from_debezium_with_a_pause_of_the_writers(place: Scene, send: Callable[[list[Row]], None]) -> None:
    place.db.execute(DEBEZIUM)
    connector = Connector(send)
    old = OldRelay(place.dsn, connector.turn)
    with writing(place, write_event) as writer:
        old.start()
        writer.more()
        run_cli("init", "-f", str(place.config_file()))
        with writer.stopped():
            old.stop()
            connector.turn(place.db)  # it has caught up
            adopt(place, "outboxevent")
        writer.more()
        with place.embedded():
            writer.more()
            writer.finish()
            place.wait_left()
    expected = {key: [f'{{"n": {value}}}' for value in values] for key, values in writer.committed.items()}
    assert place.published() == expected
    ids = [dict(record.headers)["id"] for record in place.log()]
    assert len(ids) == len(set(ids)) == writer.count


def test_from_debezium_with_writers_that_go_on(place: Scene, send: Callable[[list[Row]], None]) -> None:
    """Rows between the adoption and the connector's end come twice, and their `id` says so."""
    place.db.execute(DEBEZIUM)
    connector = Connector(send)
    old = OldRelay(place.dsn, connector.turn)
    with writing(place, write_event) as writer:
        old.start()
        writer.more()
        run_cli("init", "-f", str(place.config_file()))
        there = {str(id_).encode() for (id_,) in place.db.execute("SELECT id FROM outboxevent")}
        adopt(place, "outboxevent")
        captured = place.db.execute("SELECT count(*) FROM outboxevent").fetchall()[0][0]
        writer.more()
        eventually(lambda: len(connector._seen) > captured, what="the connector to pass the adoption")
        old.stop()
        with place.embedded():
            writer.more()
            writer.finish()
            place.wait_left()
    once: dict[bytes, tuple[str, str]] = {}
    for record in place.log():
        assert record.key is not None
        assert record.value is not None
        once.setdefault(dict(record.headers)["id"] or b"", (record.key.decode(), record.value.decode()))
    found: dict[str, list[str]] = {}
    for key, value in once.values():
        found.setdefault(key, []).append(value)
    assert found == {key: [f'{{"n": {value}}}' for value in values] for key, values in writer.committed.items()}
    times = Counter(dict(record.headers)["id"] for record in place.log())
    assert {times[id_] for id_ in there} == {1}, "what was there before is Debezium's alone"
    assert max(times.values()) > 1, "there were rows that both published"


MESSAGES = """CREATE TABLE messages (
    id bigserial PRIMARY KEY, customer text NOT NULL, body text NOT NULL, published_at timestamptz)"""
WAITING = "SELECT id, customer, body FROM messages WHERE published_at IS NULL"


def test_from_a_polling_loop(place: Scene, send: Callable[[list[Row]], None]) -> None:
    """The loop stops, the writers do not; nothing is published twice."""
    place.db.execute(MESSAGES)

    def write(db: psycopg.Connection[Any], key: str, value: str) -> None:
        db.execute("INSERT INTO messages (customer, body) VALUES (%s, %s)", (key, value))

    def turn(db: psycopg.Connection[Any], condition: str = "true", limit: int = 20) -> None:
        rows = db.execute(f"{WAITING} AND {condition} ORDER BY id LIMIT {limit}".encode()).fetchall()
        send([(key, body, []) for _, key, body in rows])
        db.execute("UPDATE messages SET published_at = now() WHERE id = ANY(%s)", ([row[0] for row in rows],))

    old = OldRelay(place.dsn, turn)
    with writing(place, write) as writer:
        old.start()
        writer.more()
        run_cli("init", "-f", str(place.config_file()))
        old.stop()
        writer.more()
        adopt(place, "messages", "--key", "{customer}", "--value", "{body}", "--header", "id={id}")
        writer.more()
        # The last turn, as the page has it: rows that no record was made of.
        captured = "(SELECT min(kafka_header_values[1]::bigint) FROM outbox)"
        turn(place.db, f"id < {captured}", 1_000_000)
        with place.embedded():
            writer.more()
            writer.finish()
            place.wait_left()
    judge(place, writer)
