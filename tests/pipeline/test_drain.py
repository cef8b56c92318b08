"""The job `drain` on real servers: what arrives and in which order, what is set aside, what a failure leaves behind."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer

from harvester import origin
from harvester.config import Config
from harvester.delivery.decode import decode
from harvester.delivery.lane import Lanes, LaneSettings, TransactionOutcome
from harvester.delivery.partitioner import murmur2
from harvester.delivery.progress import Progress, encode
from harvester.delivery.progress_topic import ensure_progress_topic
from harvester.errors import ConfigurationError, PoisonRecord
from harvester.outbox import schema
from harvester.outbox.libpq import copy_rows
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.drain import job as drain
from harvester.pipeline.drain import slices
from harvester.pipeline.drain.slices import LATE
from harvester.pipeline.errors import PipelineError
from harvester.record import KafkaRecord
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from tests.support.consuming import Published, read_topic
from tests.support.lanes import opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

pytestmark = pytest.mark.servers

TABLE = OutboxTable.parse("outbox")
LEASE = timedelta(seconds=30)  # long beside what a busy machine may take
INSERT = (
    "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)"
    " VALUES (clock_timestamp(), %s, %s, %s, %s, %s) RETURNING id"
)


class Scene:
    """An outbox, and a drain of it."""

    def __init__(self, spark: SparkSession, servers: Servers, dsn: str, group: str) -> None:
        self.spark, self.servers, self.dsn, self.group = spark, servers, dsn, group
        self.db: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self.said: list[str] = []

    def config(self, **given: Any) -> Config:
        settings: dict[str, Any] = {
            "base_kafka_config": {"bootstrap.servers": self.servers.bootstrap, "broker.address.family": "v4"},
            "leader_group_id": self.group,
            "data_source": self.dsn,
            "limits": {"heartbeat_timeout": "2s", "session_timeout": "6s", "drain_interval": "3s", "max_attempts": 2},
        }
        return Config(**{**settings, **given})

    def drain(self, slice_records: int = 500_000, records: int | None = None, leave: int = 0, **given: Any) -> Any:
        kafka = {"bootstrap.servers": self.servers.bootstrap}
        settings = drain.DrainSettings(
            self.config(**given), kafka, LEASE, slice_records=slice_records, records=records, leave=leave
        )
        return drain.run(self.spark, settings, waiting=self.said.append)

    def add(self, topic: str, key: Any, value: Any, names: Any = "{}", values: Any = "{}", db: Any = None) -> int:
        row = (db or self.db).execute(INSERT, (topic, key, value, names, values)).fetchone()
        assert row is not None
        return int(row[0])

    def log(self, topic: str) -> list[Published]:
        return read_topic(self.servers.bootstrap, topic)

    def one(self, query: str) -> Any:
        row = self.db.execute(query).fetchone()
        assert row is not None
        return row[0] if len(row) == 1 else row

    @property
    def left(self) -> int:
        return int(self.one("SELECT count(*) FROM outbox"))


@pytest.fixture
def scene(spark: SparkSession, servers: Servers, database: str, group: str) -> Any:
    made = Scene(spark, servers, database, group)
    yield made
    made.db.close()


def ids(log: list[Published]) -> list[int]:
    """Of the records, as their headers say."""
    found = [origin.decode(origin.find(record.headers)) for record in log]
    return [one.id for one in found if one is not None]


@pytest.mark.usefixtures("compiled_queries")
def test_a_backlog_arrives_once_and_in_order(scene: Scene, topic: str) -> None:
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        schema.init(connection, TABLE, archive=True)
    load = Load(records=3_000, topics=(topic,), keys=40, rows_per_transaction=7, late=0.1, rollbacks=0.1, headers=2)
    pump(scene.dsn, TABLE, load)
    last = scene.one("SELECT max(id) FROM outbox")

    report = scene.drain(slice_records=1_100, archive="ids")

    assert (report.records, report.slices, report.quarantined) == (3_000, 3, 0)
    found = verify(scene.dsn, TABLE, {"bootstrap.servers": scene.servers.bootstrap})
    verdict = found.verdict
    assert (verdict.delivered, verdict.lost, verdict.duplicates, verdict.order_violations) == (3_000, 0, 0, 0)
    assert verdict.holds
    assert verdict.final
    sequenced = found.sequenced.details()
    assert (sequenced["streams"], sequenced["records"]) == (6, 3_000)  # two tasks, three slices
    assert not any(sequenced[name] for name in ("repeats", "clashes", "given_up", "handed_over", "open"))
    assert scene.one("SELECT term, holder IS NULL, lease_until IS NULL FROM outbox_term") == (1, True, True)
    assert scene.one("SELECT count(*), max(id) FROM outbox_archive") == (3_000, last)


def test_records_are_those_that_the_relay_would_send(scene: Scene, make_topic: MakeTopic) -> None:
    one, other = make_topic(5), make_topic(3)
    scene.db.execute("ALTER TABLE outbox ALTER kafka_key DROP NOT NULL, ALTER kafka_header_keys DROP NOT NULL")
    scene.db.execute("ALTER TABLE outbox ALTER kafka_header_values DROP NOT NULL")
    scene.db.execute("ALTER TABLE outbox ALTER kafka_value TYPE bytea USING kafka_value::bytea")
    scene.db.execute("ALTER TABLE outbox_quarantine ALTER kafka_value TYPE bytea USING kafka_value::bytea")
    for number in range(40):
        scene.add(one if number % 2 else other, f"key {number % 7}", b"\x00\xff" * number)
    scene.add(one, "", b"", ["a", "ä", "a"], ["1", "", "ß"])
    scene.add(one, None, None, ["a"], ["x" * 3_000])
    scene.add(one, "null arrays", b"v", None, None)
    scene.add(one, "lower bounds", b"v", "[0:1]={p,q}", "[3:4]={1,2}")
    scene.db.execute("UPDATE outbox SET kafka_partition = id % 3 WHERE id % 5 = 0")
    times = ("infinity", "-infinity", "1999-12-31 23:59:59.999999+00", "2026-03-29 01:30:00.123457+01", "0044-03-15 BC")
    for number, moment in enumerate(times, 1):
        scene.db.execute("UPDATE outbox SET create_time = %s WHERE id = %s", (moment, number))
    columns = (
        "xmin, id, kafka_key, create_time, coalesce(kafka_partition::bigint, '-9223372036854775808'), kafka_topic,"
        " kafka_header_keys, kafka_header_values, kafka_value"
    )
    finite = f"SELECT {columns} FROM outbox WHERE isfinite(create_time)"
    copied = copy_rows(scene.db, f"COPY ({finite}) TO STDOUT (FORMAT BINARY)", 30)
    wanted = {record.id: record for record in decode(b"".join(raw for _, _, raw in copied))}

    assert scene.drain(slice_records=30).records == 44

    partitions = {one: 5, other: 3}
    found: dict[int, tuple[str, Published]] = {}
    for name in partitions:
        log = scene.log(name)
        found |= {number: (name, record) for number, record in zip(ids(log), log, strict=True)}
    assert set(found) == set(range(1, 45))
    for number, record in wanted.items():
        assert isinstance(record, KafkaRecord)
        name, published = found[number]
        stamp = origin.decode(published.headers[-1][1])
        assert stamp is not None
        assert (name, published.key, published.value) == (record.topic, record.key, record.value)
        assert published.headers[:-1] == record.headers
        assert stamp.created_us == record.created_us
        if record.partition >= 0:
            assert published.partition == record.partition
        elif record.key is not None:
            assert published.partition == murmur2(record.key) % partitions[name]


def test_what_is_committed_late_is_neither_lost_nor_overtaken(
    scene: Scene, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = psycopg.connect(scene.dsn)
    scene.add(topic, "key 0", "before")
    late = scene.add(topic, "late", "1", db=writer)
    for number in range(30):
        scene.add(topic, f"key {number % 3}", str(number))
    made = slices.sink_rows

    def meanwhile(*args: Any) -> Any:
        """The slice is chosen; its rows are yet to be read."""
        if args[1].term and not writer.closed:  # term 0: the slice without rows that comes first
            writer.commit()
            writer.close()
            scene.add(topic, "late", "2")
        return made(*args)

    monkeypatch.setattr("harvester.pipeline.drain.write.sink_rows", meanwhile)
    report = scene.drain()

    log = scene.log(topic)
    assert Counter(ids(log)) == dict.fromkeys(range(1, 34), 1)
    assert [record.value for record in log if record.key == b"late"] == [b"1", b"2"]
    assert late == 2  # among those of the first slice
    assert (report.records, report.slices, scene.left) == (33, 2, 0)


def test_rows_that_can_be_no_record_go_to_quarantine_and_the_others_flow(scene: Scene, make_topic: MakeTopic) -> None:
    topic, small = make_topic(3), make_topic(2, {"max.message.bytes": "2000"})
    good = [scene.add(topic, "k", "v") for _ in range(5)]
    bad = {
        scene.add(topic, "k", "v", ["a", "b"], ["1"]): "2 header keys but 1 header values",
        scene.add(topic, "k", "v", ["a"], [None]): "kafka_header_values has a NULL element",
        scene.add(topic, "k", "v", "{{a,b},{c,d}}", "{{a,b},{c,d}}"): "kafka_header_keys has 2 dimensions",
        scene.add("no topic", "k", "v"): "invalid topic name 'no topic'",
        scene.add(f"{scene.group}.neli", "k", "v"): "its topic is one of the harvester's own",
    }
    beyond, negative = scene.add(topic, "k", "v"), scene.add(topic, "k", "v")
    scene.db.execute("UPDATE outbox SET kafka_partition = 3 WHERE id = %s", (beyond,))
    scene.db.execute("UPDATE outbox SET kafka_partition = -7 WHERE id = %s", (negative,))
    bad |= {beyond: f"_UNKNOWN_PARTITION: {topic} has 3 partitions", negative: "invalid partition -7"}
    # What is around a value takes 149 bytes, the header of the harvester included. Several would be too large a batch.
    good += [scene.add(small, "k", "v" * 1_851) for _ in range(5)]
    bad[scene.add(small, "k", "v" * 1_852)] = "MSG_SIZE_TOO_LARGE: 2001 bytes"
    good.append(scene.add(topic, "k", "v" * 3_000))

    report = scene.drain()

    assert sorted(ids(scene.log(topic)) + ids(scene.log(small))) == good
    errors = dict(scene.db.execute("SELECT id, error FROM outbox_quarantine").fetchall())
    assert {number: error[: len(bad[number])] for number, error in errors.items()} == bad
    assert (report.records, report.quarantined, scene.left) == (len(good), len(bad), 0)


def test_a_policy_to_stop_ends_it_and_gives_the_term_back(scene: Scene, topic: str) -> None:
    scene.add(topic, "k", "1")
    poison = scene.add(topic, "k", "2", ["a"], "{}")
    with pytest.raises(PoisonRecord, match=f"record {poison}"):
        scene.drain(poison={"policy": "stop"})
    assert scene.left == 2
    assert scene.one("SELECT holder IS NULL FROM outbox_term")
    assert scene.drain(poison={"policy": "stop"}, records=0).records == 0


def test_a_slice_that_is_late_is_not_purged_and_sent_again(
    scene: Scene, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump(scene.dsn, TABLE, Load(records=300, topics=(topic,), keys=9))
    with monkeypatch.context() as patch:
        patch.setattr("harvester.pipeline.drain.slices.Times.deadline_ms", lambda *_: 1_000)
        with pytest.raises(PipelineError, match=LATE):
            scene.drain()
    assert scene.left == 300
    assert scene.one("SELECT holder_kind, lease_until > now() FROM outbox_term WHERE holder IS NOT NULL") == (
        "drain",
        True,
    )
    scene.db.execute("UPDATE outbox_term SET lease_until = now()")

    assert scene.drain().records == 300
    verdict = verify(scene.dsn, TABLE, {"bootstrap.servers": scene.servers.bootstrap}).verdict
    assert (verdict.lost, verdict.duplicates, verdict.order_violations, verdict.pending) == (0, 0, 0, 0)


def test_it_leaves_what_it_is_told_to_leave(scene: Scene, topic: str) -> None:
    for number in range(30):
        scene.add(topic, f"key {number % 3}", str(number))
    assert scene.drain(records=10).records == 10
    assert scene.left == 20
    assert scene.drain(leave=20).records == 0
    assert scene.drain(slice_records=5, leave=12).records == 10
    assert scene.left == 10


def test_what_sparks_sink_cannot_do_is_refused(scene: Scene) -> None:
    for given, name in (
        ({"record_timestamp": "create_time"}, "record_timestamp"),
        ({"tracing": {"enabled": True}}, "tracing.enabled"),
        ({"record_header": ""}, "record_header"),
        ({"oversize": {"policy": "claim-check", "store": "file:///srv"}}, "oversize.policy"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            scene.drain(**given)
    assert scene.one("SELECT term FROM outbox_term") == 0


def test_what_an_exactly_once_leader_has_committed_is_purged_and_not_sent_again(scene: Scene, topic: str) -> None:
    config = scene.config(delivery="exactly-once")
    progress_topic = ensure_progress_topic(config.progress_topic, config.common_options(), 2)
    committed, open_, waiting = (scene.add(topic, "k", str(number)) for number in range(3))
    term, incarnation = 7, scene.one("SELECT incarnation FROM outbox_term")
    settings = LaneSettings(
        config.leader_group_id, config.progress_topic, config.common_options(), config.lane_options()
    )
    left = [opened(Lanes(settings, Producer), number) for number in range(2)]
    for lane, record_id in zip(left, (committed, open_), strict=True):
        lane.begin()
        lane.produce(topic, str(record_id), "k")
        progress = encode(Progress(term, incarnation, [record_id]))
        outcome = lane.commit(progress) if record_id == committed else lane.note(progress)
        assert outcome is TransactionOutcome.DONE
    left[1].flush(10)
    scene.db.execute(
        "UPDATE outbox_term SET term = %s, holder = gen_random_uuid(), holder_name = 'dead', delivery = 'exactly-once',"
        " progress_topic = %s",
        (term, progress_topic.id),
    )

    # It asks the leader, which is dead, for as long as a leader may take.
    assert scene.drain(delivery="exactly-once").records == 2

    log = scene.log(topic)
    assert ids(log) == [open_, waiting]
    assert (len(log), log[0].value) == (3, str(committed).encode())  # what was open is undone
    assert scene.one("SELECT delivery, holder IS NULL FROM outbox_term") == ("at-least-once", True)
