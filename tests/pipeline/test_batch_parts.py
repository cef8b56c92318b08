"""What a batch is told by: its ranges of offsets, the overview of what is in it, and which of its records are new."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvester.origin import HEADER, Origin, encode
from harvester.pipeline import session, tables
from harvester.pipeline.errors import CheckpointMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.batch import LakeBatch, ids_file, to_do_again
from harvester.pipeline.lake.ids import StoredIds, Word
from harvester.pipeline.lake.upkeep import fill_in
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.streaming import parse
from tests.support.lakes import first_deliveries, make_lake
from tests.support.longs import long, some_of
from tests.support.sparks import assert_rows, kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B = UUID(int=2**127), UUID(int=5)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = 2**63 - 1
ids = st.integers(-70, 70) | st.sampled_from([-(2**63), LAST, LAST - 64])


def written(ends: Any, version: str = "v1") -> str:
    """As Spark's OffsetSeqLog has it."""
    return f'{version}\n{{"batchWatermarkMs":0}}\n{json.dumps(ends)}'


def test_the_ends_of_a_batch_are_read_as_spark_has_written_them() -> None:
    ends = {"orders": {"0": 9, "2": 1}, "payments": {"1": 3}}
    assert parse(written(ends), "there") == {("orders", 0): 9, ("orders", 2): 1, ("payments", 1): 3}


@pytest.mark.parametrize("text", ["", "v1", written({}, "v2"), written([]), written({"orders": 3}), "v1\n{}\n{"])
def test_an_unknown_way_of_writing_offsets_is_told(text: str) -> None:
    with pytest.raises(CheckpointMismatch, match="there was not written by a Spark"):
        parse(text, "there")


batches = st.lists(st.lists(st.tuples(st.sampled_from([A, B]), ids), min_size=1, max_size=40), min_size=2, max_size=3)


