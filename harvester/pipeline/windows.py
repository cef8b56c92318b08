"""Counts records by window, and derives the tables `metrics` and `metrics_keys`; `throughput` aggregates hours.

All figures of a window follow from its counts by lane, key and latency, for which each record is read once. Latencies
are counted in the buckets of `harvester.telemetry.latency`, so that windows can be combined without further loss of
precision, which percentiles could not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from datetime import date

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import ArrayType, StructField

from harvester.pipeline.schemas import FIRST_US, LAST_US, Table, struct
from harvester.telemetry.latency import GROWTH, HIGHEST_MS, LOWEST_MS

PERCENTILES = (50, 90, 99)

_WINDOW = "window_start timestamp, window_end timestamp, topic string"
_PERCENTILES = ", ".join(f"p{p}_ms double" for p in PERCENTILES)
COUNTS = struct(_WINDOW, "lane bigint, key binary, bucket int, records bigint, bytes bigint, max_us bigint")
LANES = ArrayType(struct("lane bigint, records bigint"))
HISTOGRAM = ArrayType(struct("bucket int, records bigint"))
METRICS = Table(
    "metrics",
    struct(
        "day date", _WINDOW, "records bigint, bytes bigint, with_origin bigint",
        StructField("lanes", LANES), StructField("latency", HISTOGRAM), _PERCENTILES,
        "max_ms double, keys bigint, hottest_key binary, hottest_share double",
    ),
    ("day",),
)  # fmt: skip
KEYS = Table(
    "metrics_keys", struct("day date", _WINDOW, "rank int, key binary, records bigint, share double"), ("day",)
)

_PLACE = ("window_start", "window_end", "topic")
_LOWEST_US, _HIGHEST_US = LOWEST_MS * 1000, HIGHEST_MS * 1000
_PER_LOG = 1 / math.log(GROWTH)
_EPOCH, _HOUR_US, _MOST_SPANS = date(1970, 1, 1).toordinal(), 3_600_000_000, 100
_LAST = int(math.log(HIGHEST_MS / LOWEST_MS) * _PER_LOG)


def hour(time: str, window_s: int = 1) -> Column:
    """The hour since the epoch in which the window of a time begins; NULL outside the years 1 to 9999.

    A window begins at a multiple of its length since the epoch, so it may reach into later hours and days.
    """
    begin = f"(unix_micros({time}) - pmod(unix_micros({time}), {window_s * 1_000_000}L))"
    whole = f"({begin} - pmod({begin}, {_HOUR_US}L)) DIV {_HOUR_US}L"
    return F.expr(f"CASE WHEN {begin} BETWEEN {FIRST_US} AND {LAST_US} THEN {whole} END")


def days(hours: Iterable[int]) -> list[date]:
    """The days of these hours, by which both tables are partitioned."""
    return sorted({date.fromordinal(_EPOCH + one // 24) for one in hours})


def begins_in(hours: Collection[int], window_s: int) -> Column:
    """Whether a record's window begins in one of these hours. Also bounds the timestamp, by which files are skipped."""
    firsts = sorted(one for one in hours if one - 1 not in hours)
    ends = sorted(one + 1 for one in hours if one + 1 not in hours)
    if len(firsts) > _MOST_SPANS:
        firsts, ends = firsts[:1], ends[-1:]
    spans = " OR ".join(
        f"timestamp >= timestamp_micros({first * _HOUR_US}L)"
        f" AND timestamp < timestamp_micros({end * _HOUR_US + window_s * 1_000_000}L)"
        for first, end in zip(firsts, ends, strict=True)
    )
    return F.expr(spans or "false") & hour("timestamp", window_s).isin(*hours)


def reaching(ends_us: Mapping[int, int], hours: Collection[int]) -> set[int]:
    """Of hours in which windows begin, those whose windows reach into one of `hours`.

    `ends_us`: for each of them, when the last of its windows ends, in µs since the epoch.
    """
    ordered = sorted(hours)

    def reaches(begin: int, end_us: int) -> bool:
        at = bisect_left(ordered, begin)
        return at < len(ordered) and ordered[at] * _HOUR_US < end_us

    return {begin for begin, end_us in ends_us.items() if reaches(begin, end_us)}


def counts(bronze: DataFrame, window_s: int, *, keys: bool = True) -> DataFrame:
    """schemas.BRONZE → COUNTS. `bytes`: of keys and values. A record without an origin has neither lane nor latency.

    `keys` False: keys are not distinguished, so that the counts do not grow with their number.
    """
    # try_: the header may contain any time, and in ANSI mode an overflow would fail the query.
    latency_us = F.try_subtract(F.unix_micros("timestamp"), F.col("created_us"))
    rows = bronze.withColumns({"_latency_us": latency_us, "_bucket": bucket(latency_us)})
    window = F.window("timestamp", f"{window_s} seconds").alias("window")
    by: list[Column | str] = [window, "topic", "lane", "_bucket", *(["key"] if keys else [])]
    size = F.coalesce(F.length("key"), F.lit(0)) + F.coalesce(F.length("value"), F.lit(0))
    counted = rows.groupBy(*by).agg(
        F.count("*").alias("records"), F.sum(size).alias("bytes"), F.max("_latency_us").alias("max_us")
    )
    named = {
        "window_start": F.col("window.start"),
        "window_end": F.col("window.end"),
        "bucket": F.col("_bucket"),
        **({} if keys else {"key": F.lit(None).cast("binary")}),
    }
    return counted.withColumns(named).select(*COUNTS.names)


