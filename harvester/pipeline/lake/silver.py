"""Decoded records → the rows of each table: every (incarnation, id) once, its repeats, JSON values as columns, rejects.

Spark summarises the batch's ids in stretches of 64, as bits and counts, from which `ids` decides what is new (ADR 24).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Protocol
from uuid import UUID

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from harvester.pipeline import schemas
from harvester.pipeline.lake.columns import rebuilt, respelled
from harvester.pipeline.lake.cuts import LowMark, Marks
from harvester.pipeline.lake.ids import BatchIds, Suspects, Word
from harvester.pipeline.origin_columns import day_of
from harvester.pipeline.schemas import BAD_PAYLOAD, Table

_MASK = 2**64 - 1
_MOST_DAYS = 366
_NO_DAY = "1970-01-01"
_NAME = ("incarnation", "id")
_PLACE = ("topic", "partition", "offset", "timestamp")  # a recreated topic has the same offsets, at different times
_REJECTS = [name for name in schemas.REJECTS.names if name != "batch"]


def deliveries(bronze: DataFrame, header: str) -> DataFrame:
    """schemas.BRONZE → schemas.SILVER without `batch`: every record that has an origin, including all repeats.

    `day` is the day of the row's creation, 1970-01-01 if it is outside the calendar. It comes from the header, so a
    late repeat has the same one. The harvester's own header is omitted if it is the last one, as it usually is; the
    view reconstructs it.
    """
    others = "CASE WHEN size(headers) > 1 THEN slice(headers, 1, size(headers) - 1) END"
    last = f"try_element_at(headers, -1).key = {schemas.text(header)}"
    kept = F.expr(f"CASE WHEN {last} THEN {others} ELSE headers END")
    rows = bronze.where("problem IS NULL").withColumns({"day": created_day(), "headers": kept})
    return rows.select(*(name for name in schemas.SILVER.names if name != "batch"))


@dataclass(slots=True)
class BatchOverview:
    """The content of a batch: the number of records, the topics and ids of those with an origin.

    `rejected`: records without an origin. `since_us`: each incarnation's earliest timestamp in Kafka. `marks`: its
    highest low watermark.
    """

    records: int = 0
    rejected: int = 0
    topics: set[str] = field(default_factory=set)
    ids: BatchIds = field(default_factory=BatchIds)
    since_us: dict[str, int] = field(default_factory=dict)
    marks: dict[str, LowMark] = field(default_factory=dict)


def overview(bronze: DataFrame) -> DataFrame:
    """schemas.BRONZE → a row for each topic and incarnation, with the words of its ids (`ids.Word`).

    `at` and `ids` list all words. `other` lists only those with a repeated id, usually few, as (at, odd, records).
    """
    bit = schemas.bit("id")
    words = bronze.groupBy("topic", "incarnation", F.expr(f"{schemas.block('id')} AS at")).agg(
        F.expr(f"bit_or({bit}) AS ids"),
        F.expr(f"bit_xor({bit}) AS odd"),
        F.expr("count(*) AS records"),
        F.expr("min(unix_micros(timestamp)) AS since_us"),
        F.expr("max(low_water) AS low"),
        F.expr("min(created_us) AS created_us"),
    )
    return words.groupBy("topic", "incarnation").agg(
        F.expr("collect_list(at) AS at"),
        F.expr("collect_list(ids) AS ids"),
        F.expr("collect_list(CASE WHEN bit_count(ids) < records THEN struct(at, odd, records) END) AS other"),
        F.expr("sum(records) AS records"),
        F.expr("min(since_us) AS since_us"),
        F.expr("min(CASE WHEN low IS NOT NULL THEN struct(-low AS low, created_us AS us) END) AS mark"),
    )


def summed_up(rows: Iterable[Any]) -> BatchOverview:
    """The rows of `overview` → what the batch contains."""
    found = BatchOverview()
    for row in rows:
        found.records += row["records"]
        if row["incarnation"] is None:
            found.rejected += row["records"]
            continue
        found.topics.add(row["topic"])
        found.since_us[row["incarnation"]] = min(
            row["since_us"], found.since_us.get(row["incarnation"], row["since_us"])
        )
        if row["mark"] is not None:
            mark, other = LowMark(-row["mark"]["low"], row["mark"]["us"]), found.marks.get(row["incarnation"])
            if other is None or (mark.id, -mark.at_us) > (other.id, -other.at_us):
                found.marks[row["incarnation"]] = mark
        repeated = {at: (odd & _MASK, records) for at, odd, records in row["other"]}
        words = []
        for at, signed in zip(row["at"], row["ids"], strict=True):
            ids = signed & _MASK
            odd, records = repeated.get(at) or (ids, ids.bit_count())
            words.append(Word(at, ids, odd, records))
        found.ids.add(UUID(row["incarnation"]), words)
    return found


def created_day() -> Column:
    """The day of `created_us`, by which silver is partitioned."""
    return F.coalesce(day_of("created_us"), F.expr(f"DATE'{_NO_DAY}'"))


def repeats(bronze: DataFrame, suspects: Iterable[Suspects], stored: DataFrame) -> DataFrame:
    """schemas.BRONZE → of these, every record that is not the first delivery of its id.

    `stored`: silver's rows without those of this batch. Reads only the part that may contain `asked` ids: nothing if
    there are none.
    """
    listed = list(suspects)
    rows = [
        {"i": str(one.incarnation), "w": one.at}
        | {name: _signed(bits) for name, bits in (("ids", one.ids), ("known", one.known), ("asked", one.asked))}
        for one in listed
    ]
    words = local(bronze.sparkSession, rows, "i string, w bigint, ids bigint, known bigint, asked bigint")
    place = F.col("id").bitwiseAND(F.lit(63)).cast("int")
    chosen = (
        bronze.where(F.col("problem").isNull())
        .join(F.broadcast(words), (F.col("i") == F.col("incarnation")) & (F.col("w") == F.expr(schemas.block("id"))))
        .where(F.getbit("ids", place) == 1)
    )
    known = F.getbit("known", place) == 1
    if asked := [one for one in listed if one.asked]:
        low, high = 64 * min(one.at for one in asked), 64 * max(one.at for one in asked) + 63
        of_these = F.col("incarnation").isin(sorted({str(one.incarnation) for one in asked}))
        there = stored.where(of_these & F.col("id").between(low, high))
        days = {day for (day,) in chosen.where("asked <> 0").select(created_day()).distinct().collect()}
        if len(days) <= _MOST_DAYS:
            there = there.where(F.col("day").isin(list(days)))
        ids = F.broadcast(chosen.where("asked <> 0").select(*_NAME).distinct())
        there = there.join(ids, [*_NAME], "left_semi").select(*_NAME, F.lit(True).alias("_there"))
        chosen = chosen.join(there, [*_NAME], "left")
        known = known | (F.col("_there") & (F.getbit("asked", place) == 1))
    # Within a partition the offset tells which delivery was first: a successor's clock may be behind.
    one = Window.partitionBy(*_NAME)
    began = F.min(F.struct("timestamp", "topic", "partition")).over(one)
    chosen = chosen.withColumns({"_known": F.coalesce(known, F.lit(False)), "_began": began})
    elsewhere = F.expr("topic <> _began.topic OR partition <> _began.partition")
    first = one.orderBy(elsewhere, "offset", "timestamp")
    numbered = chosen.withColumn("_nth", F.row_number().over(first))
    return numbered.where(F.col("_known") | (F.col("_nth") > 1)).select(*schemas.BRONZE.names)


def local(spark: SparkSession, rows: Sequence[Mapping[str, Any]], columns: str) -> DataFrame:
    """A frame of a few rows from this process. `createDataFrame` would require Python on the executors."""
    return spark.range(1).select(F.inline(F.from_json(F.lit(json.dumps(rows)), f"array<struct<{columns}>>")))


def incarnations(spark: SparkSession, since_us: Mapping[str, int]) -> DataFrame:
    """The times at which incarnations were first seen, as schemas.INCARNATIONS."""
    rows = [{"incarnation": name, "us": us} for name, us in since_us.items()]
    return local(spark, rows, "incarnation string, us bigint").select(
        "incarnation", F.timestamp_micros("us").alias("since")
    )


def cuts(spark: SparkSession, found: Marks, version: int) -> DataFrame:
    """Cuts that a lake now has, as schemas.CUTS without `batch`. `version`: a version of silver that has their rows."""
    rows = [{"incarnation": name, "id": mark.id, "us": mark.at_us, "v": version} for name, mark in found.items()]
    frame = local(spark, rows, "incarnation string, id bigint, us bigint, v bigint")
    at = F.expr(f"CASE WHEN us BETWEEN {schemas.FIRST_US} AND {schemas.LAST_US} THEN timestamp_micros(us) END")
    return frame.select("incarnation", "id", at.alias("at"), F.col("v").alias("silver_version"))


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >> 63 else bits


def unwritten(bronze: DataFrame, stored: Iterable[DataFrame]) -> DataFrame:
    """The rows of schemas.BRONZE whose records are in none of the tables `stored`."""
    places = reduce(DataFrame.unionByName, (rows.select(*_PLACE) for rows in stored))
    return bronze.join(places, [*_PLACE], "left_anti")


def without(rows: DataFrame, others: DataFrame | None) -> DataFrame:
    """The rows except these others. None, the usual case, costs nothing."""
    return rows if others is None else rows.join(F.broadcast(others.select(*_PLACE)), [*_PLACE], "left_anti")


def rejects(bronze: DataFrame) -> DataFrame:
    """schemas.BRONZE → schemas.REJECTS without `batch`: the records without an origin, which silver cannot hold."""
    rows = bronze.where(F.col("problem").isNotNull()).withColumns(
        {"reason": F.col("problem"), "detail": F.lit(None).cast("string")}
    )
    return rows.select(*_REJECTS)


_CORRUPT = "_corrupt_record"
_NAMING = ("day", "incarnation", "id", "created_at", "key", "tombstone")
_AWKWARD = re.compile(r"[^A-Za-z0-9_-]")
_REFUSED = " ,;{}()\n\t="
"""Characters that Delta does not accept in column names, checked before the checkpoint is claimed."""


def from_ddl(text: str) -> StructType:
    """Parses a schema such as `total INT, customer STRING`; needs a running Spark. Raises ValueError."""
    try:
        found: object = StructType.fromDDL(text)
    except PySparkException as error:
        raise ValueError(f"{text!r} is not a list of columns: {str(error).splitlines()[0]}") from error
    if not isinstance(found, StructType) or not found.names:
        raise ValueError(f"{text!r} is not a list of columns")
    if _CORRUPT in found.names:
        raise ValueError(f"{_CORRUPT} is reserved by Spark")
    require_names(found)
    return found


def require_names(columns: StructType) -> None:
    """Raises ValueError if a name within the columns cannot be one of a table's."""
    for names in _names(columns):
        if strange := [name for name in names if set(name) & set(_REFUSED)]:
            raise ValueError(
                f"{strange[0]!r} cannot be a column name: Delta accepts no white space and none of ,;{{}}()="
            )
        if len({name.lower() for name in names}) < len(names):
            raise ValueError(f"{', '.join(names)}: two of these names are the same to Spark, which ignores case")