@settings(max_examples=some_of(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(named=batches, most=st.sampled_from([1, 1000]))
def test_new_is_the_first_of_a_name_in_whatever_batch(
    spark: SparkSession, named: list[list[tuple[UUID, int]]], most: int
) -> None:
    """Also where nearly nothing is remembered, and the table has to say it."""
    stored, seen, offset = StoredIds(), set[tuple[UUID, int]](), 0
    table = None
    for batch in named:
        rows = [{**origin(*one), "offset": offset + at} for at, one in enumerate(batch)]
        bronze = bronze_columns(kafka_rows(spark, rows)).persist()
        new = first_deliveries(bronze, stored, table)
        expected = [{"offset": offset + batch.index(one)} for one in dict.fromkeys(batch) if one not in seen]
        assert_rows(new.select("offset"), expected)
        stored.add(silver.summed_up(silver.overview(bronze).collect()).ids, most)
        there = silver.deliveries(new, HEADER)
        table = there if table is None else table.unionByName(there)
        seen.update(batch)
        offset += len(batch)


def test_the_overview_has_topics_and_when_incarnations_were_first_seen(spark: SparkSession) -> None:
    rows = [
        {**origin(A, one), "topic": f"t{one % 2}", "timestamp": EPOCH + timedelta(seconds=9 - one)} for one in range(3)
    ]
    found = silver.summed_up(
        silver.overview(bronze_columns(kafka_rows(spark, [*rows, {"topic": "foreign"}]))).collect()
    )
    assert (found.records, found.rejected, found.topics) == (4, 1, {"t0", "t1"})
    assert found.since_us == {str(A): 7_000_000}
    assert found.ids.words == {A: {0: Word(0, 7, 7, 3)}}
    assert silver.summed_up([]) == silver.BatchOverview()


def test_a_commit_does_not_list_the_files_of_its_table(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing reads that list, and where the clock is not set to UTC, Delta compares it with all of the log."""
    make_lake(spark, tmp_path / "lake", [origin(A, 1)])
    checked = json.loads((tmp_path / "lake" / "silver" / "_delta_log" / f"{1:020d}.crc").read_text(encoding="utf-8"))
    assert (checked["numFiles"], checked.get("allFiles")) == (1, None)


def test_a_repeat_costs_no_look_into_the_table_unless_its_id_was_forgotten(spark: SparkSession, tmp_path: Path) -> None:
    """A table that would be read cannot be: its files are gone."""
    root = make_lake(spark, tmp_path / "lake", [origin(A, one) for one in range(100)])
    batch = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {})
    for file in (tmp_path / "lake" / "silver").glob("day=*/*.parquet"):
        file.unlink()
    batch.write(bronze_columns(kafka_rows(spark, [{**origin(A, one), "offset": 100 + one} for one in (5, 100)])), 1)
    assert_rows(spark.read.format("delta").load(f"{root}/repeats"), [{"id": 5, "offset": 105}])
    (tmp_path / "lake" / "checkpoint" / "ids" / "1.json").unlink()
    again = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {})
    with pytest.raises(Exception, match=r"FAILED_READ_FILE|does not exist"):
        again.write(bronze_columns(kafka_rows(spark, [{**origin(A, 6), "offset": 200}])), 2)


@pytest.mark.parametrize(("failing", "is_one"), [("lake.silver", True), ("lake.end", True), ("lake.end", False)])
def test_a_batch_leaves_nothing_on_sparks_disks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, is_one: bool
) -> None:
    """Neither its records nor their repeats, whether it is written or fails, on one machine and as on a cluster."""
    monkeypatch.setattr(session, "is_one_process", lambda _: is_one)

    def kept() -> int:  # on disk alone: Delta keeps its own in memory
        there = spark.sparkContext._jsc.getPersistentRDDs().values()
        return sum(not rows.getStorageLevel().useMemory() for rows in there)

    before = kept()
    root = make_lake(spark, tmp_path / "lake", [origin(A, 1)])
    seen = []

    def hit(here: str) -> None:
        seen.append(kept() - before)
        if here == failing:
            raise InterruptedError(here)

    batch = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {}, hit)
    rows = bronze_columns(kafka_rows(spark, [{**origin(A, one), "offset": 1 + one} for one in (1, 2)]))
    with pytest.raises(InterruptedError):
        batch.write(rows, 1)
    assert (max(seen), kept()) == (2, before)


def writer(spark: SparkSession, root: str, left: set[str]) -> Callable[..., None]:
    """Writes rows as a batch with a number, each time in a new process, which ends before the places in `left`."""

    def hit(here: str) -> None:
        if here in left:
            raise InterruptedError(here)

    def write(number: int, *rows: dict[str, Any]) -> None:
        batch = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {}, hit)
        batch.write(bronze_columns(kafka_rows(spark, rows)), number)

    return write


@long  # test_new_is_the_first_of_a_name_in_whatever_batch and the next two decide about repeats every day
@pytest.mark.parametrize("place", ["lake.silver", "lake.ids", "lake.repeats", None])
def test_a_repeat_that_a_given_up_batch_has_left_alone_is_decided_anew(
    spark: SparkSession, tmp_path: Path, place: str | None
) -> None:
    """Kafka has nothing of it any more, nor of the record. The batch that decides is cut off too, and comes again."""
    root = make_lake(spark, tmp_path / "lake", [origin(A, 1)])
    left = {"lake.silver"}
    write_rows = writer(spark, root, left)

    def write(number: int, *offsets: tuple[int, int]) -> None:
        write_rows(number, *({**origin(A, one), "offset": at} for one, at in offsets))

    with pytest.raises(InterruptedError):
        write(1, (7, 10), (7, 20), (7, 21), (1, 22))
    tables.write_text(spark, ids_file(f"{root}/checkpoint", 1), to_do_again(1))
    left.clear()
    if place is not None:
        left.add(place)
        with pytest.raises(InterruptedError):
            write(2, (8, 23))
    left.clear()
    write(2, (8, 23))
    write(3, (7, 30), (9, 31))
    stored = {name: spark.read.format("delta").load(f"{root}/{name}") for name in ("silver", "repeats")}
    expected = [{"id": one, "offset": at} for one, at in ((1, 0), (7, 20), (8, 23), (9, 31))]
    assert_rows(stored["silver"].select("id", "offset"), expected)
    expected = [{"id": one, "offset": at} for one, at in ((7, 21), (1, 22), (7, 30))]
    assert_rows(stored["repeats"].select("id", "offset"), expected)


def test_a_record_at_the_offset_of_a_repeat_in_a_topic_made_anew_is_new(spark: SparkSession, tmp_path: Path) -> None:
    """A batch that was given up has written that repeat, of the topic as it was."""
    root = make_lake(spark, tmp_path / "lake", [origin(A, 1)])
    left = {"lake.silver"}
    write = writer(spark, root, left)

    with pytest.raises(InterruptedError):
        write(1, *({**origin(A, 7), "offset": at} for at in (10, 20, 21)))
    tables.write_text(spark, ids_file(f"{root}/checkpoint", 1), to_do_again(1))
    left.clear()
    write(2, {**origin(A, 8), "offset": 21, "timestamp": datetime(2026, 3, 2, tzinfo=UTC)})
    stored = {name: spark.read.format("delta").load(f"{root}/{name}") for name in ("silver", "repeats")}
    expected = [{"id": one, "offset": at} for one, at in ((1, 0), (7, 20), (8, 21))]
    assert_rows(stored["silver"].select("id", "offset"), expected)
    assert_rows(stored["repeats"].select("id", "offset"), [{"id": 7, "offset": 21}])


def test_what_a_given_up_batch_has_not_written_the_next_one_does(spark: SparkSession, tmp_path: Path) -> None:
    """Cut off before each of its writes in turn, by day before two of them. Kafka has all of it still."""
    payload, refused = silver.from_ddl("n INT"), set[str]()
    root = make_lake(spark, tmp_path / "lake", [{**origin(A, 1), "value": b"{}"}])
    store = open_store(spark, root)
    store.prepare([silver.payload_table("orders", payload)], "test", HEADER)

    def hit(here: str) -> None:
        if here in refused:
            raise InterruptedError(here)

    def write(number: int, rows: list[dict[str, Any]]) -> None:
        batch = LakeBatch(
            store, f"{root}/checkpoint", "test", HEADER, {"orders": silver.JsonValues("orders", payload)}, hit
        )
        batch.write(bronze_columns(kafka_rows(spark, rows)), number)

    each = ("lake.silver", "lake.json", "lake.repeats", "lake.rejects", "lake.ids")
    places = {100 * at + 1: place for at, place in enumerate(each[: some_of(len(each))], start=1)}
    for at, (first, place) in enumerate(places.items()):
        named = [{**origin(A, one), "value": b"{}"} for one in (1, first, first + 1, first)]
        strange: list[dict[str, Any]] = [{"value": b"{}"}, {**origin(A, first + 2), "value": b"["}]
        rows = [{**row, "offset": first + offset} for offset, row in enumerate([*named, *strange])]
        refused = {place}
        with pytest.raises(InterruptedError):
            write(number := 2 * at + 1, rows)
        refused = set()
        tables.write_text(spark, ids_file(f"{root}/checkpoint", number), to_do_again(number))
        fill_in(store, HEADER, silver.JsonValues("orders", payload), lambda _: None)
        write(number + 1, [*rows, {**origin(A, first + 3), "value": b"{}", "offset": first + 50}])

    def stored(name: str, *columns: str) -> list[tuple[Any, ...]]:
        rows = spark.read.format("delta").load(f"{root}/{name}").select(*columns)
        return sorted(tuple(row) for row in rows.collect())

    new = [(one + more, one + offset) for one in places for more, offset in enumerate((1, 2, 5, 50))]
    assert stored("silver", "id", "offset") == [(1, 0), *new]
    assert stored("repeats", "id", "offset") == [*((1, one) for one in places), *((one, one + 3) for one in places)]
    reasons = ((4, "no header"), (5, "bad payload"))
    assert stored("rejects", "offset", "reason") == [(one + at, reason) for one in places for at, reason in reasons]
    assert stored("json/orders", "id") == [(1,), *((one,) for one, _ in new if one - 2 not in places)]


def origin(incarnation: UUID, number: int) -> dict[str, Any]:
    return {"headers": [(HEADER, encode(Origin(incarnation, number, 1, 0, 1, 1, number)))]}


def test_a_batch_that_comes_again_with_less_knows_what_it_has_written(spark: SparkSession, tmp_path: Path) -> None:
    """Kafka has compacted the topic meanwhile; what it has removed is delivered once more, later."""
    root = make_lake(spark, tmp_path / "lake")

    def write(number: int, *offsets: tuple[int, int], place: str | None = None) -> None:
        def hit(here: str) -> None:
            if here == place:
                raise InterruptedError(here)

        batch = LakeBatch(open_store(spark, root), f"{root}/checkpoint", "test", HEADER, {}, hit)
        rows = [{**origin(A, one), "offset": at} for one, at in offsets]
        batch.write(bronze_columns(kafka_rows(spark, rows)), number)

    for number, ids in enumerate(((1, 2), (3, 4))):
        written = [(one, one) for one in ids]
        with pytest.raises(InterruptedError):
            write(number, *written, place="lake.ids")
        write(number, *written[1:])
    write(2, (1, 5), (3, 6))
    assert_rows(spark.read.format("delta").load(f"{root}/silver").select("id"), [{"id": one} for one in range(1, 5)])
    assert_rows(spark.read.format("delta").load(f"{root}/repeats").select("id"), [{"id": 1}, {"id": 3}])
