"""The job `lake` into tables of other formats, and into schemas of catalogs: real tables, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from harvester_cli.pipeline.options import place
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.errors import HarvesterError
from harvester.failpoints import VARIABLE
from harvester.origin import HEADER
from harvester.pipeline import schemas, tables
from harvester.pipeline.errors import CheckpointMismatch, ConnectorMismatch, InputMissing, TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import LakeBatch, batch_name
from harvester.pipeline.lake.recovery import Recovery
from harvester.pipeline.lake.silver import from_ddl
from harvester.pipeline.session import DELTA, FORMAT, ICEBERG, SessionSettings, connectors, options
from harvester.pipeline.store import _deep, _flat
from tests.pipeline.test_lake import FIRST, REJECTED, SECOND
from tests.support.formats import LakeAt, known, places, where
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.interruptions import CutOff, Interrupter, begin_again
from tests.support.lakes import Oracle, assert_same, make_lake
from tests.support.longs import is_nightly, long
from tests.support.sparks import assert_rows, configure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

ALL = Recovery(accept_loss=True, adopt=True)


@pytest.fixture
def lake(
    request: pytest.FixtureRequest, spark: SparkSession, servers: Servers, database: str, tmp_path: Path
) -> Iterator[LakeAt]:
    place = where(request.param, tmp_path, database)
    with known(spark, place):
        yield LakeAt(spark, tmp_path, servers.bootstrap, place)


@pytest.fixture
def writer(servers: Servers) -> Writer:
    return Writer(servers.bootstrap)


@pytest.fixture
def iceberg(spark: SparkSession) -> Iterator[None]:
    """Tables in directories are Iceberg's."""
    configure(spark, {FORMAT: ICEBERG})
    yield
    configure(spark, {FORMAT: DELTA})


@given(st.text(alphabet=st.sampled_from("abzAZ09._-%"), min_size=1))
def test_names_of_topics_in_a_schema_are_safe_and_unlike_whatever_its_case(topic: str) -> None:
    flat = _flat(f"json/{topic}")
    assert _deep(flat) == f"json/{topic}"
    assert flat == flat.lower()
    assert flat.replace("_", "a").isalnum()


