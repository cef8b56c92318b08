"""The plan of a replay: the request, the selected rows and their order, how they are cut into slices, and the rate.

A key is replayed in the order of its first deliveries, as consumers saw them: within a partition, that of offsets.
Across partitions, rows are ordered by log time, the highest timestamp up to a record in its partition: timestamps alone
may go backwards, and would then contradict the offsets. So the total order is (log time, topic, partition, offset), and
slices that follow each other in it keep the order of every key.
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
"""The records of a slice without a rate: the most that a killed replay repeats."""

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplayRate:
    """`rate`: records per second; None: unlimited. `slice_records` overrides the slice size that follows from it.

    Each slice delays the next one, counted from its own start, so time lost by a slow slice is not made up. Within t
    seconds at most rate × t records and one slice are begun.
    """

    rate: float | None = None
    slice_records: int | None = None

    @property
    def size(self) -> int:
        """The records of a slice: by default one second's worth, but at least one."""
        if self.slice_records is not None:
            return self.slice_records
        return WITHOUT_RATE if self.rate is None else max(1, int(self.rate * _SLICE_S))

    def next_s(self, began_s: float, records: int) -> float:
        """When the next slice may begin, after one of `records` that began at `began_s`; may be in the past."""
        return began_s if self.rate is None else began_s + records / self.rate


Positions = Mapping[Place, int]
"""(topic, partition) → offset: everything up to and including it."""

# The stored form of what JSON cannot express: keys in base64, positions as [topic, partition, offset].
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
    """The time to which a range applies: the record's timestamp in Kafka, or the creation of its row."""

    PUBLISHED = "published"
    CREATED = "created"


