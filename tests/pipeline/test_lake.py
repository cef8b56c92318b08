"""The job `lake` from a real topic into real Delta tables, in this process; killed processes are in test_lake_kills."""

from __future__ import annotations

import shutil
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.failpoints import VARIABLE
from harvester.origin import HEADER
from harvester.pipeline import schemas, tables
from harvester.pipeline.errors import CheckpointMismatch, InputMissing, PipelineError, TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import job
from harvester.pipeline.lake.batch import LakeBatch, batch_name
from harvester.pipeline.lake.silver import from_ddl
from harvester.pipeline.lake.upkeep import rebuild
from tests.support.harvested import DAY_US, KEPT, SENT_MS, A, B, Sent, Writer
from tests.support.interruptions import Interrupter, begin_again
from tests.support.lakes import Lake, Oracle, assert_same, moment_ms
from tests.support.longs import is_nightly, long, some_of
from tests.support.sparks import compiled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

# All that a batch can have: repeats, deleted keys, ids out of their order, none of ours, and values that do not fit.
FIRST = (
    Sent(1, b"a", b'{"n": 1}'), Sent(2, b"a", b'{"n": 2}'), Sent(1, b"a", b'{"n": 1}').again(1), Sent(3, b"b"),
    Sent(4, b"b", None), Sent(6, b"c", b'{"n": 6}'), Sent(5, b"c", b'{"n": 5}'), Sent(7, None), Sent(8, b"d", b"{"),
    Sent(9, b"e", at_ms=SENT_MS + 1, low_water=8), Sent(-(2**62), b"e", created_us=Sent(0).created_us - 40 * DAY_US),
    Sent(0, b"a", headers=()), Sent(0, b"a", headers=(("harvester", b"\xb5"),)),
    Sent(0, None, None, headers=(("harvester", b"\xb5\x02 from the future"),)),
)  # fmt: skip
REJECTED = [(b'{"n": 1}', "no header"), (b'{"n": 1}', "unsound header"), (None, "newer header"), (b"{", "bad payload")]
# Later: repeats of what an earlier run has read, of another day by Kafka's clock; and an incarnation that follows.
SECOND = (
    *(one.again(50) for one in FIRST[:5]), Sent(10, b"a", None, B).again(51), Sent(1, b"f", b"{}", B).again(51),
    Sent(1, b"f", b"{}", B).again(52), Sent(11, b"a", b'{"n": 11}', low_water=10).again(53),
)  # fmt: skip


@pytest.fixture
def lake(spark: SparkSession, servers: Servers, tmp_path: Path) -> Lake:
    return Lake(spark, tmp_path / "a lake: 50% é", servers.bootstrap)


@pytest.fixture
def writer(servers: Servers) -> Writer:
    return Writer(servers.bootstrap)