def test_the_connector_of_iceberg_is_there_for_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0"
    assert [str(one) for one in connectors("4.0.1", ICEBERG)] == [*map(str, connectors("4.0.1")), ours]
    with pytest.raises(ConnectorMismatch, match=r"no Iceberg is known for PySpark 4\.1\.0, only for 4\.0"):
        connectors("4.1.0", ICEBERG)
    asked: list[str] = []

    def fetched(_: str, format_: str, **__: Any) -> list[Path]:
        asked.append(format_)
        return [tmp_path / "ours.jar"]

    monkeypatch.setattr("harvester.pipeline.session.connector_jars", fetched)
    for conf in ({}, {FORMAT: ICEBERG}, {FORMAT: ICEBERG, "spark.jars": "iceberg-spark-runtime-4.0_2.13-1.9.2.jar"}):
        made = options(SessionSettings("job", conf=conf), "4.0.0", lambda _: None)
        assert made["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"
        assert made["spark.jars"].endswith("ours.jar")
    assert asked == [DELTA, ICEBERG, DELTA]


@pytest.mark.parametrize(
    ("given", "found"),
    [("a.b", "a.b"), ("a.b-c.d", "a.b-c.d"), ("./a.b", None), ("a", None), ("s3a://a.b/c", "s3a://a.b/c")],
)
def test_what_may_be_a_schema_is_no_path_before_spark_has_been_asked(given: str, found: str | None) -> None:
    assert place(given) == (found or str(Path(given).absolute()))


@long  # the next lake goes on every day, over several runs, in a schema; test_lake has more of them in a directory
@pytest.mark.parametrize("lake", places("iceberg schema"), indirect=True)
def test_a_lake_over_several_runs(lake: LakeAt, writer: Writer, make_topic: MakeTopic) -> None:
    topic, other, oracle = make_topic(2, KEPT), make_topic(1, KEPT), Oracle()
    first = writer.send(topic, FIRST)
    assert lake.once(topic, payloads={topic: from_ddl("n INT")}) == len(first)
    oracle.take(first)
    lake.assert_holds(oracle)
    assert_same(REJECTED, [(row["value"] and bytes(row["value"]), row["reason"]) for row in lake.rows("rejects")])
    assert {row["id"] for row in lake.rows(f"json/{topic}")} == {1, 2, 3, 4, 5, 6, 7, 9, -(2**62)}
    assert lake.store.values() == [f"json/{topic}"]

    before = lake.versions()
    assert lake.once(topic, payloads={topic: from_ddl("n INT")}) == 0
    assert lake.versions() == before

    # A topic more, a column more, one of the user's own, and files joined: of every table those of a day into one.
    lake.spark.sql(f"ALTER TABLE {lake.store.at('silver')} ADD COLUMNS (mine INT)")
    second = [*writer.send(topic, SECOND), *writer.send(other, [Sent(13, b"a", b'{"n": 13}')])]
    second += writer.send(topic, [Sent(14, b"g", b'{"note": "x", "n": 14}')])
    grown = {topic: from_ddl("note STRING, n INT")}
    assert lake.once(topic, other, payloads=grown, compact_every=1) == len(second)
    oracle.take(second)
    lake.assert_holds(oracle)
    data = {row["id"]: row["data"] for row in lake.rows(f"json/{topic}")}
    assert data[14].asDict() == {"n": 14, "note": "x"}
    assert data[6].asDict() == {"n": 6, "note": None}
    assert (lake.files("silver"), lake.files("current")) == (2, 2)

    before = lake.versions()
    with pytest.raises(TableMismatch, match=r"data\.n is int, not string"):
        lake.once(topic, other, payloads={topic: from_ddl("n STRING")})
    shutil.rmtree(Path(lake.place.more.get("checkpoint", f"{lake.address}/checkpoint")) / "offsets")
    with pytest.raises(CheckpointMismatch, match="older than its tables: it knows of no batch, and they have batch 1"):
        lake.once(topic, other)
    assert lake.versions() == before
    # Made anew from what the tables say.
    oracle.take(writer.send(topic, [*(one.again(90) for one in FIRST[:3]), Sent(20, b"h")]))
    lake.once(topic, other, recovery=Recovery(adopt=True))
    lake.assert_holds(oracle)


interrupter = Interrupter()


def hooks() -> Interrupter:
    """What HARVESTER_TEST_HOOKS names."""
    return interrupter


class InterruptedBatch(LakeBatch):
    """A batch that is begun again and again; each table is once the only one missing. Nightly also the second batch."""

    def write(self, bronze: DataFrame, number: int) -> None:
        def begin() -> None:
            self._known.clear()  # as in a new process
            self._number = None
            LakeBatch.write(self, bronze, number)  # super() knows no class with slots

        alone = ("silver", "repeats", "rejects", "json", "publish", "cuts", "ids")
        begin_again(interrupter, begin, alone if number == 0 or is_nightly() else ())


@pytest.mark.parametrize("lake", places(), indirect=True)
def test_a_batch_that_is_cut_off_between_any_two_writes_is_as_if_it_had_not_been(
    lake: LakeAt, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle = make_topic(2, KEPT), Oracle()
    monkeypatch.setenv(VARIABLE, f"{__name__}:hooks")
    monkeypatch.setattr("harvester.pipeline.lake.job.LakeBatch", InterruptedBatch)
    interrupter.places.clear()
    for batch in (FIRST, SECOND):
        oracle.take(writer.send(topic, batch))
        lake.once(topic, payloads={topic: from_ddl("n INT")}, compact_every=1)
    staged = interrupter.places.count("lake.publish")
    assert (staged > 20) == (lake.place.format == ICEBERG)
    lake.assert_holds(oracle)
    assert_same([(8, batch_name(0)), (10, batch_name(1))], [tuple(row) for row in lake.rows("cuts", "id", "batch")])
    assert_same(REJECTED, [(row["value"] and bytes(row["value"]), row["reason"]) for row in lake.rows("rejects")])
    assert len(lake.rows(f"json/{topic}")) == len(oracle.silver) - 1  # but for the value that does not fit


@pytest.mark.usefixtures("iceberg")
def test_of_appends_under_one_name_one_is_seen_however_they_overlap(spark: SparkSession, tmp_path: Path) -> None:
    """Also of those that two drivers make at the same time, and of one that is staged and not published."""
    store = open_store(spark, str(tmp_path / "lake"))
    store.prepare([schemas.INCARNATIONS_TABLE], "test")
    rows = spark.range(1).select(F.lit("a").alias("incarnation"), F.current_timestamp().alias("since"))
    stores = [store.in_new_session() for _ in range(3)]
    for number in range(2):
        with ThreadPoolExecutor(len(stores)) as pool:
            list(pool.map(lambda one: one.append(rows, "incarnations", ("test", number)), stores))  # noqa: B023
        store.append(rows, "incarnations", ("test", number))
        assert store.table("incarnations").count() == number + 1
        assert store.last_written(["incarnations", "silver"], "test") == number
    spark.conf.set("spark.wap.id", "test-2")
    rows.writeTo(store.at("incarnations")).append()
    assert store.table("incarnations").count() == 2
    # Files are joined meanwhile.
    store.change(f"DELETE FROM {store.at('incarnations')} WHERE incarnation = 'b'")
    store.compact("incarnations")
    store.append(rows, "incarnations", ("test", 2))
    assert store.table("incarnations").count() == 3
    assert store.last_written(["incarnations"], "another") is None


cut_off = CutOff()


def cutting() -> CutOff:
    """What HARVESTER_TEST_HOOKS names."""
    return cut_off


@pytest.mark.parametrize("lake", places("iceberg schema")[1:], indirect=True)
@pytest.mark.parametrize(
    "interrupted", ["lake.silver", pytest.param("lake.repeats", marks=long), pytest.param("lake.end", marks=long)]
)
def test_a_lake_that_lost_records_its_checkpoint_and_half_a_batch_goes_on(
    lake: LakeAt, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"{__name__}:cutting")
    topic, oracle, lake.folds = make_topic(1, KEPT), Oracle(), False
    payloads = {topic: from_ddl("n INT")}
    first = [Sent(number, b"k-%d" % (number % 3), b'{"n": 1}', partition=0) for number in range(1, 11)]
    oracle.take(writer.send(topic, first))
    lake.once(topic, payloads=payloads)
    second = writer.send(topic, [*(one.again(1) for one in first[:3]), *(Sent(20 + one) for one in range(5))])
    cut_off.place = interrupted
    with suppress(HarvesterError):
        lake.once(topic, payloads=payloads)
    cut_off.place = None
    admin = AdminClient({"bootstrap.servers": lake.bootstrap, "broker.address.family": "v4"})
    cut = second[5].offset
    admin.delete_records([TopicPartition(topic, 0, cut)])[TopicPartition(topic, 0)].result(30)
    shutil.rmtree(lake.place.more.get("checkpoint", f"{lake.address}/checkpoint"))
    before = lake.versions()
    with pytest.raises(TableMismatch, match="another checkpoint"):
        lake.once(topic, payloads=payloads)
    assert lake.versions() == before
    lake.once(topic, payloads=payloads, recovery=ALL)
    written = {"lake.repeats": second[3:], "lake.silver": second[:3]}.get(interrupted, second)
    kept = [one for one in second if one in written or one.offset >= cut]
    oracle.take(kept)
    oracle.take(again := writer.send(topic, [one.sent.again(9) for one in kept]))
    assert lake.once(topic, payloads=payloads) == len(again)
    lake.assert_holds(oracle)
    assert_same([number for _, number in oracle.silver], [row["id"] for row in lake.rows(f"json/{topic}")])
    lost = [] if interrupted == "lake.end" else [(topic, 0, 10, cut)]
    assert [tuple(row)[:4] for row in lake.rows("losses")] == lost


def test_what_cannot_be_is_refused_before_anything_is_written(
    spark: SparkSession, servers: Servers, writer: Writer, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(1, KEPT)
    writer.send(topic, [Sent(1)])
    roots = {name: str(tmp_path / name) for name in (DELTA, ICEBERG)}

    def lake(place: str, **settings: Any) -> int:
        given = where("iceberg directory", tmp_path, "")
        one = LakeAt(spark, tmp_path, servers.bootstrap, given)
        one.address, one.folds = place, False
        return one.once(topic, **settings)

    configure(spark, {FORMAT: "hudi"})
    with pytest.raises(TableMismatch, match="unknown table format hudi"):
        lake(str(tmp_path / "new"))
    for name, path in roots.items():
        configure(spark, {FORMAT: name})
        lake(path)
    for name, other, said in ((DELTA, ICEBERG, "nor a table of Delta"), (ICEBERG, DELTA, "nor a table of Iceberg")):
        configure(spark, {FORMAT: name})
        with pytest.raises(TableMismatch, match=said) as caught:
            lake(roots[other])
        assert "--format" in str(caught.value.hint)
    with pytest.raises(TableMismatch, match="Iceberg has no type smallint"):
        lake(str(tmp_path / "new"), payloads={topic: from_ddl("n SMALLINT")})
    with pytest.raises(TableMismatch, match="spark_catalog is for tables of Delta"):
        lake("spark_catalog.default")
    configure(spark, {"spark.sql.catalog.stale.cache-enabled": "true", "spark.sql.catalog.stale": "x"})
    with pytest.raises(TableMismatch, match="the catalog stale caches its tables"):
        lake("stale.sales")
    configure(spark, {FORMAT: DELTA, "spark.sql.catalog.theirs": "org.apache.iceberg.spark.SparkCatalog"})
    with pytest.raises(TableMismatch, match="theirs is for tables of Iceberg") as named:
        lake("theirs.sales")
    assert "--format iceberg" in str(named.value.hint)
    with pytest.raises(InputMissing, match=r"no schema spark_catalog\.nowhere"):
        lake("spark_catalog.nowhere")
    with pytest.raises(CheckpointMismatch, match="the location of the files that belong to") as refused:
        lake("spark_catalog.default")
    assert "--checkpoint" in str(refused.value.hint)
    assert not spark.catalog.listTables("spark_catalog.default")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("iceberg")
def test_the_bounds_of_files_are_kept_of_few_columns_and_no_key_is_among_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    headers = [(HEADER, Sent(1).written()[0][1])]
    store = open_store(spark, make_lake(spark, tmp_path / "lake", [{"key": b"secret", "headers": headers}]))
    [file] = spark.table(f"{store.at('silver')}.files").select("readable_metrics").collect()
    bounds = {name: one["upper_bound"] for name, one in file[0].asDict(recursive=True).items()}
    assert bounds["id"] == 1
    assert bounds["batch"] == "0" * 20
    assert (bounds["key"], bounds["value"]) == (None, None)
    assert_rows(store.table("silver").select("id"), [{"id": 1}])
    assert store.properties("silver")[tables.OWNER] == "test"
