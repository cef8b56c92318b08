"""Bronze → one row for each (incarnation, id), the state of each key, JSON values as columns, and rejects.

ADR 0018 says why in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StringType, StructField, StructType

from harvester.pipeline import schemas
from harvester.pipeline.origin_columns import day_of
from harvester.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_NO_DAY = "1970-01-01"
_NAME = ("incarnation", "id")
_PLACE = ("topic", "partition", "offset")
_DAY_US = 86_400_000_000
_MOST_DAYS = 366
_MOST_TO_ALL = 8_000_000  # numbers, of 16 bytes


def deliveries(bronze: DataFrame) -> DataFrame:
    """schemas.BRONZE → schemas.SILVER, with all repeats: every record that has an origin.

    `day` is that of the row's creation, 1970-01-01 if no calendar has it. It comes from the header, so repeats have
    the same however late they come, and a repeat is looked for among the days of its batch only.
    """
    day = _day_created(F.col("created_us"))
    rows = bronze.where(F.col("problem").isNull()).withColumns({"day": day, "tombstone": F.col("value").isNull()})
    return rows.select(*schemas.SILVER.names)


def later_deliveries(bronze: DataFrame, most: int) -> DataFrame:
    """schemas.BRONZE → (topic, partition, offset) of every record that came before, in the same rows (`most` at most).

    Few as a rule. So groups of 64 names with fewer different ones than records are found first, by numbers alone; only
    what is in those is put in order.
    """
    place = F.col("id").bitwiseAND(F.lit(63)).cast("int")
    named = bronze.where(F.col("problem").isNull()).select(
        F.xxhash64("incarnation", F.shiftright("id", 6)).alias("_group"),
        F.call_function("shiftleft", F.lit(1).cast("bigint"), place).alias("_bit"),
        *_NAME, "timestamp", *_PLACE,
    )  # fmt: skip
    counted = named.groupBy("_group").agg(F.count("*").alias("_records"), F.bit_or("_bit").alias("_names"))
    twice = counted.where(F.col("_records") > F.bit_count("_names")).select("_group")
    earliest = Window.partitionBy(*_NAME).orderBy("timestamp", *_PLACE)
    several = named.join(_to_all(twice, most), "_group", "left_semi")
    return several.withColumn("delivery", F.row_number().over(earliest)).where("delivery > 1").select(*_PLACE)


def stored_before(
    bronze: DataFrame, stored: DataFrame, found: BatchOverview, highest: Mapping[str, int]
) -> DataFrame | None:
    """schemas.BRONZE and the table's schemas.SILVER → (topic, partition, offset) of records that the table has.

    `highest` are the table's ids by incarnation, without one that it does not have. What is above them is new; None
    when everything is. Of the table no more is read than the constants let through: files of the batch's days whose ids
    overlap with what is below. So it costs what the batch holds, not what the table has grown to.
    """
    below = [(name, span.lowest, highest[name]) for name, span in found.ids.items() if name in highest]
    below = [(name, low, high) for name, low, high in below if low <= high]
    if not below:
        return None
    known = stored.where(_within(below))
    if len(found.days) <= _MOST_DAYS:
        known = known.where(F.col("day").isin(list(found.days)))
    named = bronze.where(F.col("problem").isNull() & _within(below)).select(*_NAME, *_PLACE)
    return named.join(known.select(*_NAME), [*_NAME], "left_semi").select(*_PLACE)


def _within(spans: Iterable[tuple[str, int, int]]) -> Column:
    """Rows of these incarnations and ids."""
    return reduce(or_, ((F.col("incarnation") == name) & F.col("id").between(low, high) for name, low, high in spans))


def without(silver: DataFrame, places: DataFrame | None) -> DataFrame:
    """schemas.SILVER but for the records at these (topic, partition, offset). None, which is usual, costs nothing."""
    if places is None:
        return silver
    return silver.join(places, [*_PLACE], "left_anti").select(*schemas.SILVER.names)


@dataclass(frozen=True, slots=True)
class Span:
    """Lies between these ids, both included."""

    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class BatchOverview:
    """What there is in a batch: the topics, and the ids by incarnation, of the records that have an origin."""

    rejected: bool
    topics: frozenset[str]
    ids: Mapping[str, Span]
    days: tuple[date, ...]


def overview(bronze: DataFrame) -> DataFrame:
    """schemas.BRONZE → a row for each partition, incarnation and day of creation: lowest and highest offset and id.

    Counted are days towards 1970, which takes no calendar; so `first` and `last` are two days there.
    """
    about = F.expr(f"created_us DIV {_DAY_US}")
    rejected = F.col("problem").isNotNull().alias("rejected")
    found = bronze.groupBy("topic", "partition", "incarnation", rejected, about).agg(
        F.min("offset").alias("from_offset"),
        F.max("offset").alias("to_offset"),
        F.min("id").alias("lowest"),
        F.max("id").alias("highest"),
        F.min("created_us").alias("_first"),
        F.max("created_us").alias("_last"),
    )
    days = {"first": _day_created(F.col("_first")), "last": _day_created(F.col("_last"))}
    named = ("topic", "partition", "from_offset", "to_offset", "incarnation", "rejected", "lowest", "highest")
    return found.withColumns(days).select(*named, *days)


def summed_up(rows: Iterable[Any]) -> BatchOverview:
    """Of the rows of `overview`."""
    listed = list(rows)
    named = [row for row in listed if not row["rejected"]]
    ids: dict[str, Span] = {}
    for row in named:
        known = ids.get(row["incarnation"], Span(row["lowest"], row["highest"]))
        ids[row["incarnation"]] = Span(min(known.lowest, row["lowest"]), max(known.highest, row["highest"]))
    return BatchOverview(
        rejected=len(named) < len(listed),
        topics=frozenset(row["topic"] for row in named),
        ids=ids,
        days=tuple(sorted({row[end] for row in named for end in ("first", "last")})),
    )


def incarnations(silver: DataFrame) -> DataFrame:
    """schemas.SILVER → schemas.INCARNATIONS: when each was first seen, by Kafka's clock."""
    seen = silver.groupBy("incarnation").agg(F.min("timestamp").alias("since"))
    return seen.select(*schemas.INCARNATIONS.names)


