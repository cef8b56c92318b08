"""Records of every kind: those that cannot be published go to quarantine with their error, the others flow."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psycopg
import pytest
from psycopg import sql

from harvester.delivery.partitioner import shard_of
from harvester.origin import HEADER, decode, encode
from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from harvester.verify.sequences import Hole, Sequences, Stream
from tests.conftest import MakeTopic
from tests.support.harvesting import Scene, causal
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH
from tests.support.outboxes import seed_ddl, seed_insert
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

WIDE = """CREATE TABLE outbox (
    id BIGSERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL DEFAULT now(), kafka_topic TEXT NOT NULL,
    kafka_key TEXT, kafka_value BYTEA, kafka_header_keys TEXT[] NOT NULL, kafka_header_values TEXT[] NOT NULL,
    kafka_partition INT, leader_id UUID)"""


def put(
    db: psycopg.Connection[Any],
    topic: str,
    key: str | None,
    value: bytes | None,
    headers: tuple[list[str | None], list[str | None]] = ([], []),
    partition: int | None = None,
) -> int:
    row = db.execute(
        """INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
                               kafka_partition) VALUES (%s, %s, %s, %s, %s, %s) RETURNING id""",
        (topic, key, value, *headers, partition),
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def wide(scene: Scene) -> Scene:
    """The scene with a table that has all optional columns."""
    scene.db.execute("DROP TABLE outbox, outbox_term, outbox_quarantine")
    scene.db.execute(WIDE)
    init(scene.db, OutboxTable.parse("outbox"))
    return scene


@BOTH
def test_records_that_cannot_be_published_go_to_quarantine_and_their_keys_go_on(wide: Scene, marking: str) -> None:
    db, topic = wide.db, wide.topic
    missing = f"missing.{uuid.uuid4().hex}"
    with db.transaction():
        bad = {
            put(db, topic, "unequal", b"bad", (["one", "two"], ["1"])): "2 header keys but 1 header values",
            put(db, topic, "null name", b"bad", ([None], ["1"])): "kafka_header_keys has a NULL element",
            put(db, topic, "null value", b"bad", (["one"], [None])): "kafka_header_values has a NULL element",
            put(db, topic, "large", b"x" * 20_000): "MSG_SIZE_TOO_LARGE",
            put(db, "no/topic", "topic", b"bad"): "invalid topic name 'no/topic'",
            put(db, "", "empty topic", b"bad"): "invalid topic name ''",
            put(db, "t" * 250, "long topic", b"bad"): "invalid topic name",
            put(db, topic, "partition", b"bad", partition=99): "_UNKNOWN_PARTITION",
            put(db, topic, "negative", b"bad", partition=-1): "invalid partition -1",
            put(db, topic, None, b"x" * 20_000): "MSG_SIZE_TOO_LARGE",
        }
        keys = [row[0] for row in db.execute("SELECT DISTINCT kafka_key FROM outbox WHERE kafka_key IS NOT NULL")]
        for key in keys:
            put(db, topic, key, b"good")
        put(db, topic, None, b"good")
        put(db, missing, "k", b"good")  # the broker makes it
    producer = {"message.max.bytes": "10000"}
    with wide.embedded(producer_kafka_config=producer, max_attempts=2, marking=marking) as running:
        wide.wait_left()
        found = wide.quarantined()
        assert found.keys() == bad.keys()
        assert {i: error for i, error in found.items() if bad[i] not in error} == {}
        assert running.leadership() == ["LeaderAcquired"]
        eventually(lambda: running.harvester.status().quarantined == len(bad), what="the count of the status")
    assert wide.published() == {key: ["good"] for key in [*keys, None]}
    assert wide.published(missing) == {"k": ["good"]}
    row = db.execute(
        """SELECT q.kafka_topic, q.kafka_key, q.kafka_value, q.kafka_header_keys, q.kafka_header_values,
                  q.kafka_partition, q.attempts, q.first_failed_at <= q.quarantined_at, q.incarnation = t.incarnation
           FROM outbox_quarantine q, outbox_term t WHERE q.kafka_key = 'unequal'"""
    ).fetchone()
    assert row == (topic, "unequal", b"bad", ["one", "two"], ["1"], None, 1, True, True)
    attempts = db.execute("SELECT attempts FROM outbox_quarantine WHERE kafka_key = 'partition'").fetchone()
    assert attempts == (2,)


def test_everything_a_good_record_can_have_arrives_as_it_was(wide: Scene) -> None:
    db, topic = wide.db, wide.topic
    put(db, topic, "tombstone", None)
    put(db, topic, "empty", b"")
    put(db, topic, "", b"empty key")
    put(db, topic, None, b"no key")
    put(db, topic, "bytes", bytes(range(256)), (["n", "n", "ü"], ["1", "", "ö"]))
    put(db, topic, "placed", b"here", partition=3)
    with wide.embedded():
        wide.wait_left()
    found = {(record.key, record.value): record for record in wide.log()}
    assert found.keys() == {
        (b"tombstone", None),
        (b"empty", b""),
        (b"", b"empty key"),
        (None, b"no key"),
        (b"bytes", bytes(range(256))),
        (b"placed", b"here"),
    }
    *headers, (name, value) = found[b"bytes", bytes(range(256))].headers
    assert headers == [("n", b"1"), ("n", b""), ("ü", "ö".encode())]
    origin = decode(value)
    assert name == HEADER
    assert origin is not None
    assert (origin.id, origin.term, origin.lane) == (5, 1, shard_of(b"bytes", 5, 2))
    assert found[b"placed", b"here"].partition == 3
    assert wide.quarantined() == {}


def test_a_refusal_by_the_broker_is_reported_per_record(wide: Scene, make_topic: MakeTopic) -> None:
    """Smaller than what the producer allows, larger than what the topic does."""
    small = make_topic(1, {"max.message.bytes": "2000"})
    with wide.db.transaction():
        large = put(wide.db, small, "a", b"x" * 5000)
        for number in range(1, 4):
            put(wide.db, small, "a", str(number).encode())
            put(wide.db, small, "b", str(number).encode())
    with wide.embedded():
        wide.wait_left()
        assert "MSG_SIZE_TOO_LARGE" in wide.quarantined()[large]
    assert wide.published(small) == causal(("a", "b"), 3)


def test_a_refusal_that_may_pass_is_tried_again_before_the_record_is_given_up(scene: Scene, plan: Plan) -> None:
    """Permissions may be on their way: the first record gets through at the third attempt, the second never does."""
    plan.add(Fault(error="TOPIC_AUTHORIZATION_FAILED", key="a", times=2))
    plan.add(Fault(error="TOPIC_AUTHORIZATION_FAILED", key="b", times=3))
    scene.add(("a", "1"), ("b", "1"), ("a", "2"), ("c", "1"))
    (after,) = scene.add(("b", "2"))
    with scene.embedded(max_attempts=3) as running:
        scene.wait_left()
        (error,) = scene.quarantined().values()
        assert error.startswith("TOPIC_AUTHORIZATION_FAILED")
        assert after not in scene.quarantined()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == {"a": ["1", "2"], "b": ["2"], "c": ["1"]}
    assert scene.db.execute("SELECT kafka_key, attempts FROM outbox_quarantine").fetchall() == [("b", 3)]


@BOTH
def test_the_number_of_a_record_in_quarantine_is_no_hole(
    scene: Scene, plan: Plan, make_topic: MakeTopic, marking: str
) -> None:
    """P25: it was refused after it had been sent, and its number with it; the notice names both."""
    plan.add(Fault(error="TOPIC_AUTHORIZATION_FAILED", key="b", times=3))
    with scene.db.transaction():
        scene.add(("a", "1"), ("b", "1"), ("a", "2"))
        scene.add(("b", "2"), ("c", "1"))
    notice_topic = make_topic(1)
    poison = {"notice_topic": notice_topic}
    with scene.embedded(shards=1, max_attempts=3, marking=marking, poison=poison):
        scene.wait_left()
    (notice,) = scene.log(notice_topic)
    assert notice.value is not None
    lost = decode(bytes.fromhex(json.loads(notice.value)["origin"]))
    assert lost is not None
    sequences = Sequences()
    for record in [*scene.log(), notice]:
        origin = decode(dict(record.headers)[HEADER])
        assert origin is not None
        sequences.add(origin, 0)  # one stream: the time tells nothing
    assert sequences.judge().open == 1
    verdict = sequences.judge([(Stream.of(lost), lost.sequence)])
    assert (verdict.open, verdict.holes[Hole.GIVEN_UP]) == (0, 1)
    assert scene.db.execute("SELECT id, origin FROM outbox_quarantine").fetchall() == [(lost.id, encode(lost))]


@pytest.mark.parametrize(
    ("table", "leader_id"),
    [("outbox", "UUID"), ("outbox", "VARCHAR(36)"), ('"Weird ""Schema"";--"."the outbox"', "UUID")],
    ids=["uuid", "varchar", "quoted"],
)
def test_a_table_and_rows_by_the_original_guide(table: str, leader_id: str, scene: Scene) -> None:
    parsed = OutboxTable.parse(table)
    scene.db.execute("DROP TABLE outbox, outbox_term, outbox_quarantine")
    if parsed.schema is not None:
        scene.db.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(parsed.schema)))
    scene.db.execute(seed_ddl(table, leader_id=leader_id))
    init(scene.db, parsed)
    for number in range(1, 6):
        for key in ("it's", "b"):
            scene.db.execute(seed_insert(table.replace("%", "%%")), (scene.topic, key, str(number), "{h}", "{v}"))
    scene.db.execute(seed_insert(table), (scene.topic, "it's", "bad", "{h}", "{}"))
    with scene.embedded(outbox_table=table):
        eventually(lambda: scene.db.execute(f"SELECT count(*) FROM {parsed.sql}").fetchone() == (0,), what="empty")
        assert scene.db.execute(f"SELECT error FROM {parsed.quarantine}").fetchall() == [
            ("1 header keys but 0 header values",)
        ]
    assert scene.published() == causal(("it's", "b"), 5)


def test_keys_of_bytes(scene: Scene, plan: Plan) -> None:
    """A bytea key that is no text, and one that is retried meanwhile."""
    scene.db.execute("ALTER TABLE outbox_quarantine ALTER kafka_key TYPE bytea USING kafka_key::bytea")
    scene.db.execute("ALTER TABLE outbox ALTER kafka_key TYPE bytea USING kafka_key::bytea")
    plan.add(Fault(error="_MSG_TIMED_OUT", key="k", times=3))
    query = """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,
               kafka_header_values) VALUES (now(), %s, %s, %s, '{}', '{}')"""
    for number in range(1, 4):
        scene.db.execute(query, (scene.topic, b"k", str(number)))
        scene.db.execute(query, (scene.topic, b"\x00\xff'\\", str(number)))
    with scene.embedded():
        scene.wait_left()
    found: dict[bytes | None, list[bytes | None]] = {}
    for record in scene.log():
        found.setdefault(record.key, []).append(record.value)
    assert found == {b"k": [b"1", b"2", b"3"], b"\x00\xff'\\": [b"1", b"2", b"3"]}


def test_text_keys_that_look_like_sql_wait_and_go_on_like_any_other(scene: Scene, plan: Plan) -> None:
    keys = ("it's", "back\\slash", "'); DROP TABLE outbox; --", "ü\n", "$$", "%s")
    for key in keys:
        plan.add(Fault(error="_MSG_TIMED_OUT", key=key, times=3))
    with scene.embedded() as running:
        for number in range(1, 6):
            scene.add(*((key, str(number)) for key in keys))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(keys, 5)