def _names(kind: DataType) -> Iterator[list[str]]:
    """The field names of each struct within a type."""
    if isinstance(kind, StructType):
        yield kind.names
        for one in kind:
            yield from _names(one.dataType)
    elif isinstance(kind, ArrayType):
        yield from _names(kind.elementType)
    elif isinstance(kind, MapType):
        yield from _names(kind.valueType)


def payload_table(topic: str, payload: StructType) -> Table:
    """The table for a topic's values. The payload's columns are in the struct `data`, so that names cannot collide."""
    fields = [field for field in schemas.DELIVERIES if field.name in _NAMING]
    fields.sort(key=lambda field: _NAMING.index(field.name))
    safe = _AWKWARD.sub(lambda found: f"%{ord(found[0]):02x}", topic)
    return Table(f"json/{safe}", StructType([*fields, StructField("data", payload)]), ("day",))


class TopicValues(Protocol):
    """The values of a topic, which become rows of a table of their own."""

    @property
    def topic(self) -> str: ...

    @property
    def table(self) -> str:
        """The table's name."""

    def split(self, bronze: DataFrame, batch: int | None = None) -> tuple[DataFrame, DataFrame]:
        """schemas.BRONZE → the rows of the table, and those of `rejects` without `batch`.

        A repeated batch is split in the same way. `batch` None: rows of silver, outside any batch.
        """