def latest_states(
    silver: DataFrame, since_us: Mapping[str, int], most: int, repeated: DataFrame | None = None
) -> DataFrame:
    """schemas.SILVER → schemas.CURRENT: one row for each topic and key. `repeated`: places of what is there twice.

    `since_us` has for each incarnation in the rows when it was first seen, in microseconds. The last state is that of
    the highest (since, incarnation, id). A tombstone is a state as well, `deleted`: it has to stay, or an older record
    that comes late would bring the key back. Records without a key have no state.
    """
    keyed = silver.where(F.col("key").isNotNull()).withColumn("_age", _age(since_us))
    # Found by numbers alone; only what is chosen brings its value along.
    last = keyed.groupBy("topic", "key").agg(F.max("_age").alias("_age")).select("_age")
    rows = keyed.join(_to_all(last, most), "_age", "left_semi")
    # Repeats are as old as what they repeat, so they do not matter before.
    rows = without(rows, repeated)
    since = {name: F.timestamp_micros(F.lit(us)) for name, us in since_us.items()}
    chosen = rows.withColumns({"deleted": F.col("tombstone"), "since": _by_incarnation(since)})
    return chosen.select(*schemas.CURRENT.names)


def _to_all(numbers: DataFrame, most: int) -> DataFrame:
    """With a hint to give every task all of these numbers, unless that could be too much memory."""
    return F.broadcast(numbers) if most <= _MOST_TO_ALL else numbers


