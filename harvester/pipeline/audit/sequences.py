"""Finds missing numbers of lanes from the topics alone: `harvester.verify.sequences` as Spark window functions.

The terms are those of that module. Every producer of a lane numbers the records that it sends under a term 1, 2, 3, …,
across all topics, so a number missing below the highest one is a record that was numbered and is not in the log. It was
given up (the quarantine, or a notice, names it), left to a successor (a later producer or term sent it again), or is
open: under way or lost. The id of a missing number is known only for records that were given up, so an audit cannot
tell whether its record was delivered under another number.

Unlike that module, an audit also considers edges: what retention removed, or what lies before the range, looks like a
hole.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline.audit.checks import AcceptedLoss, explained
from harvester.pipeline.audit.schemas import GIVEN_UP, HISTORY, MARKED, RECORDS, STREAM, FindingKind, Severity, finding
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.schemas import KAFKA

_NUMBER = (*STREAM, "sequence")


class SequenceHole(StrEnum):
    """Why numbers are missing. The first three kinds are those of `verify`; the last two cannot be judged."""

    GIVEN_UP = "given up"
    HANDED_OVER = "left to a successor"
    OPEN = "under way or lost"
    RECENT = "newer than the snapshot of the outbox, or than the complete part of a lake"
    EDGE = "at the edge of what was read"


def given_up(history: DataFrame, records: DataFrame) -> DataFrame:
    """HISTORY and RECORDS → GIVEN_UP: the numbers of quarantined records, and those named by notices."""
    assert "origin" in HISTORY.names
    assert "notice" in RECORDS.names
    raw = history.select("origin").unionByName(records.select(F.col("notice").alias("origin")))
    raw = raw.where(F.col("origin").isNotNull())
    # Shaped like Kafka's rows, so that `bronze_columns` remains the only decoder of the header.
    header = F.array(F.struct(F.lit("harvester").alias("key"), F.col("origin").alias("value")))
    nothing = {one.name: F.lit(None).cast(one.dataType) for one in KAFKA}
    rows = raw.withColumns({**nothing, "headers": header})
    decoded = bronze_columns(rows, "harvester").where(F.col("problem").isNull())
    return decoded.select(*GIVEN_UP.names).distinct()


def numbers(marked: DataFrame, given_up: DataFrame) -> DataFrame:
    """MARKED and GIVEN_UP → a row for each number: the count of its `ids` (0: given up), and its latest record `at`."""
    assert set(_NUMBER) <= set(MARKED.names)
    place = F.struct("timestamp", "topic", "partition", "offset", "id", "key", "inside")
    seen = marked.groupBy(*_NUMBER).agg(F.size(F.collect_set("id")).alias("ids"), F.max(place).alias("at"))
    joined = seen.join(given_up, list(_NUMBER), "full_outer")
    return joined.select(*_NUMBER, F.coalesce("ids", F.lit(0)).alias("ids"), "at")


def gaps(numbers: DataFrame, last: DataFrame, whole: datetime | None, read_at: datetime | None) -> DataFrame:
    """`numbers` and `last_streams` → the missing numbers `first` … `last` of a stream, and why: `hole`.

    `at`: the next record; `previous_at`: the time of the record before. `whole`: the time from which the topics are
    complete; None: from their beginning. `read_at`: the time up to which they are complete, or at which the outbox was
    read; a hole is RECENT if its next record is later. None: no hole is.
    """
    stream = Window.partitionBy(*STREAM)
    before = stream.orderBy("sequence")
    # `next`: the next record, skipping numbers without one. Sorted descending: a window ahead would be quadratic.
    up_to_here = stream.orderBy(F.desc("sequence")).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    earlier = before.rowsBetween(Window.unboundedPreceding, -1)
    rows = (
        numbers.withColumn("next", F.last("at", ignorenulls=True).over(up_to_here))
        .withColumn("previous", F.lag("sequence", 1, 0).over(before))
        .withColumn("previous_at", F.last("at.timestamp", ignorenulls=True).over(earlier))
        .where(F.col("next").isNotNull())
    )

    def missing(first: Column, last: Column, *, given_up: bool) -> tuple[Column | str, ...]:
        known = F.lit(given_up).alias("given_up")
        return (*STREAM, first.alias("first"), last.alias("last"), F.col("next").alias("at"), "previous_at", known)

    number, previous = F.col("sequence"), F.col("previous")
    holes = rows.where(number > previous + 1).select(*missing(previous + 1, number - 1, given_up=False))
    known = rows.where(F.col("ids") == 0).select(*missing(number, number, given_up=True))
    found = holes.unionByName(known).join(F.broadcast(last.withColumn("_last", F.lit(True))), list(STREAM), "left")
    edge = F.lit(False) if whole is None else F.coalesce(F.col("previous_at") < F.lit(whole), F.lit(True))
    recent = F.lit(False) if read_at is None else F.coalesce(F.col("at.timestamp") > F.lit(read_at), F.lit(False))
    hole = (
        F.when(F.col("given_up"), SequenceHole.GIVEN_UP)
        .when(edge, SequenceHole.EDGE)
        .when(F.col("_last").isNull(), SequenceHole.HANDED_OVER)
        .when(recent, SequenceHole.RECENT)
        .otherwise(SequenceHole.OPEN)
    )
    return found.withColumn("hole", hole).select(*STREAM, "first", "last", "previous_at", "at", "hole")


def last_streams(streams: DataFrame) -> DataFrame:
    """(STREAM, last_at) → STREAM: for each lane of an incarnation's last term, the stream with the latest record."""
    incarnation = Window.partitionBy("incarnation")
    lane = Window.partitionBy("incarnation", "lane").orderBy(F.desc("last_at"), F.desc("producer"))
    latest = streams.withColumn("_term", F.max("term").over(incarnation)).where(F.col("term") == F.col("_term"))
    return latest.withColumn("_nth", F.row_number().over(lane)).where(F.col("_nth") == 1).select(*STREAM)


