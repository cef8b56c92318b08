"""The history against the log: what was purged and is in no topic, and what is in a topic and in no history (I1).

A row is purged after the broker's acknowledgement, so whatever the archive names has to stand in the topics, wherever.
Judged is what was purged within the range and *created* since the topics are whole: a record cannot be in the log
before its row was made, so what is asked for lies within what was read, whatever clock its timestamp is of.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.schemas import FINDINGS, Kind, Severity, Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True, slots=True)
class Bounds:
    """What can be judged. `whole`: since when the topics have everything; None: from their beginning.

    `since` ≤ purged_at < `until`. `doubtful`: topics that may have dropped records (compacted, or emptied).
    """

    topics: tuple[str, ...]
    since: datetime | None = None
    until: datetime | None = None
    whole: datetime | None = None
    doubtful: Collection[str] = ()


def archived(history: DataFrame, bounds: Bounds) -> DataFrame:
    """HISTORY → HISTORY with `judged`: what the archive has of the range and of the topics that were read."""
    rows = history.where((F.col("source") == Source.ARCHIVE) & F.col("topic").isin(*bounds.topics))
    if bounds.since is not None:
        rows = rows.where(F.col("at") >= F.lit(bounds.since))
    if bounds.until is not None:
        rows = rows.where(F.col("at") < F.lit(bounds.until))
    whole = (
        F.lit(True) if bounds.whole is None else F.coalesce(F.col("created_at") >= F.lit(bounds.whole), F.lit(False))
    )
    return rows.withColumn("judged", whole)


def found(archived: DataFrame, marked: DataFrame) -> DataFrame:
    """`archived` and MARKED → the first with `delivered`: whether the log has it, in whichever topic."""
    ids = marked.where("first").select("incarnation", "id", F.lit(True).alias("_there"))
    joined = archived.join(ids, ["incarnation", "id"], "left")
    return joined.withColumn("delivered", F.col("_there").isNotNull()).drop("_there")


def lost(found: DataFrame, bounds: Bounds) -> DataFrame:
    """`found` → FINDINGS: purged, and in none of the topics."""
    doubtful = F.col("topic").isin(*bounds.doubtful) if bounds.doubtful else F.lit(False)
    severity = F.when(doubtful, Severity.SUSPECT).otherwise(Severity.VIOLATION)
    rows = found.where(F.col("judged") & ~F.col("delivered"))
    return _finding(rows, Kind.LOST, severity, F.lit("purged as delivered, and in none of the topics"), F.col("at"))


def unexpected(marked: DataFrame, history: DataFrame, began: datetime | None, read_at: datetime) -> DataFrame:
    """MARKED and HISTORY → FINDINGS: records of which outbox, quarantine and archive know nothing.

    Only those between the archive's beginning and the moment at which the history was read: before, nobody noted
    them; after, their rows are newer.
    """
    if began is None:
        rows = marked.limit(0)
    else:
        created = F.coalesce(F.col("created_us"), F.lit(0))
        since, until = F.lit(began), F.unix_micros(F.lit(read_at))
        rows = marked.where(F.col("inside") & F.col("first") & (F.col("timestamp") >= since) & (created < until))
    strange = rows.join(history.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
    detail = F.lit("neither in the outbox nor in its quarantine and archive")
    return _finding(strange, Kind.UNEXPECTED, F.lit(Severity.SUSPECT.value), detail, F.col("timestamp"))


def _finding(rows: DataFrame, kind: Kind, severity: Column, detail: Column, at: Column) -> DataFrame:
    offset = F.col("offset") if "offset" in rows.columns else F.lit(None).cast("bigint")
    return rows.select(
        F.lit(kind.value).alias("kind"), severity.alias("severity"), "incarnation", "id", "topic", "partition",
        offset.alias("offset"), "key", detail.alias("detail"), at.alias("at"),
    ).select(*FINDINGS.names)  # fmt: skip
