"""The other jobs on tables of Iceberg, and what is left of an erased key in their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from pyarrow.parquet import ParquetFile
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.origin import HEADER
from harvester.pipeline import metrics, replay, streaming
from harvester.pipeline.audit.job import AuditSettings, run
from harvester.pipeline.audit.schemas import FindingKind
from harvester.pipeline.errors import TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.lake.erase import Trace, erase, traces_of_other_jobs
from harvester.pipeline.lake.silver import from_ddl, payload_table
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.replay_plan import Destination, ReplayRate, ReplayRequest, Selection
from harvester.pipeline.windows import METRICS
from tests.support.audits import Scene
from tests.support.consuming import read_topic
from tests.support.formats import LakeAt, known, places, where
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Oracle, make_lake
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

KEY, NAME = b"customer-7", "Alice"


def value_of(name: str) -> bytes:
    return json.dumps({"who": name}).encode()


def told_of(root: Path, *texts: str) -> set[str]:
    """Those of the texts that any file of a table has, whether the table still names it or not."""
    content = ""
    for file in root.rglob("*"):
        if file.is_file():
            content += file.read_bytes().decode("latin-1")
            if file.suffix == ".parquet":
                content += repr(ParquetFile(file, coerce_int96_timestamp_unit="us").read().to_pydict())
    return {text for text in texts if text in content}


def bounds_of(spark: SparkSession, at: str) -> bytes:
    """The bounds of columns in the manifests of an Iceberg table, which are compressed."""
    entries = spark.table(f"{at}.all_entries").select("data_file.lower_bounds", "data_file.upper_bounds").collect()
    return b" ".join(bytes(one) for row in entries for bounds in row if bounds for one in bounds.values())


@pytest.fixture(params=places()[1:])
def lake(
    request: pytest.FixtureRequest, spark: SparkSession, servers: Servers, database: str, tmp_path: Path
) -> Iterator[LakeAt]:
    place = where(request.param, tmp_path, database)
    with known(spark, place):
        yield LakeAt(spark, tmp_path, servers.bootstrap, place)


def test_each_operation_on_tables(spark: SparkSession, tmp_path: Path) -> None:
    """What the jobs do to the tables of a lake, each once; nightly they do it one after the other."""
    with known(spark, where("iceberg directory", tmp_path, "")):
        theirs, ours = [Sent(number, KEY) for number in (0, 3, 4)], [Sent(number, b"customer-8") for number in (1, 2)]
        root = make_lake(spark, tmp_path / "lake", [one.row() for one in (*theirs[:2], *ours, ours[0].again(1))])
        store, batch = (
            open_store(spark, root),
            LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {}),
        )
        read = replay.begin(spark, root, ReplayRequest(Selection(), Destination(topic="elsewhere")))

        # Columns are added: a user's, and one of a topic's values.
        store.change(f"ALTER TABLE {store.at('silver')} ADD COLUMNS (mine INT)")
        store.prepare([payload_table("orders", from_ddl("n INT"))], "test", HEADER)
        store.prepare([payload_table("orders", from_ddl("note STRING, n INT"))], "test", HEADER)
        assert store.table("json/orders").select("data.*").columns == ["n", "note"]
        batch.write(bronze_columns(kafka_rows(spark, [theirs[2].row() | {"offset": 5}])), 1)
        assert store.last_written(["silver"], "test") == 1
        assert sorted(one["id"] for one in store.table("silver").collect()) == [0, 1, 2, 3, 4]
        [left] = replay.preview(spark, root, read)
        assert left.records == 4, "a replay reads the records that there were when it began"

        # Windows are replaced, findings are appended.
        counted = metrics.run(spark, metrics.MetricsSettings(root))
        assert counted.records == 6
        assert metrics.run(spark, metrics.MetricsSettings(root)).records == 0
        run(spark, AuditSettings(lake=root, to=root))
        assert store.table("audits").count() == 1
        store.compact("silver")
        assert spark.table(f"{store.at('silver')}.files").count() == 1

        # A batch that is staged and never published, and one that was killed while it was staged.
        spark.conf.set("spark.wap.id", "nobody-1")
        spark.table(store.at("silver")).writeTo(store.at("silver")).append()
        spark.conf.unset("spark.wap.id")
        stray = next((tmp_path / "lake" / "silver").rglob("*.parquet"))
        (stray.parent / "stray.parquet").write_bytes(stray.read_bytes())
        traces = {"silver": Trace(f"key = X'{KEY.hex()}'"), METRICS.name: traces_of_other_jobs(KEY, "")[METRICS.name]}
        # A table of an earlier version has bounds of each column.
        store.set_property(METRICS.name, "write.metadata.metrics.default", "truncate(16)")
        store.change(f"UPDATE {store.at(METRICS.name)} SET records = records")
        assert KEY in bounds_of(spark, store.at(METRICS.name))
        # A tag keeps a version; the table that has it would come after others.
        streaming.store(spark, f"{root}/checkpoint", streaming.Manifest("test", "lake", ("orders",), HEADER))
        counts = cast(Any, store)._java(METRICS.name)  # Spark has no SQL for tags without Iceberg's extensions
        now, before = counts.currentSnapshot().snapshotId(), store.version("silver")
        counts.manageSnapshots().createTag("quarter", now).createBranch("trial", now).commit()
        with pytest.raises(TableMismatch, match=r"metrics: quarter, trial\)") as refused:
            erase(spark, root, KEY)
        assert ("DROP TAG" in str(refused.value.hint), store.version("silver")) == (True, before)
        counts.manageSnapshots().removeTag("quarter").removeBranch("trial").commit()
        for name, trace in traces.items():
            store.require_erasable([name])
            assert told_of(Path(root, name), KEY.decode()), name
            erased = store.erase(name, trace.where, trace.removal(store.at(name)))
            assert (erased.rows > 0, erased.files_removed > 0, erased.versions is not None) == (True, True, True)
            assert told_of(Path(root, name), KEY.decode()) == set()
            assert KEY not in bounds_of(spark, store.at(name))
        assert sorted(one["id"] for one in store.table("silver").collect()) == [1, 2]
        # Numbers of batches are known although their snapshots are gone.
        assert store.last_written(["silver"], "test") == 1
        batch.write(bronze_columns(kafka_rows(spark, [Sent(5).row() | {"offset": 6}])), 2)
        assert sorted(one["id"] for one in store.table("silver").collect()) == [1, 2, 5]


def test_a_lake_is_counted_audited_replayed_erased_and_gone_on_with(
    lake: LakeAt, spark: SparkSession, servers: Servers, database: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic, oracle, writer = make_topic(1, KEPT), Oracle(), Writer(servers.bootstrap)
    scene, kafka = Scene(database, servers.bootstrap, topic), {"bootstrap.servers": servers.bootstrap}
    payloads = {topic: from_ddl("who STRING")}
    theirs = [Sent(number, KEY, value_of(NAME), scene.incarnation) for number in (0, 3, 4)]
    ours = [Sent(number, b"customer-8", value_of("Bob"), scene.incarnation) for number in (1, 2, 5, 6)]
    for batch in ([*ours[:2], *theirs[:2], theirs[0].again(1)], [theirs[2], *ours[2:-1], ours[-1].again(2)]):
        oracle.take(writer.send(topic, batch))
        lake.once(topic, payloads=payloads)
    with psycopg.connect(database, autocommit=True) as connection:
        for one in (*theirs, *ours):
            connection.execute(
                "INSERT INTO outbox_archive (id, incarnation, purged_at, create_time, kafka_topic, kafka_key) VALUES"
                " (%s, %s, '2026-03-02T00:00:30Z', '2026-03-01Z', %s, %s)",
                (one.id, scene.incarnation, topic, one.key),
            )

    counted = metrics.run(spark, metrics.MetricsSettings(lake.address))
    assert counted.records == 8
    assert metrics.run(spark, metrics.MetricsSettings(lake.address)).records == 0
    [row] = lake.table("metrics").agg(F.sum("records").alias("records")).collect()
    assert row["records"] == 8
    report = run(spark, AuditSettings(lake=lake.address, kafka=kafka, dsn=database, to=lake.address))
    assert [(one.kind, one.count) for one in report.found] == [(FindingKind.LATE_REPEAT, 1)]
    assert lake.table("findings").count() == 1

    # A replay reads the records that there were when it began.
    request = ReplayRequest(Selection(), Destination(topic=make_topic(1)))
    begun = replay.begin(spark, lake.address, request)
    stopped = replay.run(
        spark, replay.ReplaySettings(lake.address, kafka, ReplayRate(slice_records=3)), begun, stop=Once()
    )
    assert not stopped.finished
    oracle.take(writer.send(topic, [Sent(7, b"customer-8", value_of("Bob"), scene.incarnation).again(3)]))
    lake.once(topic, payloads=payloads)
    assert replay.run(spark, replay.ReplaySettings(lake.address, kafka), replay.load(spark, lake.address, begun.id))
    assert len(read_topic(servers.bootstrap, request.destination.topic or "")) == 7

    # A batch that is staged and never published, and one that was killed while it was staged.
    at = lake.store.at("silver")
    spark.conf.set("spark.wap.id", "nobody-1")
    spark.table(at).writeTo(at).append()
    spark.conf.unset("spark.wap.id")
    stray = next(path for path in tmp_path.rglob("*.parquet") if "silver" in path.parts)
    (stray.parent / "stray.parquet").write_bytes(stray.read_bytes())
    assert told_of(tmp_path, NAME, KEY.decode()) == {NAME, KEY.decode()}
    done = erase(spark, lake.address, KEY, database=None)
    rows = {name: one.rows for name, one in done.tables.items() if one.rows}
    assert {name: count for name, count in rows.items() if name != "metrics"} == {
        "silver": 3, "repeats": 1, "current": 1, f"json/{topic}": 3, "metrics_keys": 2, "findings": 1, "audits": 1,
    }  # fmt: skip
    assert rows["metrics"] >= 1, "of two keys that are as hot either may be named"
    assert all(one.files_removed and one.versions for one in done.tables.values() if one.rows)
    assert told_of(tmp_path, NAME, KEY.decode(), "Bob") == {"Bob"}

    # The rest is as it was, also for who comes again: numbers of batches are known although their snapshots are gone.
    oracle.bronze = [one for one in oracle.bronze if one.sent.key != KEY]
    oracle.silver = {name: one for name, one in oracle.silver.items() if one in oracle.bronze}
    lake.assert_holds(oracle)
    assert lake.store.last_written(["silver"], lake.store.properties("silver")["harvester.lake"]) == 2
    again = [replace(ours[0], id=8), ours[0].again(3)]
    oracle.take(writer.send(topic, again))
    lake.once(topic, payloads=payloads)
    lake.assert_holds(oracle)
    assert metrics.run(spark, metrics.MetricsSettings(lake.address)).hours == 3
    assert told_of(tmp_path, KEY.decode()) == set()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DELETE FROM outbox_archive WHERE kafka_key = %s", (KEY,))
    report = run(spark, AuditSettings(lake=lake.address, kafka=kafka, dsn=database))
    assert not {one.kind for one in report.found} & {FindingKind.LOST, FindingKind.GAP}


class Once:
    """False once, then True."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self) -> bool:
        self._asked += 1
        return self._asked > 2