@dataclass(frozen=True, slots=True)
class JsonValues:
    """Values that are JSON."""

    topic: str
    payload: StructType

    @property
    def table(self) -> str:
        return payload_table(self.topic, self.payload).name

    def split(self, bronze: DataFrame, batch: int | None = None) -> tuple[DataFrame, DataFrame]:
        rows, bad = parsed(bronze, self.topic, self.payload), misfit(self.payload)
        detail = F.lit(f"not {self.payload.simpleString()}")
        return fitting(rows.where(~bad), values_of(self.payload)), refused(rows.where(bad), detail)


def fitting(rows: DataFrame, data: Column) -> DataFrame:
    """`parsed` rows → the columns of `payload_table`; NULL data for a tombstone."""
    return rows.withColumn("data", F.when(~F.col("tombstone"), data)).select(*_NAMING, "data")


def refused(rows: DataFrame, detail: Column) -> DataFrame:
    """`parsed` rows → schemas.REJECTS without `batch`."""
    told = {"day": day_of("unix_micros(timestamp)"), "reason": F.lit(BAD_PAYLOAD), "detail": detail}
    return rows.withColumns(told).select(*_REJECTS)


def values_of(payload: StructType) -> Column:
    """Of `parsed` rows, the struct of this type."""
    return F.struct(*(F.col("_data")[name].alias(name) for name in payload.names))


