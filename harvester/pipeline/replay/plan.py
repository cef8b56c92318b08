"""The plan of a replay: what is asked for, which rows in which order, how they are cut into slices, and the pace.

The order of a key is that of its first deliveries, which is the one consumers saw: offsets, within a partition.
Between partitions it is that of log time, the highest timestamp up to a record in its partition: timestamps alone may
go backwards, and would then contradict the offsets. So the whole order is (log time, topic, partition, offset), and
any piece of it that begins where another one ends keeps the order of every key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas
from harvester.pipeline.errors import CheckpointMismatch, PipelineError
from harvester.pipeline.source import Place
from harvester.pipeline.streaming import any_of

WITHOUT_RATE = 1_000_000
"""Records of a slice where nothing limits the rate: what a killed replay repeats at most."""

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplayRate:
    """`rate`: records in a second, None for as fast as it goes. `slice_records` replaces the size that follows from it.

    Each slice buys its time from when it began, and time that went by unused is lost: after a stop the replay does
    not catch up. So what begins within t seconds is never more than rate × t and one slice.
    """

    rate: float | None = None
    slice_records: int | None = None

    @property
    def size(self) -> int:
        """Records of a slice: by default what a second may have, and one at least."""
        if self.slice_records is not None:
            return self.slice_records
        return WITHOUT_RATE if self.rate is None else max(1, int(self.rate * _SLICE_S))

    def next_s(self, began_s: float, records: int) -> float:
        """When the slice after one of so many records may begin; in the past if that one took longer than it bought."""
        return began_s if self.rate is None else began_s + records / self.rate


Positions = Mapping[Place, int]
"""(topic, partition) → offset: everything up to there, itself included."""

# What JSON has no form for, as it is stored: a key in base64, positions as [topic, partition, offset].
_Key = Annotated[
    bytes,
    PlainSerializer(lambda key: base64.b64encode(key).decode(), when_used="json"),
    PlainValidator(lambda text: base64.b64decode(text, validate=True)),
]
_Positions = Annotated[
    Positions,
    PlainSerializer(lambda done: [[*place, offset] for place, offset in sorted(done.items())], when_used="json"),
    BeforeValidator(lambda rows: {(topic, partition): offset for topic, partition, offset in rows}),
]

_VERSION = 1


class By(StrEnum):
    """Whose time a range is of: Kafka's timestamp of the record, or the creation of its row."""

    PUBLISHED = "published"
    CREATED = "created"


