"""Repeats, and the order in which the log has the records of a key (invariant I2).

Within a key of a partition the log's own order is the order of delivery, and the ids say what is right: a writer that
locks what the key stands for, and then inserts, takes ids in the order of its commits (docs/outbox.md). A record that
comes below an id that is already there is either

    repeated after a successor      it had been delivered before: never right
    delivered after a successor     it had not: wrong, unless its writers were not serial, which nothing here can tell

Records without a key have no order, and between partitions or topics the log defines none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline.audit.schemas import FINDINGS, MARKED, Kind, Severity

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_NOTHING_BEFORE = (Window.unboundedPreceding, -1)


def marked(records: DataFrame) -> DataFrame:
    """RECORDS → MARKED: those with an origin, each with what came before it."""
    sent = records.where(F.col("problem").isNull())
    # Of a repeat the clock may be behind: within a partition the offset says which was first.
    one = Window.partitionBy("incarnation", "id")
    here = Window.partitionBy("incarnation", "id", "topic", "partition")
    sent = sent.withColumn("_began", F.min("timestamp").over(here)).withColumn(
        "first", F.row_number().over(one.orderBy("_began", "topic", "partition", "offset")) == 1
    )
    # Without a key each record is alone, instead of all of them being one task.
    alone = F.when(F.col("key").isNull(), F.col("id"))
    key = Window.partitionBy("topic", "partition", "incarnation", "key", "_alone").orderBy("offset")
    top = F.max("id").over(key.rowsBetween(*_NOTHING_BEFORE))
    sent = sent.withColumn("_alone", alone).withColumn("_top", top)
    return sent.withColumn("after", F.when(F.col("_top") > F.col("id"), F.col("_top"))).select(*MARKED.names)


def findings(marked: DataFrame, *, repeats: Severity, swaps: Severity) -> DataFrame:
    """MARKED → FINDINGS: every delivery beyond the first of an id, and every one that comes after a successor."""
    again, late = ~F.col("first"), F.col("after").isNotNull()
    kind = F.when(again & late, Kind.LATE_REPEAT).when(again, Kind.REPEAT).when(late, Kind.SWAPPED)
    severity = F.when(again & late, Severity.VIOLATION).when(again, repeats.value).when(late, swaps.value)
    detail = F.when(late, F.format_string("id %d of its key had come before it", "after")).otherwise(
        F.lit("delivered before")
    )
    wrong = marked.where(F.col("inside") & (again | late))
    return wrong.select(
        kind.alias("kind"), severity.alias("severity"), "incarnation", "id", *_place(), "key",
        detail.alias("detail"), F.col("timestamp").alias("at"),
    ).select(*FINDINGS.names)  # fmt: skip


def scattered(places: DataFrame) -> DataFrame:
    """(topic, key, partition, records) → FINDINGS: keys of which one topic has records in several partitions."""
    keyed = places.where(F.col("key").isNotNull())
    apart = keyed.groupBy("topic", "key").agg(
        F.count("partition").alias("partitions"), F.min("partition").alias("low"), F.max("partition").alias("high")
    )
    nothing = F.lit(None)
    return apart.where(F.col("partitions") > 1).select(
        F.lit(Kind.SCATTERED.value).alias("kind"), F.lit(Severity.SUSPECT.value).alias("severity"),
        nothing.cast("string").alias("incarnation"), nothing.cast("bigint").alias("id"), "topic",
        nothing.cast("int").alias("partition"), nothing.cast("bigint").alias("offset"), "key",
        F.format_string("in %d partitions, from %d to %d: between them there is no order", "partitions", "low", "high")
        .alias("detail"),
        nothing.cast("timestamp").alias("at"),
    )  # fmt: skip


def _place() -> tuple[Column, ...]:
    return F.col("topic"), F.col("partition"), F.col("offset")
