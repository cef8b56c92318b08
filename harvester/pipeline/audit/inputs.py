"""The records that an audit looks at: topics as they are now, or the bronze table of a lake. Thin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import checkpoint, files, schemas, source, tables
from harvester.pipeline.audit.schemas import RECORDS
from harvester.pipeline.audit.topic_bounds import TopicBounds, topic_bounds
from harvester.pipeline.errors import InputMissing, TableMismatch
from harvester.pipeline.origin_columns import bronze_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_TASK_RECORDS = 500_000


@dataclass(frozen=True, slots=True)
class Input:
    """`bronze` as schemas.BRONZE, lazily. `bounds`: what the brokers said; None for a lake."""

    name: str
    topics: tuple[str, ...]
    bronze: DataFrame
    bounds: TopicBounds | None


def require(spark: SparkSession, kafka: Mapping[str, str], topics: tuple[str, ...], lake: str | None) -> None:
    """Whether there is anything to read, before much is done. Raises InputMissing, BrokerUnavailable, TableMismatch."""
    if lake is None:
        source.require_topics(spark, kafka, topics)
    elif not tables.exists(spark, path := tables.path_of(lake, "bronze")):
        raise InputMissing(f"there is no lake in {lake}: {path} is missing", hint="`harvester pipeline lake` makes one")


def from_topics(
    spark: SparkSession,
    kafka: Mapping[str, str],
    topics: tuple[str, ...],
    header: str,
    since: datetime | None,
    progress: Callable[[str], None],
) -> Input:
    """Everything committed from `since` on, up to the ends as they are now. Raises BrokerUnavailable."""
    bounds = topic_bounds(spark, kafka, topics, since, progress=progress)
    # How many records there are at most; it decides nothing but the size of tasks.
    most = sum(end - bounds.start[place] for place, end in bounds.end.items())
    options = {
        **source.options(kafka),
        **bounds.options(),
        "minPartitions": str(min(10_000, len(bounds.end) + most // _TASK_RECORDS)),
    }
    rows = spark.read.format("kafka").options(**options).load()
    return Input(f"Kafka at {kafka.get('bootstrap.servers')}", topics, bronze_columns(rows, header), bounds)


def from_lake(spark: SparkSession, root: str, since: datetime | None) -> Input:
    """The bronze table of `pipeline lake`. Raises TableMismatch for another."""
    path = tables.path_of(root, "bronze")
    rows = spark.read.format("delta").load(path)
    missing, problems = schemas.differences(rows.schema, schemas.BRONZE)
    problems += [f"{'.'.join(one.path)} is missing" for one in missing]
    if problems:
        raise TableMismatch(f"the table {path} is no bronze of a lake: {'; '.join(problems)}")
    if since is not None:
        rows = rows.where(F.col("day") >= F.lit(since.date()))
        rows = rows.where(F.col("timestamp") >= F.lit(since))
    return Input(f"lake {root}", _topics(spark, root), rows.select(*schemas.BRONZE.names), None)


def trimmed(bronze: DataFrame, since: datetime | None, until: datetime | None, notices: str) -> DataFrame:
    """schemas.BRONZE → RECORDS. `notices`: the topic of notices, "" for none."""
    inside = F.lit(True)
    if since is not None:
        inside = inside & (F.col("timestamp") >= F.lit(since))
    if until is not None:
        inside = inside & (F.col("timestamp") < F.lit(until))
    return bronze.withColumns({"inside": inside, "notice": _notice(notices)}).select(*RECORDS.names)


def read_from(since: datetime | None, margin: timedelta) -> datetime | None:
    """Where reading begins for a range that begins there."""
    return None if since is None else since - margin


def _notice(topic: str) -> Column:
    """The header of the record that a notice is about (docs/dead-letters.md); NULL for whatever else stands there."""
    if not topic:
        return F.lit(None).cast("binary")
    text = F.try_validate_utf8(F.col("value").cast("string"))
    return F.when(F.col("topic") == topic, F.unhex(F.get_json_object(text, "$.origin")))


def _topics(spark: SparkSession, root: str) -> tuple[str, ...]:
    """Those that the lake's checkpoint reads; () where it stands elsewhere."""
    where = f"{root.rstrip('/')}/checkpoint"
    text = files.read_text(spark, f"{where}/{checkpoint.FILE}")
    return () if text is None else checkpoint.from_text(text, where).topics
