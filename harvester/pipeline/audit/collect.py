"""Brings frames of the audit in as plain values, and writes the audit's tables.

The tables of an audit: every finding, and one row with the report of each audit. Each audit adds its own.
"""

from __future__ import annotations

from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.window import Window

from harvester.pipeline import tables
from harvester.pipeline.audit.checks import ProducerStream
from harvester.pipeline.audit.report import (
    EXAMPLES,
    AuditFinding,
    AuditReport,
    FindingGroup,
    HotKey,
    Latency,
    grouped,
    instant,
    key_text,
)
from harvester.pipeline.audit.schemas import (
    AUDITS_TABLE,
    FINDINGS,
    FINDINGS_TABLE,
    STREAM,
    FindingKind,
    RecordSource,
    Severity,
)
from harvester.pipeline.audit.skew import Skew, skew

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def collect_streams(streams: DataFrame) -> tuple[ProducerStream, ...]:
    """`audit_terms.streams`, in order."""
    rows = streams.select(
        *STREAM, "records", F.unix_micros("first_at").alias("first_at"), F.unix_micros("last_at").alias("last_at")
    ).collect()
    found = []
    for row in rows:
        first_at, last_at = instant(row["first_at"]), instant(row["last_at"])
        assert first_at is not None
        assert last_at is not None
        found.append(
            ProducerStream(
                row["incarnation"], row["term"], row["lane"], row["producer"], row["records"], first_at, last_at
            )
        )
    return tuple(sorted(found, key=lambda one: (one.incarnation, one.term, one.lane, one.first_at, one.producer)))


def collect_history(history: DataFrame) -> tuple[dict[str, int], frozenset[str], datetime | None]:
    """HISTORY → rows by source, the topics that the archive's went to, and when it begins."""
    rows = history.groupBy("source", "topic").agg(
        F.count(F.lit(1)).alias("rows"), F.min(F.unix_micros("at")).alias("oldest")
    )
    counts: dict[str, int] = {}
    topics, oldest = set(), []
    for row in rows.collect():
        counts[row["source"]] = counts.get(row["source"], 0) + int(row["rows"])
        if row["source"] == RecordSource.ARCHIVE:
            topics.add(str(row["topic"]))
            oldest.append(int(row["oldest"]))
    return counts, frozenset(topics), instant(min(oldest, default=None))


def collect_tallies(*tallies: DataFrame) -> dict[str, int]:
    """Pairs of `audit_tally`, all at once."""
    rows = reduce(lambda one, other: one.unionByName(other), tallies).collect()
    return {row["name"]: int(row["value"]) for row in rows}


def collect_findings(findings: DataFrame) -> tuple[FindingGroup, ...]:
    """FINDINGS → how many of each kind, with the earliest as examples."""
    same = Window.partitionBy("kind", "severity")
    earliest = same.orderBy(F.asc_nulls_last("at"), "topic", "partition", "offset", "id")
    rows = (
        findings.withColumn("count", F.count(F.lit(1)).over(same))
        .withColumn("nth", F.row_number().over(earliest))
        .where(F.col("nth") <= EXAMPLES)
        .withColumn("at", F.unix_micros("at"))
        .select(*FINDINGS.names, "count", "nth")
    )
    found = []
    for row in sorted(rows.collect(), key=lambda one: (one["kind"], one["severity"], one["nth"])):
        finding = AuditFinding(
            FindingKind(row["kind"]), Severity(row["severity"]), row["incarnation"], row["id"], row["topic"],
            row["partition"], row["offset"], key_text(row["key"]), row["detail"], instant(row["at"]),
        )  # fmt: skip
        found.append((finding, int(row["count"])))
    return grouped(found)


def collect_latency(latency: DataFrame) -> tuple[Latency, ...]:
    """`audit_latency.by_hour`: all topics first, then each with its hours in order."""
    rows = latency.withColumn("hour", F.unix_micros("hour")).collect()
    rows.sort(key=lambda row: (row["topic"] or "", row["hour"] is not None, row["hour"] or 0))
    found = []
    for row in rows:
        p50, p90, p99 = row["quantiles_ms"] or (None, None, None)
        found.append(Latency(row["topic"], instant(row["hour"]), row["records"], p50, p90, p99, row["max_ms"]))
    return tuple(found)


def collect_hot_keys(counts: DataFrame) -> tuple[tuple[HotKey, ...], Skew | None]:
    """`audit_skew.hot_keys` → the hottest keys, and what that means for shards; None where nothing was delivered."""
    hottest, buckets, keys, keyless = [], {}, 0, 0
    for row in counts.collect():
        if row["key"] is not None:
            hottest.append((bytes(row["key"]), int(row["records"])))
        elif row["bucket"] is None:
            keyless = int(row["records"])
        else:
            buckets[int(row["bucket"])] = int(row["records"])
            keys += int(row["keys"])
    hottest.sort(key=lambda pair: (-pair[1], pair[0]))
    if not (buckets or keyless):
        return (), None
    judged = skew(buckets, keys, keyless, hottest[0][1] if hottest else 0)
    named = tuple(HotKey(key_text(key) or "", records, records / judged.records) for key, records in hottest)
    return named, judged


def write(spark: SparkSession, root: str, report: AuditReport, findings: DataFrame) -> None:
    """Adds the findings, then the report: a report that is there has all its findings."""
    rows = findings.withColumn("audited_at", F.lit(report.audited_at)).select(*FINDINGS_TABLE.schema.names)
    tables.append(rows, root, FINDINGS_TABLE.name)
    row = (report.audited_at, report.holds, report.to_json())
    tables.append(spark.createDataFrame([row], AUDITS_TABLE.schema), root, AUDITS_TABLE.name)
