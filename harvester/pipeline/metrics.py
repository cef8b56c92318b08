"""The job `metrics`: throughput, latency and skew of a lake's topics by window, as a batch over its tables.

A run looks for batches of the lake that are new, and counts the hours in which windows of their records begin again,
from all that the lake has of them. So a late record corrects what was written before it, and no state is kept. The days
of these hours are replaced, since a partition of both formats can be replaced in one commit; their other hours stay.
What was seen is noted last, as a property of the table `metrics`: a run that was killed is repeated, with the same
result.

With other settings, windows may begin in other hours, or be of other topics. So the hours are also replaced in which a
stored window begins that reaches into an hour of which the lake has records: no record counts in windows of both.

The tables of a lake get the rows of a batch one after the other. So the versions of the tables are noted, too, and when
one has changed, the last batch counts as new once more. ADR 30.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import failpoints
from harvester.pipeline import schemas, tables, windows
from harvester.pipeline.errors import TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.session import clear_errors
from harvester.pipeline.store import TableStore
from harvester.pipeline.windows import KEYS, METRICS

_SOURCES = ("silver", "repeats", "rejects")


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The settings of a run. `topics`: () for all. `to`: the location of the tables; None: the lake's.

    With other settings than those of the last run, everything that the lake has is new.
    """

    lake: str
    to: str | None = None
    topics: tuple[str, ...] = ()
    window_s: int = 60
    most_keys: int = 10


@dataclass(frozen=True, slots=True)
class MetricsDone:
    """How many hours a run has counted, the rows of `metrics` for them, and how many records these count."""

    hours: int = 0
    rows: int = 0
    records: int = 0


def run(spark: SparkSession, settings: MetricsSettings) -> MetricsDone:
    """Brings the tables up to date with the lake. Raises InputMissing, TableMismatch before it writes anything."""
    with clear_errors("the metrics"):
        lake = open_store(spark, settings.lake)
        to = lake if settings.to is None else open_store(spark, settings.to)
        header, hit = lake.header(), failpoints.load().hit
        if to.exists(METRICS.name) and tables.OWNER in to.properties(METRICS.name):
            raise TableMismatch(
                f"the table {to.named(METRICS.name)} was written by a stream, by an earlier version",
                hint=f"rename or drop the tables {METRICS.name} and {KEYS.name}, or write elsewhere with --to;"
                " everything that the lake has is counted again",
            )
        to.prepare([METRICS, KEYS])
        chosen = json.loads(json.dumps(asdict(settings)))
        noted = json.loads(to.properties(METRICS.name).get(tables.COUNTED, "{}"))
        seen = noted if noted.get("settings") == chosen else {}
        # Before looking for batches: whatever arrives from now on makes another version.
        versions = {name: lake.version(name) for name in _SOURCES}
        if seen.get("versions") == versions:
            return MetricsDone()
        hours, batch = _touched(lake, settings, seen.get("batch"))
        if not seen:
            hours |= _outdated(lake, to)
            if noted:  # not any more, once the first table is replaced
                to.set_property(METRICS.name, tables.COUNTED, "{}")
        again, days = windows.hour("window_start").isin(*hours), windows.days(hours)
        if hours:
            bronze = spark.sql(schemas.bronze(lake.at, header))
            rows = bronze.where(_is_chosen(settings) & windows.begins_in(hours, settings.window_s))
            counted = windows.counts(rows, settings.window_s, keys=bool(settings.most_keys)).persist()
            try:
                for table, found in (
                    (KEYS, windows.top_keys(counted, settings.most_keys)),
                    (METRICS, windows.windows(counted)),
                ):
                    hit(f"metrics.{table.name}")
                    kept = to.table(table.name).where(F.col("day").isin(*days) & ~again)
                    replaced = found.unionByName(kept, allowMissingColumns=True)
                    # A file for each day, which is all that a run leaves to compact.
                    to.replace(replaced.repartition("day"), table.name, F.col("day").isin(*days))
            finally:
                counted.unpersist()
        hit("metrics.seen")
        noting = json.dumps({"settings": chosen, "versions": versions, "batch": batch})
        to.set_property(METRICS.name, tables.COUNTED, noting)
        written = to.table(METRICS.name).where(F.col("day").isin(*days) & again)
        [total] = written.agg(F.count("*"), F.coalesce(F.sum("records"), F.lit(0))).collect()
        return MetricsDone(len(hours), *total)


def _touched(lake: TableStore, settings: MetricsSettings, since: str | None) -> tuple[set[int], str | None]:
    """The hours in which windows of records begin that are in batches from `since` on, and the last batch."""
    stored = [lake.table(name).select("topic", "timestamp", "batch") for name in _SOURCES]
    rows = reduce(DataFrame.unionByName, stored)
    if since is not None:
        rows = rows.where(F.col("batch") >= since)
    hour = F.when(_is_chosen(settings), windows.hour("timestamp", settings.window_s))
    found = rows.groupBy(hour.alias("hour")).agg(F.max("batch").alias("batch")).collect()
    last = max((row["batch"] for row in found if row["batch"] is not None), default=since)
    return {row["hour"] for row in found} - {None}, last


def _outdated(lake: TableStore, to: TableStore) -> set[int]:
    """The hours in which stored windows begin that may count records of the lake, with whichever settings."""
    stored = (to.table(one.name).select("window_start", "window_end") for one in (METRICS, KEYS))
    begins = reduce(DataFrame.unionByName, stored).groupBy(windows.hour("window_start").alias("hour"))
    found = begins.agg(F.max(F.unix_micros("window_end")).alias("end_us")).collect()
    if not found:
        return set()
    held = reduce(DataFrame.unionByName, (lake.table(name).select("timestamp") for name in _SOURCES))
    hours = {row["hour"] for row in held.select(windows.hour("timestamp").alias("hour")).distinct().collect()}
    return windows.reaching({row["hour"]: row["end_us"] for row in found}, hours - {None})


def _is_chosen(settings: MetricsSettings) -> Column:
    return F.col("topic").isin(*settings.topics) if settings.topics else F.lit(True)