def test_a_lake_over_several_runs(lake: Lake, writer: Writer, make_topic: MakeTopic) -> None:
    orders, payments, oracle, lake.is_prepared = make_topic(2, KEPT), make_topic(1, KEPT), Oracle(), False
    first = writer.send(orders, FIRST)
    writer.send_aborted(orders, [Sent(90, b"z"), Sent(91, b"z")])
    first += writer.send_committed(orders, [Sent(12, b"t")])
    oracle.take(first)
    assert lake.once(orders, payloads={orders: from_ddl("n INT")}) == len(first)
    lake.assert_holds(oracle)
    assert_same(REJECTED, [_value(row) for row in lake.rows("rejects", "value", "reason")])
    assert sorted(path.name for path in lake.root.glob("silver/day=*")) == ["day=2026-01-20", "day=2026-03-01"]
    assert not (lake.root / "bronze").exists()
    assert {row["headers"] for row in lake.table("silver").collect()} == {None}, "a record's own header is kept twice"
    data = {row["id"]: row["data"] for row in lake.rows(f"json/{orders}", "id", "data")}
    assert data.keys() == {1, 2, 3, 4, 5, 6, 7, 9, 12, -(2**62)}
    assert data[4] is None
    assert data[6].asDict() == {"n": 6}

    before = lake.versions()
    assert lake.once(orders, payloads={orders: from_ddl("n INT")}) == 0
    assert lake.versions() == before

    # A topic more, a column more, and files joined: of every table those of a day into one.
    second = [*writer.send(orders, SECOND), *writer.send(payments, [Sent(13, b"a", b'{"n": 13}')])]
    second += writer.send(orders, [Sent(14, b"g", b'{"note": "x", "n": 14}')])
    grown = {orders: from_ddl("note STRING, n INT")}
    with compiled(lake.spark):
        assert lake.once(orders, payments, payloads=grown, compact_every=1) == len(second)
        oracle.take(second)
        lake.assert_holds(oracle)
    assert oracle.current()[orders, b"a"] == ((B, 10), None)
    data = {(row["incarnation"], row["id"]): row["data"] for row in lake.rows(f"json/{orders}")}
    assert len(data) == 14  # the other topic's value is not there, and the repeated ones once
    assert data[str(A), 6].asDict() == {"n": 6, "note": None}
    assert data[str(A), 14].asDict() == {"n": 14, "note": "x"}
    assert data[str(B), 1].asDict() == {"n": None, "note": None}
    since = {row["incarnation"]: moment_ms(row["since"]) for row in lake.rows("incarnations")}
    assert since == {str(A): SENT_MS, str(B): SENT_MS + 51 * 3_600_000}
    assert (lake.files("silver"), lake.files("current")) == (2, 2)

    _refusals(lake, orders, payments, grown)


def _refusals(lake: Lake, orders: str, payments: str, payloads: dict[str, Any]) -> None:
    """What cannot go on from this lake is told before anything is written; test_lake_errors has more of it."""
    before, both = lake.versions(), (orders, payments)
    with pytest.raises(TableMismatch, match=r"data\.n is int, not string"):
        lake.once(*both, payloads={**payloads, orders: from_ddl("n STRING")})
    with pytest.raises(CheckpointMismatch, match="header 'harvester', not 'other'"):
        lake.once(*both, header="other")
    other = Lake(lake.spark, lake.root.parent / "other", lake.bootstrap)
    with pytest.raises(CheckpointMismatch, match="tables that are not in"):
        other.once(*both, checkpoint=str(lake.root / "checkpoint"))
    assert lake.versions() == before
    assert not other.root.exists()


interrupter = Interrupter()


def hooks() -> Interrupter:
    """What HARVESTER_TEST_HOOKS names."""
    return interrupter


class InterruptedBatch(LakeBatch):
    """A batch that is begun again and again. Appends are made side by side, so each is once the only one missing.

    By day only the first one is cut off, and of the tables two are alone missing.
    """

    def write(self, bronze: DataFrame, number: int) -> None:
        def begin() -> None:
            self._known.clear()  # as in a new process
            self._number = None
            LakeBatch.write(self, bronze, number)  # super() knows no class with slots

        alone = ("silver", "repeats", "rejects", "json", "cuts", "ids") if number == 0 else ()
        begin_again(interrupter, begin, alone[: some_of(len(alone))], each=number == 0 or is_nightly())