@dataclass(frozen=True, slots=True)
class Selection:
    """The records to replay: `since` ≤ time < `until`, both with a time zone. Empty `topics` or `keys`: all."""

    since: datetime | None = None
    until: datetime | None = None
    by: By = By.PUBLISHED
    topics: tuple[str, ...] = ()
    keys: tuple[_Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Destination:
    """One of: a topic for all records, a suffix for each topic's name, or the original topics."""

    topic: str | None = None
    suffix: str | None = None
    original: bool = False

    def targets(self, topics: Iterable[str]) -> dict[str, str]:
        """Topic in the lake → target topic. Raises PipelineError if a target is one of `topics`, unless `original`."""
        if self.original:
            return {topic: topic for topic in topics}
        found = {topic: self.topic if self.topic is not None else f"{topic}{self.suffix}" for topic in topics}
        if own := sorted(set(found.values()) & found.keys()):
            raise PipelineError(
                f"{', '.join(own)}: records of this topic are replayed, and are not written back to it by default",
                hint="specify another topic, or --into-original if you intend this",
            )
        return found


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """`as_new`: omit the harvester's header, so that consumers do not recognise the records as repeats."""

    selection: Selection
    destination: Destination
    as_new: bool = False


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """A replay: the request, the version of silver that it reads, and what it has written so far."""

    id: str
    request: ReplayRequest
    silver_version: int
    records: int = 0
    done: _Positions = field(default_factory=dict)
    finished: bool = False


_STORED = TypeAdapter(ReplayProgress)


def to_text(progress: ReplayProgress) -> str:
    """The stored form of a replay."""
    stored = {"version": _VERSION, **_STORED.dump_python(progress, mode="json")}
    return json.dumps(stored, indent=1)


def from_text(text: str, where: str) -> ReplayProgress:
    """The inverse of `to_text`; raises CheckpointMismatch, which names `where`, for anything else."""
    try:
        stored = json.loads(text)
        if (version := stored.pop("version")) != _VERSION:
            raise CheckpointMismatch(f"{where} has version {version}, not {_VERSION}")
        return _STORED.validate_python(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"{where} cannot be read", hint="start a new replay where it stopped") from error


HEADER = "harvester-replay"
"""The header that names the replay that wrote a record; its value is the replay's id, as text."""

_ORDER = ("log_time", "topic", "partition", "offset")
_IN_TASK = 2**33 - 1


@dataclass(frozen=True, slots=True)
class ReplaySlice:
    """A piece of the order: from the end of the previous slice up to these positions."""

    records: int
    upto: Positions


def selected(silver: DataFrame, selection: Selection) -> DataFrame:
    """schemas.DELIVERIES → its selected rows. A row without a time of creation is in no range of creation times."""
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
    if selection.by is By.CREATED:  # lets Spark skip the files of other days
        if selection.since is not None:
            rows = rows.where(F.col("day") >= F.to_date(F.lit(selection.since)))
        if selection.until is not None:
            rows = rows.where(F.col("day") <= F.to_date(F.lit(selection.until)))
    return rows.select(*schemas.DELIVERIES.names)


def behind(rows: DataFrame, done: Positions) -> DataFrame:
    """The rows after these positions, all columns; all rows of partitions without a position."""
    if not done:
        return rows
    passed = [_place(*place) & (F.col("offset") <= offset) for place, offset in done.items()]
    return rows.where(~any_of(passed))


def between(rows: DataFrame, done: Positions, upto: Positions) -> DataFrame:
    """The rows of the partitions in `upto` after `done` and up to `upto`, all columns."""
    wanted = []
    for place, offset in upto.items():
        low = done.get(place)
        inside = F.col("offset") <= offset
        wanted.append(_place(*place) & (inside if low is None else inside & (F.col("offset") > low)))
    return rows.where(any_of(wanted))


def placed(rows: DataFrame) -> DataFrame:
    """Adds `log_time`: the highest timestamp of the rows up to this one in its partition, by offset."""
    partition = Window.partitionBy("topic", "partition").orderBy("offset")
    return rows.withColumn("log_time", F.max("timestamp").over(partition))


def cuts(rows: DataFrame, size: int) -> DataFrame:
    """schemas.DELIVERIES → (task, cut, topic, partition, last, records), sorted: slices of up to `size` rows, in order.

    After the sort each task has a range of the order, and cuts it on its own, so that no count spans all rows.
    """
    # The id consists of the task's number and, in the lower 33 bits, the row's number within the task.
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
    """`placed` rows → (key, value, topic, headers) for Spark's Kafka sink, the header of the replay last.

    `targets`: topic → target topic. `without`: the name of a header to omit. One task has all records of a key for a
    topic, in order; records without a key are distributed. A tombstone's value is NULL.
    """
    mapped = F.create_map(*(F.lit(text) for pair in targets.items() for text in pair))
    kept = F.coalesce("headers", F.array().cast(schemas.HEADERS))
    if without is not None:
        kept = F.filter(kept, lambda one: one["key"] != F.lit(without))
    mark = F.array(F.struct(F.lit(HEADER).alias("key"), F.lit(replay.encode()).alias("value")))
    rows = rows.withColumns({"target": mapped[F.col("topic")], "headers": F.concat(kept, mark.cast(schemas.HEADERS))})
    # Records without a key have no order, and would otherwise all go to one task.
    spread = F.when(F.col("key").isNull(), F.col("offset"))
    sent = rows.repartition("target", "key", spread).sortWithinPartitions(*_ORDER)
    return sent.select("key", "value", F.col("target").alias("topic"), "headers")


def ends(silver: DataFrame, repeats: DataFrame, since: Mapping[str, str]) -> DataFrame:
    """schemas.SILVER and its repeats → (topic, partition, last): the highest offset up to silver's last batch.

    `since`: topic → the batch from which on its records are those of the existing topic, not of a deleted one with the
    same name.
    """
    last = silver.select(F.max("batch").alias("_last"))
    names = ("topic", "partition", "offset", "batch")
    upto = repeats.select(*names).join(F.broadcast(last), F.col("batch") <= F.col("_last")).select(*names)
    rows = silver.select(*names).unionByName(upto)
    for topic, batch in since.items():
        rows = rows.where((F.col("topic") != topic) | (F.col("batch") >= batch))
    return rows.groupBy("topic", "partition").agg(F.max("offset").alias("last"))


def summary(rows: DataFrame) -> DataFrame:
    """schemas.DELIVERIES → (topic, records, tombstones, first, last); `first` and `last` are Kafka's timestamps."""
    return rows.groupBy("topic").agg(
        F.count("*").alias("records"),
        F.count_if("tombstone").alias("tombstones"),
        F.min("timestamp").alias("first"),
        F.max("timestamp").alias("last"),
    )


def _place(topic: str, partition: int) -> Column:
    return (F.col("topic") == F.lit(topic)) & (F.col("partition") == F.lit(partition))
