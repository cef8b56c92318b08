"""Kafka's rows → bronze: the harvester's header as columns, by expressions of Spark SQL alone.

It is `harvester.origin.decode` once more, byte for byte; a property test keeps the two equal. Where they would differ
a repeat would pass for new in one place and not in the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import origin
from harvester.pipeline import schemas

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NO_HEADER, UNSOUND, NEWER = "no header", "unsound header", "newer header"
"""Why a record has no origin; the column `problem`."""

# What a timestamp of Spark and of Parquet holds is wider than what most readers do: years 1 to 9999.
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_DAY_US = 86_400_000_000
_MARK = bytes((0xB5,))


def bronze_columns(kafka: DataFrame, header: str = origin.HEADER) -> DataFrame:
    """schemas.KAFKA → schemas.BRONZE, row for row. Without a sound header the columns of the origin are NULL.

    `problem` says why, and is NULL for a record with an origin. `day` is that of Kafka's timestamp, UTC.
    """
    raw = F.col("_raw")
    # try_: under ANSI rules an index that is not there would end the query.
    named = F.filter("headers", lambda one: one["key"] == F.lit(header))
    found = kafka.withColumn("_raw", F.try_element_at(named, F.lit(-1))["value"])
    sound = F.col("_sound")
    decoded = (
        found.withColumn("_problem", _problem(raw))
        .withColumn("_sound", F.col("_problem").isNull())
        .withColumns(
            {
                "incarnation": F.when(sound, _uuid(raw)),
                "term": F.when(sound, _signed(raw, 18)),
                "lane": F.when(sound, _unsigned(raw, 26)),
                "producer": F.when(sound, _unsigned(raw, 30)),
                "low_water": F.when(sound, F.nullif(_signed(raw, 34), F.lit(origin.SMALLEST))),
                "id": F.when(sound, _signed(raw, 42)),
                "sequence": F.when(sound, _signed(raw, 50)),
                "created_us": F.when(sound, _signed(raw, 58)),
            }
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
    # Whole days as integers: a double would round, and `div` goes towards zero instead of down.
    days = (inside - F.pmod(inside, F.lit(_DAY_US))).cast("decimal(20,0)") / F.lit(_DAY_US)
    return F.date_from_unix_date(days.cast("int"))


def _problem(raw: Column) -> Column:
    sound = (
        (F.length(raw) == origin.SIZE)
        & (F.substring(raw, 1, 2) == F.lit(bytes((*_MARK, origin.VERSION))))
        & (_signed(raw, 50) >= 1)
        & (_signed(raw, 34) <= _signed(raw, 42))
    )
    newer = (
        (F.length(raw) >= 2)
        & (F.substring(raw, 1, 1) == F.lit(_MARK))
        & (F.substring(raw, 2, 1) > F.lit(bytes((origin.VERSION,))))
    )
    return F.when(raw.isNull(), NO_HEADER).when(newer, NEWER).when(sound, None).otherwise(UNSOUND)


def _hex(raw: Column, at: int, size: int) -> Column:
    return F.hex(F.substring(raw, at + 1, size))  # SQL counts from 1


def _signed(raw: Column, at: int) -> Column:
    # A negative base makes `conv` read 64 bits as signed. try_: of a value that is too short nothing is left.
    return F.conv(_hex(raw, at, 8), 16, -10).try_cast("bigint")


def _unsigned(raw: Column, at: int) -> Column:
    return F.conv(_hex(raw, at, 4), 16, 10).cast("bigint")


def _uuid(raw: Column) -> Column:
    digits = F.lower(_hex(raw, 2, 16))
    parts = (F.substring(digits, start, size) for start, size in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12)))
    return F.concat_ws("-", *parts)