def windows(counted: DataFrame) -> DataFrame:
    """COUNTS → METRICS: a row for each window and topic. `keys` and `hottest_…` are NULL if no keys were counted.

    Among keys with equally many records the highest is the hottest. `max_ms` is exact, percentiles as exact as buckets.
    """
    # Sums by lane, by bucket and by key in one pass; `_no_…` tells which, and the other two columns are NULL.
    by = {name: [*_PLACE, name] for name in ("lane", "bucket", "key")}
    sums = counted.groupingSets(list(by.values()), *_PLACE, *by).agg(
        F.sum("records").alias("records"),
        F.sum("bytes").alias("bytes"),
        F.max("max_us").alias("max_us"),
        *(F.grouping(name).alias(f"_no_{name}") for name in by),
    )

    def of(name: str, value: Column, *, known: bool = False) -> Column:
        here = F.col(f"_no_{name}") == 0
        return F.when(here & F.col(name).isNotNull() if known else here, value)

    def each(name: str) -> Column:
        return F.sort_array(F.collect_list(of(name, F.struct(name, "records"), known=True)))

    key = of("key", F.struct("records", "key"), known=True)
    found = sums.groupBy(*_PLACE).agg(
        F.sum(of("lane", F.col("records"))).alias("records"),
        F.sum(of("lane", F.col("bytes"))).alias("bytes"),
        F.coalesce(F.sum(of("lane", F.col("records"), known=True)), F.lit(0)).alias("with_origin"),
        each("lane").alias("lanes"),
        each("bucket").alias("latency"),
        (F.max("max_us") / 1000).alias("max_ms"),
        F.nullif(F.count(key), F.lit(0)).alias("keys"),
        F.max(key).alias("_hottest"),
    )
    return found.withColumns(
        {
            "day": F.to_date("window_start"),
            "hottest_key": F.col("_hottest.key"),
            "hottest_share": F.col("_hottest.records") / F.col("records"),
            **{f"p{p}_ms": percentile(F.col("latency"), p) for p in PERCENTILES},
        }
    ).select(*METRICS.schema.names)


def top_keys(counted: DataFrame, most: int) -> DataFrame:
    """COUNTS → KEYS: the `most` most frequent keys of each window and topic, with their shares of all its records."""
    window = Window.partitionBy(*_PLACE)
    sums = counted.groupBy(*_PLACE, "key").agg(F.sum("records").alias("records"))
    ranked = sums.withColumns(
        {
            "share": F.col("records") / F.sum("records").over(window),
            # Records without a key are sorted last, and omitted below.
            "rank": F.row_number().over(window.orderBy(F.isnull("key"), F.desc("records"), F.desc("key"))),
        }
    )
    rows = ranked.where(F.col("key").isNotNull() & (F.col("rank") <= most))
    return rows.withColumn("day", F.to_date("window_start")).select(*KEYS.schema.names)


def bucket(latency_us: Column) -> Column:
    """The bucket in which `harvester.telemetry.latency.Histogram` counts a latency; NULL for NULL."""
    inside = F.floor(F.log(latency_us / _LOWEST_US) * _PER_LOG).cast("int")
    return (
        F.when(latency_us <= _LOWEST_US, 0).when(latency_us >= _HIGHEST_US, _LAST).when(latency_us.isNotNull(), inside)
    )


def percentile(found: Column, p: int) -> Column:
    """The `p`-th percentile in ms of a HISTOGRAM, by nearest rank; NULL if it is empty."""
    total = F.aggregate(found, F.lit(0).cast("bigint"), lambda seen, one: seen + one["records"])
    rank = F.greatest(F.ceil(total * p / 100), F.lit(1).cast("bigint"))
    begin = F.struct(F.lit(0).cast("bigint").alias("seen"), F.lit(None).cast("int").alias("bucket"))

    def up_to(at: Column, one: Column) -> Column:
        further = F.struct((at["seen"] + one["records"]).alias("seen"), one["bucket"].alias("bucket"))
        return F.when(at["seen"] >= rank, at).otherwise(further)

    reached = F.aggregate(found, begin, up_to, lambda at: at["bucket"])
    return F.pow(F.lit(GROWTH), reached) * (LOWEST_MS * 2 * GROWTH / (GROWTH + 1))


THROUGHPUT = struct(
    "hour timestamp, topic string, records bigint, bytes bigint, with_origin bigint, peak_per_s double", _PERCENTILES,
    "max_ms double, hottest_share double",
)  # fmt: skip


def throughput(metrics: DataFrame) -> DataFrame:
    """METRICS → THROUGHPUT: a row for each hour (in the session's time zone) and topic with records.

    A window belongs to the hour in which it begins. Percentiles are computed from the windows' histograms, not from
    their percentiles. `peak_per_s` and `hottest_share` are the highest of any window.
    """
    rows = metrics.withColumn("hour", F.date_trunc("hour", "window_start"))
    length_s = F.unix_seconds("window_end") - F.unix_seconds("window_start")
    sums = rows.groupBy("hour", "topic").agg(
        *(F.sum(name).alias(name) for name in ("records", "bytes", "with_origin")),
        F.max(F.col("records") / length_s).alias("peak_per_s"),
        *(F.max(name).alias(name) for name in ("max_ms", "hottest_share")),
    )
    counted = rows.select("hour", "topic", F.explode("latency").alias("one")).select("hour", "topic", "one.*")
    added = counted.groupBy("hour", "topic", "bucket").agg(F.sum("records").alias("records"))
    histograms = added.groupBy("hour", "topic").agg(
        F.sort_array(F.collect_list(F.struct("bucket", "records"))).alias("latency")
    )
    joined = sums.join(histograms, ["hour", "topic"], "left")
    found = joined.withColumns({f"p{p}_ms": percentile(F.col("latency"), p) for p in PERCENTILES})
    return found.select(*THROUGHPUT.names)
