"""Blocks of ids: what they leave out changes no finding and no figure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit import blocks, checks, inputs, skew
from harvester.pipeline.audit.job import collect_tallies
from harvester.pipeline.audit.schemas import (
    BLOCKS,
    FINDINGS,
    HISTORY,
    HISTORY_BLOCKS,
    MARKED,
    RECORDS,
    Severity,
)
from harvester.pipeline.formats import open_store
from harvester.pipeline.jdbc import jdbc_source
from harvester.pipeline.schemas import bit, block
from tests.support.audits import Scene, Sent, at, history, records
from tests.support.databases import TABLE
from tests.support.lakes import make_lake
from tests.support.longs import long
from tests.support.sparks import assert_same_columns

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

IDS = 150  # of a scene: three blocks
KEYS = (b"a", b"b", b"c", None)
Past = dict[str, Any]

ids = st.integers(1, IDS)
defects = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["missing", "unknown", "waits", "elsewhere", "early", "late", "young"]), ids),
        st.tuples(st.sampled_from(["again", "swapped"]), ids, ids),
    ),
    max_size=4,
)


def scene(incarnation: UUID, wrong: list[tuple[Any, ...]]) -> tuple[list[Sent], list[Past]]:
    """Deliveries and history of one incarnation, with these defects."""
    sent = {
        number: Sent(number, KEYS[number % 4], incarnation=incarnation, seconds=number / 10)
        for number in range(1, IDS + 1)
    }
    past = {number: Past(id=number, incarnation=str(incarnation), at=at(number / 10)) for number in sent}
    order = list(sent)
    for defect in wrong:
        match defect:
            case "missing", number:
                order = [one for one in order if one != number]
            case "unknown", number:
                past.pop(number, None)
            case "waits", number if number in past:
                past[number] |= {"source": "outbox", "at": None}
            case "elsewhere", number if number in past:
                past[number]["topic"] = "other"
            case "early" | "late" as when, number if number in past:
                past[number]["at"] = at(-500 if when == "early" else 500)
            case "young", number:
                sent[number] = replace(sent[number], created_us=2**60)
            case "again", number, place:
                order.insert(place, number)
            case "swapped", one, other if one in order and other in order:
                here, there = order.index(one), order.index(other)
                order[here], order[there] = other, one
    return [sent[number] for number in order], list(past.values())


def summarised(past: DataFrame) -> DataFrame:
    """HISTORY → HISTORY_BLOCKS, as PostgreSQL does it."""
    rows = past.groupBy("source", "incarnation", "topic", F.expr(block("id")).alias("block")).agg(
        F.count(F.lit(1)).alias("rows"), F.bit_or(F.expr(bit("id"))).alias("ids"), F.min("at").alias("first_at"),
        F.max("at").alias("last_at"), F.array_join(F.collect_list(F.hex("origin")), " ").alias("origins"),
    )  # fmt: skip
    return rows.select(*HISTORY_BLOCKS.names).localCheckpoint()


def listed(frames: list[DataFrame]) -> Counter[tuple[Any, ...]]:
    rows = reduce(lambda one, other: one.unionByName(other), frames).drop("detail").collect()
    return Counter(tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes=st.lists(defects, min_size=1, max_size=30))
def test_what_is_found_in_blocks_is_what_is_found_in_everything(
    spark: SparkSession, scenes: list[list[tuple[Any, ...]]]
) -> None:
    """Each scene in an incarnation of its own."""
    made = [scene(UUID(int=number), wrong) for number, wrong in enumerate(scenes, start=1)]
    frame = records(spark, [one for sent, _ in made for one in sent]).localCheckpoint()
    past = history(spark, *(row for _, rows in made for row in rows)).localCheckpoint()
    scope = checks.AuditScope(("orders",), at(0), at(100))
    began, read_at = at(0), at(1_000)

    def judged(few: DataFrame, found: DataFrame, strange: DataFrame, known: DataFrame) -> Counter[tuple[Any, ...]]:
        wrong = checks.findings(few, repeats=Severity.SUSPECT, swaps=Severity.VIOLATION)
        assert_same_columns(wrong, FINDINGS)
        return listed([wrong, checks.lost(found, scope), checks.unexpected(strange, known, began, read_at)])

    whole = checks.marked(frame).localCheckpoint()
    there = checks.found(checks.archived(past, scope), whole).localCheckpoint()
    pending = past.where("source = 'outbox'").join(
        whole.select("incarnation", "id"), ["incarnation", "id"], "left_anti"
    )
    expected = collect_tallies(checks.of_archive(there), checks.of_records(skew.places(whole)))
    expected[checks.PENDING] = pending.count()

    sent = frame.where("problem IS NULL")
    compared = blocks.compared(
        blocks.of_records(sent, checks.expected(began, read_at)), summarised(past), scope
    ).localCheckpoint()
    assert_same_columns(compared, BLOCKS)
    examined, fine = blocks.split(sent, compared, blocks.disordered(sent).localCheckpoint())
    assert_same_columns(examined, RECORDS)
    assert_same_columns(fine, MARKED)
    few = checks.marked(examined).localCheckpoint()
    archived = blocks.reread_rows(past.where("source = 'archive'"), compared)
    found = checks.found(checks.archived(archived, scope), few).localCheckpoint()
    strange = blocks.in_blocks(few, compared)
    assert judged(few, found, strange, blocks.listed_ids(compared)) == judged(whole, there, whole, past)
    tallies = collect_tallies(
        checks.of_archive(found), blocks.tallies(compared), checks.of_records(skew.places(fine.unionByName(few)))
    )
    assert tallies == expected
    clean = sum(not wrong for wrong in scenes)
    assert fine.count() >= clean * IDS * 2 // 3, "of a scene without a defect only the end of the range is looked at"


def test_rows_that_were_archived_since_are_not_reread(spark: SparkSession) -> None:
    """65 waited when the bits were read, and its record had not been read; now it is in the archive."""
    sent = records(spark, [Sent(64), Sent(66)])
    before = history(spark, {"id": 64}, {"id": 65, "source": "outbox", "at": None}, {"id": 66}, {"id": 67})
    now = history(spark, {"id": 64}, {"id": 65}, {"id": 66}, {"id": 67})
    scope = checks.AuditScope(("orders",))
    compared = blocks.compared(blocks.of_records(sent, F.lit(True)), summarised(before), scope).localCheckpoint()
    assert [row["id"] for row in blocks.reread_rows(now, compared).orderBy("id").collect()] == [64, 66, 67]
    assert collect_tallies(blocks.tallies(compared)) == {"archived": 0, "delivered": 0, "beyond": 0, "pending": 1}
    assert blocks.are_all(blocks.reread_rows(now, compared), compared)
    gone = now.where("id <> 66")
    assert not blocks.are_all(blocks.reread_rows(gone, compared), compared), "retention removed a row meanwhile"


def test_ids_of_any_size_have_a_bit(spark: SparkSession) -> None:
    numbers = [0, 63, 64, 2**62 + 5, 2**63 - 1, -1, -64, -(2**63)]
    frame = records(spark, [Sent(number) for number in numbers if number >= 0])
    nothing = summarised(history(spark))
    compared = blocks.compared(blocks.of_records(frame, F.lit(True)), nothing, checks.AuditScope(("orders",)))
    seen = compared.localCheckpoint()
    assert seen.where("examined").count() == 4
    both = summarised(history(spark, *({"id": number} for number in numbers)))
    known = blocks.compared(blocks.of_records(frame, F.lit(True)), both, checks.AuditScope(("orders",)))
    listed = blocks.listed_ids(known.withColumn("examined", F.lit(True)))
    assert {row["id"] for row in listed.collect()} == set(numbers)


@pytest.mark.servers
def test_postgres_and_spark_summarise_alike(
    spark: SparkSession, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(database, "", "orders")
    numbers = [-(2**63), -65, -1, 0, 1, 63, 64, 70, 130, 2**63 - 1]
    scene.archive(scene.own(Sent(number, seconds=number % 7) for number in numbers))
    for number in (65, 131):
        scene.quarantine(replace(Sent(number), incarnation=scene.incarnation))
    scene.wait(Sent(66))
    jdbc, facts = jdbc_source(database), inputs.history_facts(database, TABLE)
    listed = inputs.query(TABLE, facts, None)
    past = inputs.read_history(spark, jdbc, listed, (0, 0)).localCheckpoint()
    assert past.count() == len(numbers) + 3
    own = summarised(past)
    monkeypatch.setattr(inputs, "_IDS_A_SESSION", 32)
    for ids in ((0, 0), (-70, 140), facts.ids):
        # A block may be cut in two by the ranges of two sessions.
        read = inputs.read_blocks(spark, jdbc, listed, ids)
        assert_same_columns(read, HISTORY_BLOCKS)
        whole = read.groupBy("source", "incarnation", "topic", "block").agg(
            F.sum("rows").alias("rows"), F.bit_or("ids").alias("ids"), F.min("first_at"), F.max("last_at")
        )
        assert set(whole.collect()) == set(own.drop("origins").collect())
        origins = {bytes(row["origin"]) for row in blocks.origins(read).collect()}
        assert origins == {bytes(row["origin"]) for row in past.where("origin IS NOT NULL").collect()}
    for most, wanted in ((10, [-65, 64, 70]), (1, sorted(numbers))):
        monkeypatch.setattr(inputs, "MOST_BLOCKS", most)
        rows = inputs.read_archived(spark, jdbc, TABLE, facts, None, [-2, 1])
        assert_same_columns(rows, HISTORY)
        assert [row["id"] for row in rows.orderBy("id").collect()] == wanted


@long
def test_a_lake_that_changes_meanwhile_is_read_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    root = make_lake(spark, tmp_path / "lake", [Sent(number).row() for number in (1, 2, 3)])
    given = inputs.from_lake(spark, root, None)
    store = open_store(spark, root)
    store.change(f"DELETE FROM {store.at('silver')} WHERE id = 2")
    assert [row["id"] for row in given.bronze.orderBy("id").collect()] == [1, 2, 3]
