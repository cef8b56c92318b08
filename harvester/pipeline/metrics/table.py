"""The table `metrics` for those who read it: windows joined to hours. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType

from harvester.pipeline.metrics.windows import PERCENTILES, histogram, percentile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

THROUGHPUT = StructType(
    [
        StructField("hour", TimestampType()),
        StructField("topic", StringType()),
        *(StructField(name, LongType()) for name in ("records", "bytes", "with_origin")),
        StructField("peak_per_s", DoubleType()),
        *(StructField(f"p{p}_ms", DoubleType()) for p in PERCENTILES),
        StructField("max_ms", DoubleType()),
        StructField("hottest_share", DoubleType()),
    ]
)


def throughput(metrics: DataFrame) -> DataFrame:
    """metrics_windows.METRICS → THROUGHPUT: a row for each hour (UTC, if the session is) and topic with records.

    A window belongs to the hour it begins in. Percentiles are of the hour's own records, out of the windows' histograms
    and not of their percentiles. `peak_per_s` and `hottest_share` are those of the window that has the highest.
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
    histograms = added.groupBy("hour", "topic").agg(histogram().alias("latency"))
    joined = sums.join(histograms, ["hour", "topic"], "left")
    found = joined.withColumns({f"p{p}_ms": percentile(F.col("latency"), p) for p in PERCENTILES})
    return found.select(*THROUGHPUT.names)
