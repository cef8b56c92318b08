"""docs/migration.md: an outbox that goharvest has served, taken over and given back."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError

from harvester import LeaderAcquired
from tests.conftest import MakeTopic
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.outboxes import seed_ddl, seed_insert, tables
from tests.support.servers import Servers
from tests.support.wait import eventually

COLUMNS = """SELECT column_name, data_type, is_nullable, column_default FROM information_schema.columns
    WHERE table_name = 'outbox' ORDER BY ordinal_position"""
# Marking as goharvest's user guide describes it: the first rows that are not its own, for itself, in one statement.
MARK = """UPDATE outbox SET leader_id = %s WHERE id IN (
    SELECT id FROM outbox WHERE leader_id IS NULL OR leader_id <> %s ORDER BY id LIMIT %s) RETURNING id"""


@pytest.fixture
def old(servers: Servers, empty_database: str, topic: str, group: str, tmp_path: Path) -> Iterator[Scene]:
    """A database with goharvest's table and nothing else of a harvester."""
    scene = Scene(servers, empty_database, topic, group, tmp_path)
    scene.db.execute(seed_ddl().encode())
    try:
        yield scene
    finally:
        scene.db.close()


def write(scene: Scene, *rows: tuple[str, str | None]) -> None:
    """By goharvest's own INSERT, with a header."""
    for key, value in rows:
        headers = (["applicationId"], ["my-app"])
        scene.db.execute(seed_insert().encode(), (scene.topic, key, value, *headers))


def mark(scene: Scene, leader: uuid.UUID, count: int) -> list[int]:
    return sorted(row[0] for row in scene.db.execute(MARK.encode(), (leader, leader, count)))


def reaper_options(scene: Scene) -> dict[str, Any]:
    return {
        "bootstrap.servers": scene.bootstrap,
        "broker.address.family": "v4",
        "group.id": scene.group,
        "partition.assignment.strategy": "range,roundrobin",
        "session.timeout.ms": 6000,
        "log_level": 0,
    }


@contextmanager
def reaper(scene: Scene, leader_topic: str) -> Iterator[threading.Event]:
    """A member of the leader group as goharvest is one: its client's own assignors. Yields once it owns partition 0."""
    consumer = Consumer(reaper_options(scene))
    owns, leave = threading.Event(), threading.Event()
    consumer.subscribe([leader_topic], on_assign=lambda _consumer, _partitions: owns.set())

    def poll() -> None:
        while not leave.is_set():
            consumer.poll(0.05)
        consumer.close()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert owns.wait(60), "goharvest's member was never assigned partition 0"
        yield leave
    finally:
        leave.set()
        thread.join(30)


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_a_table_of_goharvest_is_taken_over_as_it_is(old: Scene, marking: str) -> None:
    write(old, *((f"key-{number % 3}", str(number)) for number in range(9)))
    write(old, ("gone", None))
    marked = mark(old, uuid.uuid4(), 4)  # by a leader that is no more: it sent these or did not
    before = old.db.execute(COLUMNS.encode()).fetchall()
    file = old.config_file(marking=marking)
    said = run_cli("init", "-f", str(file)).stdout
    assert "outbox_term" in said
    assert "created table outbox\n" not in said
    assert old.db.execute(COLUMNS.encode()).fetchall() == before
    assert old.left()[:4] == marked
    with old.embedded(marking=marking):
        old.wait_left()
    expected = {f"key-{key}": [str(number) for number in range(9) if number % 3 == key] for key in range(3)}
    assert old.published() == {**expected, "gone": [None]}
    assert {record.headers[0] for record in old.log()} == {("applicationId", b"my-app")}


def test_goharvest_goes_on_where_the_harvester_has_stopped(old: Scene) -> None:
    run_cli("init", "-f", str(old.config_file()))
    write(old, ("a", "1"))
    with old.embedded(marking="table"):
        old.wait_left()
    write(old, ("a", "2"), ("a", "3"))
    old.db.execute("UPDATE outbox SET leader_id = gen_random_uuid() WHERE kafka_value = '2'")  # as a crash leaves it
    left = old.left()
    assert mark(old, uuid.uuid4(), 10) == left
    # What the harvester has made beside it can go; the outbox is as it was.
    old.db.execute("DROP TABLE outbox_term, outbox_quarantine, outbox_lease")
    assert tables(old.db) == {"outbox", "outbox_pkey", "outbox_id_seq"}


@pytest.mark.timeout(400)
def test_in_one_group_the_harvester_waits_until_goharvest_has_gone(old: Scene, make_topic: MakeTopic) -> None:
    leader_topic = make_topic(1)
    run_cli("init", "-f", str(old.config_file()))
    write(old, ("a", "1"))
    with reaper(old, leader_topic) as leave, old.member(leader_topic=leader_topic) as harvester:
        eventually(lambda: harvester.harvester.status().problem, 60, "a problem that says what it waits for")
        assert not harvester.of(LeaderAcquired)
        assert old.left() != []
        leave.set()
        harvester.wait_for(LeaderAcquired, timeout_s=90)
        old.wait_left(timeout_s=60)
    assert old.published() == {"a": ["1"]}


@pytest.mark.timeout(400)
def test_in_one_group_goharvest_is_refused_while_a_harvester_is_there(old: Scene, make_topic: MakeTopic) -> None:
    leader_topic = make_topic(1)
    run_cli("init", "-f", str(old.config_file()))
    with old.member(leader_topic=leader_topic) as harvester:
        harvester.wait_for(LeaderAcquired, timeout_s=90)
        consumer = Consumer(reaper_options(old))
        try:
            consumer.subscribe([leader_topic])

            def refused() -> bool:
                message = consumer.poll(0.1)
                error = message.error() if message is not None else None
                return error is not None and error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL

            eventually(refused, 60, "goharvest's member refused by the group")
        finally:
            consumer.close()
        write(old, ("a", "1"))
        old.wait_left()
        assert len(harvester.of(LeaderAcquired)) == 1


def test_in_groups_of_their_own_both_publish_the_same(old: Scene) -> None:
    """What must not be done: neither knows of the other."""
    run_cli("init", "-f", str(old.config_file()))
    write(old, ("a", "1"))
    (row,) = mark(old, uuid.uuid4(), 1)  # goharvest has it on the wire now, and will not look at it again
    with old.embedded():
        old.wait_left()
    assert old.published() == {"a": ["1"]}, f"record {row} was published by the harvester as well"