def open_gaps(gaps: DataFrame, severity: Severity, losses: Collection[AcceptedLoss] = ()) -> DataFrame:
    """`gaps` → FINDINGS: the open ones, each at the record with the next number."""
    rows = gaps.where((F.col("hole") == SequenceHole.OPEN) & F.col("at.inside"))
    size = F.try_add(F.try_subtract("last", "first"), F.lit(1))
    accepted = explained(losses, begun="previous_at", ended="at.timestamp", size=size)
    rows = rows.withColumn("_accepted", accepted)
    kind = F.when(F.col("_accepted"), FindingKind.ACCEPTED).otherwise(FindingKind.GAP)
    judged = F.when(F.col("_accepted"), Severity.ACCEPTED).otherwise(severity.value)
    numbers = F.when(F.col("first") == F.col("last"), F.format_string("number %d is", "first")).otherwise(
        F.format_string("numbers %d to %d are", "first", "last")
    )
    detail = F.format_string("term %d, lane %d, producer %d: %s missing", "term", "lane", "producer", numbers)
    return _at_record(rows, kind, judged, detail, id=F.lit(None))


def clashes(numbers: DataFrame) -> DataFrame:
    """`numbers` → FINDINGS: numbers with several ids, which a reader of committed records must never see."""
    rows = numbers.where((F.col("ids") > 1) & F.col("at.inside"))
    detail = F.format_string(
        "term %d, lane %d, producer %d: number %d has %d ids", "term", "lane", "producer", "sequence", "ids"
    )
    return _at_record(rows, FindingKind.CLASH, Severity.VIOLATION, detail)


def _at_record(
    rows: DataFrame, kind: Column | FindingKind, severity: Column | Severity, detail: Column, **other: Column
) -> DataFrame:
    place = {name: F.col(f"at.{name}") for name in ("topic", "partition", "offset", "id")}
    place |= {"key": F.lit(None), "at": F.col("at.timestamp")}
    return finding(rows, kind, severity, detail, **{**place, **other})
