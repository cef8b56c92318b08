"""Values that are JSON, as columns: one table a topic, and rejects for what does not fit the topic's schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import StringType, StructField, StructType

from harvester.pipeline import schemas
from harvester.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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


def table(topic: str, payload: StructType) -> Table:
    """Where the values of a topic go; the payload's columns stand in `data`, so that no name can collide."""
    fields = [field for field in schemas.SILVER if field.name in _NAMING]
    fields.sort(key=lambda field: _NAMING.index(field.name))
    safe = _AWKWARD.sub(lambda found: f"%{ord(found[0]):02x}", topic)
    return Table(f"json/{safe}", StructType([*fields, StructField("data", payload)]), ("day",))


def expanded(silver: DataFrame, topic: str, payload: StructType) -> DataFrame:
    """schemas.SILVER → the columns of `table`: the topic's rows whose value fits; a tombstone has no data."""
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
