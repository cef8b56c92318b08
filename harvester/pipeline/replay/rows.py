"""schemas.SILVER → what a replay writes: which rows, in which order, cut into slices, as Kafka's records.

The order of a key is that of its first deliveries, which is the one consumers saw: offsets, within a partition. Between
partitions it is that of log time, the highest timestamp up to a record in its partition: timestamps alone may go
backwards, and would then contradict the offsets. So the whole order is (log time, topic, partition, offset), and any
piece of it that begins where another one ends keeps the order of every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas
from harvester.pipeline.replay.request import By, Positions, Selection

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import Column, DataFrame, Row

HEADER = "harvester-replay"
"""The header that says which replay wrote a record; its value is the replay's id, as text."""

SUMMARY = ("topic", "records", "tombstones", "first", "last")
RECORDS = ("key", "value", "topic", "headers")
_ORDER = ("log_time", "topic", "partition", "offset")
_IN_TASK = 2**33 - 1


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of the order: what lies behind the slices before, up to these positions."""

    records: int
    upto: Positions


def selected(silver: DataFrame, selection: Selection) -> DataFrame:
    """schemas.SILVER → the same: the rows that are asked for. Without a time of creation none is in a range of it."""
    column = "timestamp" if selection.by is By.PUBLISHED else "created_at"
    rows = silver
    if selection.topics:
        rows = rows.where(F.col("topic").isin(*selection.topics))
    if selection.keys:
        rows = rows.where(F.col("key").isin(*(F.lit(key) for key in selection.keys)))
    if selection.since is not None:
        rows = rows.where(F.col(column) >= _instant(selection.since))
    if selection.until is not None:
        rows = rows.where(F.col(column) < _instant(selection.until))
    if selection.by is By.CREATED:  # spares Delta the files of other days
        if selection.since is not None:
            rows = rows.where(F.col("day") >= F.to_date(_instant(selection.since)))
        if selection.until is not None:
            rows = rows.where(F.col("day") <= F.to_date(_instant(selection.until)))
    return rows.select(*schemas.SILVER.names)


def behind(rows: DataFrame, done: Positions) -> DataFrame:
    """The rows that come after these positions, all columns; a partition that has none is wanted whole."""
    if not done:
        return rows
    passed = [_place(*place) & (F.col("offset") <= offset) for place, offset in done.items()]
    return rows.where(~_any(passed))


def between(rows: DataFrame, done: Positions, upto: Positions) -> DataFrame:
    """The rows of these partitions behind `done`, up to `upto`, all columns."""
    wanted = []
    for place, offset in upto.items():
        low = done.get(place)
        inside = F.col("offset") <= offset
        wanted.append(_place(*place) & (inside if low is None else inside & (F.col("offset") > low)))
    return rows.where(_any(wanted))


def placed(rows: DataFrame) -> DataFrame:
    """Adds `log_time`: the highest timestamp of the rows up to this one in its partition."""
    partition = Window.partitionBy("topic", "partition").orderBy("offset")
    return rows.withColumn("log_time", F.max("timestamp").over(partition))


def cuts(rows: DataFrame, size: int) -> DataFrame:
    """schemas.SILVER → (task, cut, topic, partition, last, records), sorted: slices of up to `size` rows, in order.

    The sort leaves each task a range of the order; each is cut by itself, so nothing has to count through all rows.
    """
    # The id is the task's number and, in the lower 33 bits, that of the row within it.
    numbered = placed(rows).select(*_ORDER).orderBy(*_ORDER).withColumn("_at", F.monotonically_increasing_id())
    row = F.col("_at").bitwiseAND(_IN_TASK)
    found = numbered.withColumns({"task": F.shiftright("_at", 33), "cut": row - F.pmod(row, F.lit(size))})
    slices = found.groupBy("task", "cut", "topic", "partition").agg(
        F.max("offset").alias("last"), F.count("*").alias("records")
    )
    return slices.orderBy("task", "cut", "topic", "partition")


def slices(rows: Iterable[Row]) -> Iterator[Slice]:
    """Rows of `cuts`, in their order → slices."""
    at: tuple[int, int] | None = None
    records, upto = 0, dict[tuple[str, int], int]()
    for row in rows:
        if at != (row["task"], row["cut"]) and upto:
            yield Slice(records, upto)
            records, upto = 0, {}
        at = (row["task"], row["cut"])
        records += row["records"]
        upto[row["topic"], row["partition"]] = row["last"]
    if upto:
        yield Slice(records, upto)


def outgoing(rows: DataFrame, targets: Mapping[str, str], replay: str, without: str | None = None) -> DataFrame:
    """`placed` rows → RECORDS for Spark's Kafka sink, with the replay's header last; `without` one of that name.

    All records of a key for a topic are in one task, in order; the others are spread. A tombstone's value is NULL.
    """
    mapped = F.create_map(*(F.lit(text) for pair in targets.items() for text in pair))
    kept = F.coalesce("headers", F.array().cast(schemas.HEADERS))
    if without is not None:
        kept = F.filter(kept, lambda one: one["key"] != F.lit(without))
    mark = F.array(F.struct(F.lit(HEADER).alias("key"), F.lit(replay.encode()).alias("value")))
    rows = rows.withColumns({"target": mapped[F.col("topic")], "headers": F.concat(kept, mark.cast(schemas.HEADERS))})
    # Without a key there is no order to keep, and one task would get them all.
    spread = F.when(F.col("key").isNull(), F.col("offset"))
    sent = rows.repartition("target", "key", spread).sortWithinPartitions(*_ORDER)
    return sent.select("key", "value", F.col("target").alias("topic"), "headers")


def summary(rows: DataFrame) -> DataFrame:
    """schemas.SILVER → SUMMARY: how much there is of each topic, and from when to when by Kafka's time."""
    counted = rows.groupBy("topic").agg(
        F.count("*").alias("records"),
        F.count_if("tombstone").alias("tombstones"),
        F.min("timestamp").alias("first"),
        F.max("timestamp").alias("last"),
    )
    return counted.select(*SUMMARY)


def _place(topic: str, partition: int) -> Column:
    return (F.col("topic") == F.lit(topic)) & (F.col("partition") == F.lit(partition))


def _any(conditions: list[Column]) -> Column:
    # Halved, so that the expression for a thousand partitions is not a thousand deep.
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return _any(conditions[:middle]) | _any(conditions[middle:])


def _instant(moment: datetime) -> Column:
    from datetime import UTC, datetime, timedelta

    return F.timestamp_micros(F.lit((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)))