def test_a_batch_that_is_cut_off_between_any_two_writes_is_as_if_it_had_not_been(
    lake: Lake, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle = make_topic(2, KEPT), Oracle()
    monkeypatch.setenv(VARIABLE, f"{__name__}:hooks")
    monkeypatch.setattr("harvester.pipeline.lake.job.LakeBatch", InterruptedBatch)
    interrupter.places.clear()
    for batch in (FIRST, SECOND):
        sent = writer.send(topic, batch)
        oracle.take(sent)
        lake.once(topic, payloads={topic: from_ddl("n INT")}, compact_every=1)
    places = ["incarnations", "rejects", "json", "repeats", "silver", "cuts", "ids", "end"]
    places += ["current", "folded", "compaction"]
    assert sorted(set(interrupter.places)) == sorted(f"lake.{place}" for place in places)
    assert interrupter.places.count("lake.silver") > (len(places) if is_nightly() else 8)
    lake.assert_holds(oracle)
    assert_same([(8, batch_name(0)), (10, batch_name(1))], [tuple(row) for row in lake.rows("cuts", "id", "batch")])
    assert_same(REJECTED, [_value(row) for row in lake.rows("rejects", "value", "reason")])
    assert len(lake.rows(f"json/{topic}")) == len(oracle.silver) - 1  # but for the value that does not fit


@long
def test_a_lake_of_an_earlier_version_is_rebuilt_and_goes_on(lake: Lake, writer: Writer, make_topic: MakeTopic) -> None:
    topic, oracle = make_topic(2, KEPT), Oracle()
    payloads = {topic: from_ddl("n INT")}
    oracle.take(writer.send(topic, FIRST))
    lake.once(topic, payloads=payloads)
    old, new = (Lake(lake.spark, lake.root.parent / name, lake.bootstrap) for name in ("old", "new"))
    _as_it_was(lake, old.root, topic)
    with pytest.raises(TableMismatch, match="earlier version"):
        old.once(topic)
    with pytest.raises(InputMissing, match="no lake of an earlier version"):
        rebuild(lake.spark, str(lake.root), str(new.root))
    assert rebuild(lake.spark, str(old.root), str(new.root)) == len(FIRST)
    new.assert_holds(oracle)
    assert_same(REJECTED, [_value(row) for row in new.rows("rejects", "value", "reason")])
    with pytest.raises(TableMismatch, match="not an empty directory"):
        rebuild(lake.spark, str(old.root), str(new.root))

    # Repeats of what the old one had, which no ids are remembered of, and the record that it had half written.
    oracle.take(writer.send(topic, SECOND))
    assert new.once(topic, payloads=payloads) == len(SECOND)
    new.assert_holds(oracle)
    assert len(new.rows(f"json/{topic}")) == len(oracle.silver) - 1


def _as_it_was(lake: Lake, root: Path, topic: str) -> None:
    """The tables of this lake in the form of an earlier version, and a batch that it had not ended."""
    kind = F.lit(0).alias("timestamp_type")
    bronze = lake.spark.sql(schemas.bronze(lake.store.at, HEADER)).select("*", kind)
    begun = bronze.where("problem IS NULL").limit(1).withColumn("offset", F.lit(10**9).cast("bigint"))
    bronze.unionByName(begun).write.format("delta").partitionBy("day").save(str(root / "bronze"))
    silver = schemas.deliveries(lake.store.at("silver"), HEADER)
    lake.spark.sql(silver).drop("batch").write.format("delta").partitionBy("day").save(str(root / "silver"))
    for name in ("current", "incarnations", "rejects", f"json/{topic}"):
        shutil.copytree(lake.root / name, root / name)
    shutil.copytree(lake.root / "checkpoint", root / "checkpoint", ignore=shutil.ignore_patterns("ids"))


def test_repeats_in_the_next_batch_of_the_same_run_are_found(lake: Lake, writer: Writer, make_topic: MakeTopic) -> None:
    topic, oracle = make_topic(1, KEPT), Oracle()
    first = [Sent(number, b"k-%d" % (number % 2)) for number in range(1, 5)]
    for batch in (first, [*(one.again(1) for one in first[1:]), Sent(5, b"k-1")]):
        oracle.take(writer.send(topic, batch))
    assert lake.once(topic, most_records=len(first)) == 2 * len(first)
    assert lake.versions()["silver"] == 2 + 2, "made, told of its topic, and two batches"
    lake.assert_holds(oracle)


def test_columns_may_have_names_that_need_quotes(lake: Lake, writer: Writer, make_topic: MakeTopic) -> None:
    topic, lake.folds = make_topic(1, KEPT), False
    writer.send(topic, [Sent(1, value=b'{"order-id": 7, "items": [{"unit-price": 3}]}')])
    ddl = "`order-id` INT"
    lake.once(topic, payloads={topic: from_ddl(ddl)})
    writer.send(topic, [Sent(2, value=b'{"order-id": 8, "items": [{"unit-price": 4}]}')])
    lake.once(topic, payloads={topic: from_ddl(f"{ddl}, items ARRAY<STRUCT<`unit-price`: INT>>")})
    found = {row["id"]: row["data"].asDict(recursive=True) for row in lake.rows(f"json/{topic}")}
    wanted = {1: (7, 3), 2: (8, 4)}
    assert found == {
        one: {"order-id": order, "items": [{"unit-price": price}]} for one, (order, price) in wanted.items()
    }


def test_the_name_of_a_header_may_look_like_a_secret(spark: SparkSession, tmp_path: Path) -> None:
    store = open_store(spark, str(tmp_path))
    store.prepare([schemas.SILVER_TABLE], "test", "x-token")
    assert store.header() == "x-token"
    assert store.properties("silver")[tables.OWNER] == "test"


def test_tables_and_checkpoints_of_somebody_else_are_left_alone(lake: Lake, topic: str) -> None:
    lake.spark.range(3).write.format("delta").save(str(lake.root / "silver"))
    with pytest.raises(TableMismatch, match=r"has a different schema: id is bigint|it is partitioned by nothing"):
        lake.once(topic)
    assert lake.versions() == {"silver": 1}
    strange = Lake(lake.spark, lake.root.parent / "strange", lake.bootstrap)
    (strange.root / "current").mkdir(parents=True)
    (strange.root / "current" / "notes.txt").touch()
    with pytest.raises(TableMismatch, match="neither empty nor a table of Delta"):
        strange.once(topic)
    (strange.root / "offsets").mkdir()
    with pytest.raises(CheckpointMismatch, match="read records into tables that are not in"):
        strange.once(topic, checkpoint=str(strange.root))


def test_records_that_kafka_removed_before_they_were_read_end_the_job(
    lake: Lake, writer: Writer, make_topic: MakeTopic
) -> None:
    topic, lake.folds = make_topic(1, KEPT), False
    sent = writer.send(topic, [Sent(number, partition=0) for number in range(1, 11)])
    assert lake.once(topic) == 10
    later = writer.send(topic, [Sent(number, partition=0) for number in range(11, 21)])
    admin = AdminClient({"bootstrap.servers": lake.bootstrap, "broker.address.family": "v4"})
    cut = TopicPartition(topic, 0, later[4].offset)
    admin.delete_records([cut])[TopicPartition(topic, 0)].result(30)
    with pytest.raises(InputMissing, match="from offset 10 to before 14"):
        lake.once(topic)
    assert len(lake.rows("bronze", "offset")) == len(sent)


def _value(row: Any) -> tuple[bytes | None, str]:
    return None if row["value"] is None else bytes(row["value"]), row["reason"]


@long  # test_a_lake_over_several_runs has a topic that joins
def test_topics_that_match_a_pattern_join_while_the_lake_runs(
    lake: Lake, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, oracle, read, kafka = make_topic(1, KEPT), Oracle(), 0, {"bootstrap.servers": lake.bootstrap}
    later, pattern, admin = f"{orders}-later", f"{orders}(-later)?", AdminClient({**kafka})
    oracle.take(writer.send(orders, [Sent(1), Sent(2)]))
    monkeypatch.setattr(job, "_LOOK_S", 0.1)

    def take(done: job.BatchDone) -> None:
        nonlocal read
        if not read:
            admin.create_topics([NewTopic(later, 1, config=KEPT)])[later].result(30)
            oracle.take(writer.send(later, [Sent(3, at_ms=SENT_MS + 1)]))
        read += done.records

    settings = job.LakeSettings((), lake.address, kafka, trigger_s=0.1, compact_every=0, fold_s=inf, pattern=pattern)
    assert job.run(lake.spark, settings, stop=lambda: read >= 3, progress=take) == 3
    lake.assert_holds(oracle)
    oracle.take(writer.send(later, [Sent(4, at_ms=SENT_MS + 2)]))
    assert lake.once(pattern=pattern) == 1
    lake.assert_holds(oracle)
    with pytest.raises(InputMissing, match=r"no topic at .* matches nothing"):
        lake.once(pattern="nothing")
    with pytest.raises(PipelineError, match="a lot"):
        lake.once(orders, later, options={"minPartitions": "a lot"})
