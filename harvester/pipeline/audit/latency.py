"""How long records took, and how many came: by topic and hour of Kafka's timestamp (UTC)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.schemas import MARKED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUANTILES = (0.5, 0.9, 0.99)
_ACCURACY = 1_000


def by_hour(marked: DataFrame) -> DataFrame:
    """MARKED → (topic, hour, records, quantiles_ms, max_ms), with a row for each topic and one for all of them.

    Of these hour, or topic as well, is NULL. `records` counts all deliveries; the times are those of first ones, from
    the creation of the row to Kafka's timestamp, which has whole milliseconds. Quantiles are off by 0.1 % of the
    records at most.
    """
    assert {"created_us", "first"} <= set(MARKED.names)
    # try_: a header may name any time.
    took_ms = F.try_subtract(F.unix_micros("timestamp"), F.col("created_us")) / F.lit(1000.0)
    rows = marked.where("inside").select(
        "topic", F.date_trunc("hour", "timestamp").alias("hour"), F.when(F.col("first"), took_ms).alias("took_ms")
    )
    return (
        rows.rollup("topic", "hour")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.percentile_approx("took_ms", list(QUANTILES), _ACCURACY).alias("quantiles_ms"),
            F.max("took_ms").alias("max_ms"),
        )
        .select("topic", "hour", "records", "quantiles_ms", "max_ms")
    )