_TEXT = "CAST(value AS STRING)"


def parsed(
    bronze: DataFrame,
    topic: str,
    payload: StructType,
    text: str = _TEXT,
    spelled: Sequence[tuple[str, DataType]] = (),
) -> DataFrame:
    """Adds what `misfit` and `values_of` need. `text`: an expression for the JSON text.

    `spelled`: conditions for text with the payload's fields in another spelling (`columns.respelled`), and that.
    """
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    rows = bronze.where(f"topic = {schemas.text(topic)}").withColumns(
        {
            "_text": F.expr(f"CASE WHEN is_valid_utf8({text}) THEN {text} END"),
            "tombstone": F.expr("value IS NULL"),
            "day": created_day(),
        }
    )

    def read(kind_of: Callable[[Any], Any], options: dict[str, str]) -> Column:
        wanted, cases = kind_of(respelled(payload, payload)), list[Column]()
        for condition, names in spelled:
            other = F.from_json("_text", kind_of(names), options).cast(wanted)  # field by field
            cases.append(F.when(F.expr(condition), other))
        return reduce(lambda usual, case: case.otherwise(usual), cases, F.from_json("_text", wanted, options))

    rows = rows.withColumn("_data", read(_marked, options))
    if not isinstance(rebuilt(payload, _probe), StructType):
        return rows
    return rows.withColumn("_probe", read(lambda kind: rebuilt(kind, _probe), {"mode": "PERMISSIVE"}))


