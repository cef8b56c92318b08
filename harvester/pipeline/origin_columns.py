"""Kafka's rows → bronze: the harvester's header as columns, by expressions of Spark SQL alone.

It is `harvester.origin.decode` once more, byte for byte; a property test keeps the two equal. Where they would differ
a repeat would pass for new in one place and not in the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.pipeline import byte_columns, schemas

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from harvester.pipeline.byte_columns import Reader

NO_HEADER, UNSOUND, NEWER = "no header", "unsound header", "newer header"
"""Why a record has no origin; the column `problem`."""

# What a timestamp of Spark and of Parquet holds is wider than what most readers do: years 1 to 9999.
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_DAY_US = 86_400_000_000
_MARK = bytes((0xB5,))
# Where they stand in the header, by column.
_NUMBERS = {"_term": 18, "_low": 34, "_id": 42, "_sequence": 50, "_created": 58}
_SMALL = {"_lane": 26, "_producer": 30}
_PLAIN = ("incarnation", "term", "lane", "producer", "id", "sequence")


def bronze_columns(kafka: DataFrame, header: str = origin.HEADER, reader: Reader | None = None) -> DataFrame:
    """schemas.KAFKA → schemas.BRONZE, row for row. Without a sound header the columns of the origin are NULL.

    `problem` says why, and is NULL for a record with an origin. `day` is that of Kafka's timestamp, UTC. `reader`: None
    for the fastest one.
    """
    read = reader or byte_columns.reader(kafka.sparkSession)
    raw, sound = F.col("_raw"), F.col("_problem").isNull()
    # Of another length it is not looked into; then zeros are, and are not used.
    whole = F.when(F.length(raw) == origin.SIZE, raw).otherwise(F.lit(bytes(origin.SIZE)))
    found = kafka.withColumn("_raw", _last(header)).withColumn("_whole", whole)
    # What is looked at more than once, for Spark to compute once.
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
                "day": day_of(F.unix_micros("timestamp")),
                "created_at": instant(F.col("created_us")),
                "timestamp_type": F.col("timestampType"),
                "problem": F.col("_problem"),
            }
        )
    )
    return decoded.select(*schemas.BRONZE.names)


def instant(microseconds: Column) -> Column:
    """Microseconds since the epoch → timestamp; NULL beyond the years 1 to 9999."""
    return F.when(microseconds.between(_FIRST_US, _LAST_US), F.timestamp_micros(microseconds))


def day_of(microseconds: Column) -> Column:
    """Microseconds since the epoch → the day in UTC, whatever the session's time zone is; NULL as in `instant`."""
    inside = F.when(microseconds.between(_FIRST_US, _LAST_US), microseconds)
    # Whole days before they are divided: a double would round, and `div` goes towards zero instead of down.
    days = F.call_function("div", inside - F.pmod(inside, F.lit(_DAY_US)), F.lit(_DAY_US))
    return F.date_from_unix_date(days.cast("int"))


def _last(header: str) -> Column:
    """The value of the last header with this name; the harvester appends its own, so it mostly is the last of all."""
    # try_: under ANSI rules an index that is not there would end the query.
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
