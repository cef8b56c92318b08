"""Kafka's rows → bronze: decodes the harvester's header into columns, with Spark SQL expressions only.

Reimplements `harvester.origin.decode`, byte for byte; a property test keeps the two equal. If they differed, one of
them would take a repeat for a new record.

SQL can read bytes as a number only through their hexadecimal digits, which costs more than all other processing of a
record. Java has a method for it, and the code that Spark generates can call Java methods, as Spark's own object
encoders do. This is not a public interface of Spark, so `JavaBytes` is used if it works as expected and `SqlBytes`
otherwise; the property test covers both. Neither requires anything but Spark on executors. Both read big-endian numbers
and UUIDs at a position counted from 0. Reading beyond the end yields a Java exception, or NULL.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.pipeline import schemas

_UUID_GROUPS = ((0, 4), (4, 2), (6, 2), (8, 2), (10, 6))
_UNSIGNED_32 = 0xFFFF_FFFF


def fastest_reader(spark: SparkSession) -> ColumnReader:
    """`JavaBytes` if this version of Spark supports it, otherwise `SqlBytes`."""
    from py4j.protocol import Py4JError

    try:
        fast = JavaBytes(spark)
        fast.uuid(F.lit(bytes(16)), 0)
        fast.unsigned32(F.lit(bytes(16)), 0)
    except (Py4JError, TypeError, AttributeError, ImportError):
        return SqlBytes()
    return fast


class SqlBytes:
    """Reads bytes with Spark SQL functions."""

    def signed64(self, raw: Column, at: int) -> Column:
        """A negative base makes `conv` return 64 bits as signed. try_: the digits of a short value may be empty."""
        return F.conv(_hex(raw, at, 8), 16, -10).try_cast("bigint")

    def unsigned32(self, raw: Column, at: int) -> Column:
        return F.conv(_hex(raw, at, 4), 16, 10).cast("bigint")

    def uuid(self, raw: Column, at: int) -> Column:
        return F.lower(F.concat_ws("-", *(_hex(raw, at + first, size) for first, size in _UUID_GROUPS)))


class JavaBytes:
    """Reads bytes with java.nio.ByteBuffer and java.util.UUID, called from the code that Spark generates."""

    def __init__(self, spark: SparkSession) -> None:
        from pyspark.sql.classic.column import Column as ClassicColumn

        # Untyped: py4j resolves names at run time, part by part in the Java process, so each is looked up once.
        jvm: Any = spark.sparkContext._jvm
        self._column = ClassicColumn
        self._utils = jvm.org.apache.spark.sql.classic.ExpressionUtils
        objects = jvm.org.apache.spark.sql.catalyst.expressions.objects
        self._static_call, self._call, self._new = objects.StaticInvoke, objects.Invoke, objects.NewInstance
        kinds = jvm.org.apache.spark.sql.types.DataTypes
        self._long_kind, self._int_kind, self._text_kind = kinds.LongType, kinds.IntegerType, kinds.StringType
        self._list, self._converters = jvm.java.util.ArrayList, jvm.scala.jdk.javaapi.CollectionConverters
        self._none, self._empty = jvm.scala.Option.empty(), self._sequence()
        find, kind = jvm.java.lang.Class.forName, jvm.org.apache.spark.sql.types.ObjectType
        self._buffer_class, self._uuid_class = find("java.nio.ByteBuffer"), find("java.util.UUID")
        self._text_class = find("org.apache.spark.unsafe.types.UTF8String")
        self._buffer, self._uuid, self._string = map(
            kind, (self._buffer_class, self._uuid_class, find("java.lang.String"))
        )

    def signed64(self, raw: Column, at: int) -> Column:
        return self._as_column(self._long(raw, at))

    def unsigned32(self, raw: Column, at: int) -> Column:
        """Masks ByteBuffer.getInt, which is signed."""
        found = self._invoke(self._wrapped(raw), "getInt", self._int_kind, F.lit(at))
        return self._as_column(found).cast("bigint").bitwiseAND(F.lit(_UNSIGNED_32))

    def uuid(self, raw: Column, at: int) -> Column:
        halves = self._sequence(self._long(raw, at), self._long(raw, at + 8))
        made = self._new(self._uuid_class, halves, self._empty, True, self._uuid, self._none)
        text = self._invoke(made, "toString", self._string)
        return self._as_column(self._static(self._text_class, self._text_kind, "fromString", text))

    def _long(self, raw: Column, at: int) -> Any:
        return self._invoke(self._wrapped(raw), "getLong", self._long_kind, F.lit(at))

    def _wrapped(self, raw: Column) -> Any:
        # Repeated for each number, but computed once: Spark eliminates equal subexpressions.
        return self._static(self._buffer_class, self._buffer, "wrap", self._utils.expression(_java(raw)))

    def _static(self, owner: Any, kind: Any, method: str, argument: Any) -> Any:
        # The flags: propagate NULL, may return NULL, deterministic.
        given = self._sequence(argument)
        return self._static_call(owner, kind, method, given, self._empty, True, True, True, self._none)

    def _invoke(self, target: Any, method: str, kind: Any, *arguments: Column) -> Any:
        given = self._sequence(*(self._utils.expression(_java(one)) for one in arguments))
        return self._call(target, method, kind, given, self._empty, True, True, True)

    def _as_column(self, expression: Any) -> Column:
        return self._column(self._utils.column(expression))

    def _sequence(self, *items: Any) -> Any:
        found = self._list()
        for item in items:
            found.add(item)
        return self._converters.asScala(found).toSeq()


def _java(column: Any) -> Any:
    return column._jc


def _hex(raw: Column, at: int, size: int) -> Column:
    return F.hex(F.substring(raw, at + 1, size))  # SQL counts from 1


ColumnReader = SqlBytes | JavaBytes

NO_HEADER, UNSOUND, NEWER = "no header", "unsound header", "newer header"
"""Why a record has no origin: the values of the column `problem`."""

# Timestamps are limited to the years 1 to 9999: Spark and Parquet accept more, but most readers do not.
_DAY_US = 86_400_000_000
_MARK = bytes((0xB5,))
# The positions of fields in the header, by column.
_NUMBERS = {"_term": 18, "_low": 34, "_id": 42, "_sequence": 50, "_created": 58}
_SMALL = {"_lane": 26, "_producer": 30}
_PLAIN = ("incarnation", "term", "lane", "producer", "id", "sequence")


def bronze_columns(kafka: DataFrame, header: str = origin.HEADER, reader: ColumnReader | None = None) -> DataFrame:
    """schemas.KAFKA → schemas.BRONZE, row for row. Without a sound header the columns of the origin are NULL.

    `problem` gives the reason, and is NULL for a record with an origin. `day` is the UTC day of Kafka's timestamp.
    `reader`: None: the fastest one.
    """
    read = reader or fastest_reader(kafka.sparkSession)
    raw, sound = F.col("_raw"), F.col("_problem").isNull()
    # A header of another length is not decoded: zeros are, and the result is not used.
    whole = F.when(F.length(raw) == origin.SIZE, raw).otherwise(F.lit(bytes(origin.SIZE)))
    found = kafka.withColumn("_raw", _last(header)).withColumn("_whole", whole)
    # Columns for values that are used more than once, so that Spark computes them once.
    numbers = found.withColumns(
        {name: read.signed64(F.col("_whole"), at) for name, at in _NUMBERS.items()}
        | {name: read.unsigned32(F.col("_whole"), at) for name, at in _SMALL.items()}
        | {"_incarnation": read.uuid(F.col("_whole"), 2)}
    )
    decoded = (
        numbers.withColumn("_problem", _problem(raw))
        .withColumns(
            {
                "low_water": F.when(sound, F.nullif(F.col("_low"), F.lit(origin.SMALLEST))),
                "created_us": F.when(sound, F.col("_created")),
            }
            | {name: F.when(sound, F.col(f"_{name}")) for name in _PLAIN}
        )
        .withColumns(
            {
                "day": day_of("unix_micros(timestamp)"),
                "created_at": instant(F.col("created_us")),
                "problem": F.col("_problem"),
            }
        )
    )
    return decoded.select(*schemas.BRONZE.names)


def instant(microseconds: Column) -> Column:
    """Microseconds since the epoch → timestamp; NULL outside the years 1 to 9999."""
    return F.when(microseconds.between(schemas.FIRST_US, schemas.LAST_US), F.timestamp_micros(microseconds))


def day_of(microseconds: str) -> Column:
    """Microseconds since the epoch → the UTC day, whatever the session's time zone; NULL as in `instant`."""
    inside = f"CASE WHEN {microseconds} BETWEEN {schemas.FIRST_US} AND {schemas.LAST_US} THEN {microseconds} END"
    # Reduced to whole days before the division: a double would round, and DIV truncates towards zero.
    days = f"({inside} - pmod({inside}, {_DAY_US}L)) DIV {_DAY_US}L"
    return F.expr(f"date_from_unix_date(CAST({days} AS INT))")


def _last(header: str) -> Column:
    """The value of the last header with this name. It is usually the very last: the harvester appends its own."""
    # try_: in ANSI mode a missing index would fail the query.
    end = F.try_element_at("headers", F.lit(-1))
    named = F.filter("headers", lambda one: one["key"] == F.lit(header))
    return F.when(end["key"] == F.lit(header), end["value"]).otherwise(F.try_element_at(named, F.lit(-1))["value"])


def _problem(raw: Column) -> Column:
    sound = (
        (F.length(raw) == origin.SIZE)
        & (F.substring(raw, 1, 2) == F.lit(bytes((*_MARK, origin.VERSION))))
        & (F.col("_sequence") >= 1)
        & (F.col("_low") <= F.col("_id"))
    )
    newer = (
        (F.length(raw) >= 2)
        & (F.substring(raw, 1, 1) == F.lit(_MARK))
        & (F.substring(raw, 2, 1) > F.lit(bytes((origin.VERSION,))))
    )
    return F.when(raw.isNull(), NO_HEADER).when(newer, NEWER).when(sound, None).otherwise(UNSOUND)