@dataclass(frozen=True, slots=True)
class Selection:
    """`since` belongs to the range, `until` does not; both are aware. Nothing named means: all."""

    since: datetime | None = None
    until: datetime | None = None
    by: By = By.PUBLISHED
    topics: tuple[str, ...] = ()
    keys: tuple[_Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Destination:
    """One of: a topic for all, a suffix to each one's own name, or where they came from."""

    topic: str | None = None
    suffix: str | None = None
    original: bool = False

    def targets(self, topics: Iterable[str]) -> dict[str, str]:
        """Topic of the lake → topic to write to; PipelineError where that is one that records came from."""
        if self.original:
            return {topic: topic for topic in topics}
        found = {topic: self.topic if self.topic is not None else f"{topic}{self.suffix}" for topic in topics}
        if own := sorted(set(found.values()) & found.keys()):
            raise PipelineError(
                f"{', '.join(own)}: records of this topic are to be replayed, and none are written back to where they"
                " came from",
                hint="name another topic; --into-original says that it is meant",
            )
        return found


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """`as_new`: without the harvester's header, so that nobody recognises the records as repeats."""

    selection: Selection
    destination: Destination
    as_new: bool = False


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """A replay: what it is asked for, of which version of the table, and what it has written so far."""

    id: str
    request: ReplayRequest
    silver_version: int
    records: int = 0
    done: _Positions = field(default_factory=dict)
    finished: bool = False


_STORED = TypeAdapter(ReplayProgress)


def to_text(progress: ReplayProgress) -> str:
    """As it is stored."""
    stored = {"version": _VERSION, **_STORED.dump_python(progress, mode="json")}
    return json.dumps(stored, indent=1)


def from_text(text: str, where: str) -> ReplayProgress:
    """Read `to_text`; CheckpointMismatch for anything else."""
    try:
        stored = json.loads(text)
        if (version := stored.pop("version")) != _VERSION:
            raise CheckpointMismatch(f"{where} is of version {version}, this is {_VERSION}")
        return _STORED.validate_python(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"{where} cannot be read", hint="begin the replay anew, from where it was") from error


HEADER = "harvester-replay"
"""The header that says which replay wrote a record; its value is the replay's id, as text."""

_ORDER = ("log_time", "topic", "partition", "offset")
_IN_TASK = 2**33 - 1


@dataclass(frozen=True, slots=True)
class ReplaySlice:
    """A piece of the order: what lies behind the slices before, up to these positions."""

    records: int
    upto: Positions


def selected(silver: DataFrame, selection: Selection) -> DataFrame:
    """schemas.DELIVERIES → the same: rows that are asked for. Without a time of creation none is in a range of it."""
    column = "timestamp" if selection.by is By.PUBLISHED else "created_at"
    rows = silver
    if selection.topics:
        rows = rows.where(F.col("topic").isin(*selection.topics))
    if selection.keys:
        rows = rows.where(F.col("key").isin(*(F.lit(key) for key in selection.keys)))
    if selection.since is not None:
        rows = rows.where(F.col(column) >= F.lit(selection.since))
    if selection.until is not None:
        rows = rows.where(F.col(column) < F.lit(selection.until))
    if selection.by is By.CREATED:  # spares Delta the files of other days
        if selection.since is not None:
            rows = rows.where(F.col("day") >= F.to_date(F.lit(selection.since)))
        if selection.until is not None:
            rows = rows.where(F.col("day") <= F.to_date(F.lit(selection.until)))
    return rows.select(*schemas.DELIVERIES.names)


def behind(rows: DataFrame, done: Positions) -> DataFrame:
    """The rows that come after these positions, all columns; a partition that has none is wanted whole."""
    if not done:
        return rows
    passed = [_place(*place) & (F.col("offset") <= offset) for place, offset in done.items()]
    return rows.where(~any_of(passed))


def between(rows: DataFrame, done: Positions, upto: Positions) -> DataFrame:
    """The rows of these partitions behind `done`, up to `upto`, all columns."""
    wanted = []
    for place, offset in upto.items():
        low = done.get(place)
        inside = F.col("offset") <= offset
        wanted.append(_place(*place) & (inside if low is None else inside & (F.col("offset") > low)))
    return rows.where(any_of(wanted))


def placed(rows: DataFrame) -> DataFrame:
    """Adds `log_time`: the highest timestamp of the rows up to this one in its partition."""
    partition = Window.partitionBy("topic", "partition").orderBy("offset")
    return rows.withColumn("log_time", F.max("timestamp").over(partition))


def cuts(rows: DataFrame, size: int) -> DataFrame:
    """schemas.DELIVERIES → (task, cut, topic, partition, last, records), sorted: slices of up to `size` rows, in order.

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


def slices(rows: Iterable[Row]) -> Iterator[ReplaySlice]:
    """Rows of `cuts`, in their order → slices."""
    at: tuple[int, int] | None = None
    records, upto = 0, dict[Place, int]()
    for row in rows:
        if at != (row["task"], row["cut"]) and upto:
            yield ReplaySlice(records, upto)
            records, upto = 0, {}
        at = (row["task"], row["cut"])
        records += row["records"]
        upto[row["topic"], row["partition"]] = row["last"]
    if upto:
        yield ReplaySlice(records, upto)


def outgoing(rows: DataFrame, targets: Mapping[str, str], replay: str, without: str | None = None) -> DataFrame:
    """`placed` rows → (key, value, topic, headers) for Spark's Kafka sink, the replay's header last.

    `without` is the name of a header to leave out.
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


def ends(silver: DataFrame, repeats: DataFrame, since: Mapping[str, str]) -> DataFrame:
    """schemas.SILVER and its repeats → (topic, partition, last): the highest offset up to silver's last batch.

    `since`: the batch from which on a topic's records are those of the topic that exists now, not of one that it
    replaced.
    """
    last = silver.select(F.max("batch").alias("_last"))
    names = ("topic", "partition", "offset", "batch")
    upto = repeats.select(*names).join(F.broadcast(last), F.col("batch") <= F.col("_last")).select(*names)
    rows = silver.select(*names).unionByName(upto)
    for topic, batch in since.items():
        rows = rows.where((F.col("topic") != topic) | (F.col("batch") >= batch))
    return rows.groupBy("topic", "partition").agg(F.max("offset").alias("last"))


def summary(rows: DataFrame) -> DataFrame:
    """schemas.DELIVERIES → (topic, records, tombstones, first, last), the last two by Kafka's time."""
    return rows.groupBy("topic").agg(
        F.count("*").alias("records"),
        F.count_if("tombstone").alias("tombstones"),
        F.min("timestamp").alias("first"),
        F.max("timestamp").alias("last"),
    )


def _place(topic: str, partition: int) -> Column:
    return (F.col("topic") == F.lit(topic)) & (F.col("partition") == F.lit(partition))