def _marked(kind: StructType) -> StructType:
    return StructType([*kind, StructField(_CORRUPT, StringType())])


def misfit(payload: StructType) -> Column:
    """A condition on `parsed` rows: the value does not fit this schema, or Spark has altered it while parsing."""
    wrong = [F.expr(f"_data IS NULL OR _data.{_CORRUPT} IS NOT NULL")]
    for column, test in (("_data", beyond), ("_probe", _altered)):
        if (found := somewhere(F.col(column), payload, test)) is not None:
            wrong.append(found)
    return ~F.col("tombstone") & reduce(or_, wrong)


# Spark rounds a number with more decimals than its column. A number for a timestamp is taken as seconds and multiplied
# by a million, which overflows silently beyond 9.2e12; one from 128 to 255 wraps in a byte. A time of day gets the day
# on which it is parsed, and what follows a date is dropped. So such values are also parsed as they are written.

_HUGE = "^-?[0-9]{13,}$"
"""Seconds with 13 or more digits: after the year 9999, whether or not the product overflows."""


_TIME_OF_DAY = r"^\s*(T|[0-9]{1,2}:)"
_DAY = r"^\s*[+-]?[0-9]{4,7}(-[0-9]{1,2}){0,2}([T ]00:00(:00(\.0*)?)?Z?)?\s*$"
"""Also the midnight with which some programs write a date."""


def _probe(kind: DataType) -> DataType | None:
    """The type with which to parse a value of this type for `_altered`; None if Spark cannot alter it."""
    if isinstance(kind, DecimalType):
        return _finer(kind)
    if isinstance(kind, ByteType):
        return IntegerType()
    return StringType() if isinstance(kind, TimestampType | DateType) else None


def _finer(kind: DecimalType) -> DecimalType:
    """With as many decimals as fit beside its integer digits; at least 19 more, even if large numbers then overflow."""
    return DecimalType(38, max(38 - kind.precision + kind.scale, min(38, kind.scale + 19)))


def _altered(probe: Column, kind: DataType) -> Column | None:
    if isinstance(kind, DecimalType):
        # try_: a number that does not fit becomes NULL, which differs as well.
        return ~probe.eqNullSafe(probe.try_cast(kind).try_cast(_finer(kind)))
    if isinstance(kind, ByteType):
        return ~probe.between(-128, 127)
    if isinstance(kind, DateType):
        return ~probe.rlike(_DAY)
    return probe.rlike(_HUGE) | probe.rlike(_TIME_OF_DAY) if isinstance(kind, TimestampType) else None


def beyond(value: Column, kind: DataType) -> Column | None:
    """Whether a time is outside the range of most readers of a table; None for other types."""
    if isinstance(kind, TimestampType):
        return ~F.unix_micros(value).between(schemas.FIRST_US, schemas.LAST_US)
    if isinstance(kind, DateType | TimestampNTZType):
        return ~F.year(value).between(1, 9999)
    return None


def somewhere(value: Column, kind: DataType, test: Callable[[Column, DataType], Column | None]) -> Column | None:
    """Whether the test holds for some value within this one, never NULL. None if it applies to none of its types."""
    if isinstance(kind, StructType):
        found = [somewhere(value[one.name], one.dataType, test) for one in kind]
        some = [one for one in found if one is not None]
        return reduce(or_, some) if some else None
    if isinstance(kind, ArrayType | MapType):
        inner = kind.valueType if isinstance(kind, MapType) else kind.elementType
        if somewhere(F.lit(None), inner, test) is None:
            return None

        def within(one: Column) -> Column:
            held = somewhere(one, inner, test)
            assert held is not None
            return held

        values = F.map_values(value) if isinstance(kind, MapType) else value
        return F.coalesce(F.exists(values, within), F.lit(False))
    held = test(value, kind)
    return None if held is None else F.coalesce(held, F.lit(False))