def _age(since_us: Mapping[str, int]) -> Column:
    """What orders states of a key: which incarnation came later, and in it which id; different for any two records.

    One number, since Spark groups numbers by hashing and sorts for anything else.
    """
    order = sorted(since_us, key=lambda name: (since_us[name], name))
    if len(order) == 1:
        return F.col("id")
    rank = _by_incarnation({name: F.lit(place) for place, name in enumerate(order)})
    return rank.cast("decimal(18,0)") * F.lit(Decimal(2**64)) + F.col("id").cast("decimal(19,0)")


def _by_incarnation(values: Mapping[str, Column]) -> Column:
    return F.coalesce(*(F.when(F.col("incarnation") == name, value) for name, value in values.items()))


def rejects(bronze: DataFrame) -> DataFrame:
    """schemas.BRONZE → schemas.REJECTS: the records that silver cannot have, since nothing names them."""
    rows = bronze.where(F.col("problem").isNotNull()).withColumns(
        {"reason": F.col("problem"), "detail": F.lit(None).cast("string")}
    )
    return rows.select(*schemas.REJECTS.names)


def _day_created(microseconds: Column) -> Column:
    return F.coalesce(day_of(microseconds), F.lit(_NO_DAY).cast("date"))


BAD_PAYLOAD = "bad payload"
_CORRUPT = "_corrupt_record"
_NAMING = ("day", "incarnation", "id", "created_at", "key", "tombstone")
_AWKWARD = re.compile(r"[^A-Za-z0-9_-]")


def from_ddl(text: str) -> StructType:
    """A schema from `total INT, customer STRING`; ValueError says what is wrong. Needs a running Spark."""
    try:
        found: object = StructType.fromDDL(text)
    except PySparkException as error:
        raise ValueError(f"{text!r} is no list of columns: {str(error).splitlines()[0]}") from error
    if not isinstance(found, StructType) or not found.names:
        raise ValueError(f"{text!r} is no list of columns")
    if _CORRUPT in found.names:
        raise ValueError(f"{_CORRUPT} is a name of Spark's own")
    return found


def payload_table(topic: str, payload: StructType) -> Table:
    """Where the values of a topic go; the payload's columns stand in `data`, so that no name can collide."""
    fields = [field for field in schemas.SILVER if field.name in _NAMING]
    fields.sort(key=lambda field: _NAMING.index(field.name))
    safe = _AWKWARD.sub(lambda found: f"%{ord(found[0]):02x}", topic)
    return Table(f"json/{safe}", StructType([*fields, StructField("data", payload)]), ("day",))


def expanded(silver: DataFrame, topic: str, payload: StructType) -> DataFrame:
    """schemas.SILVER → the columns of `payload_table`: the topic's rows whose value fits; a tombstone has no data."""
    rows = _parsed(silver, topic, payload).where(~_bad())
    data = F.struct(*(F.col("_data")[name].alias(name) for name in payload.names))
    return rows.withColumn("data", F.when(~F.col("tombstone"), data)).select(*_NAMING, "data")


def bad_payloads(silver: DataFrame, topic: str, payload: StructType) -> DataFrame:
    """schemas.SILVER → schemas.REJECTS: the topic's rows whose value is no JSON object of this schema."""
    rows = _parsed(silver, topic, payload).where(_bad())
    found = rows.withColumns(
        {
            "day": F.to_date("timestamp"),
            "reason": F.lit(BAD_PAYLOAD),
            "detail": F.concat(F.lit("not "), F.lit(payload.simpleString())),
        }
    )
    return found.select(*schemas.REJECTS.names)


def _parsed(silver: DataFrame, topic: str, payload: StructType) -> DataFrame:
    marked = StructType([*payload, StructField(_CORRUPT, StringType())])
    text = F.col("value").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    rows = silver.where(F.col("topic") == F.lit(topic)).withColumn("_text", F.when(F.is_valid_utf8(text), text))
    return rows.withColumn("_data", F.from_json("_text", marked, options))


def _bad() -> Column:
    unfit = F.col("_data").isNull() | F.col("_data")[_CORRUPT].isNotNull()
    return ~F.col("tombstone") & unfit
