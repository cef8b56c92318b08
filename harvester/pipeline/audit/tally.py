"""The counts of an audit, gathered by one query: pairs of a name and a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.schemas import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DELIVERIES, IDS = "deliveries", "ids"
ARCHIVED, DELIVERED, BEYOND = "archived", "delivered", "beyond"
PENDING = "pending"
_MOST = 2**63 - 1
NAMES = (DELIVERIES, IDS, ARCHIVED, DELIVERED, BEYOND, PENDING)


def of_holes(gaps: DataFrame) -> DataFrame:
    """`gaps` → (name, value): numbers of the range that are missing, by the kind of hole."""
    # try_: a header may bear any number.
    numbers = F.coalesce(F.try_sum(F.col("last") - F.col("first") + 1), F.lit(_MOST))
    return gaps.where("at.inside").groupBy(F.col("hole").alias("name")).agg(numbers.alias("value"))


def of_archive(found: DataFrame) -> DataFrame:
    """`audit_delivery.found` → (name, value): ids of the range, those that cannot be judged, those delivered."""
    beyond = ~F.col("judged") & ~F.col("delivered")
    return _named(
        found.agg(
            F.count(F.lit(1)).alias(ARCHIVED),
            F.count_if(beyond).alias(BEYOND),
            F.count_if(F.col("delivered")).alias(DELIVERED),
        ),
        (ARCHIVED, BEYOND, DELIVERED),
    )


def of_outbox(history: DataFrame, marked: DataFrame) -> DataFrame:
    """HISTORY and MARKED → (name, value): rows of the outbox that have not been delivered."""
    waiting = history.where(F.col("source") == Source.OUTBOX)
    waiting = waiting.join(marked.select("incarnation", "id"), ["incarnation", "id"], "left_anti")
    return _named(waiting.agg(F.count(F.lit(1)).alias(PENDING)), (PENDING,))


def of_records(marked: DataFrame) -> DataFrame:
    """MARKED → (name, value): deliveries of the range, and ids."""
    inside = marked.where("inside")
    return _named(
        inside.agg(F.count(F.lit(1)).alias(DELIVERIES), F.count_if(F.col("first")).alias(IDS)), (DELIVERIES, IDS)
    )


def _named(counts: DataFrame, names: tuple[str, ...]) -> DataFrame:
    pairs: list[Column] = [F.struct(F.lit(name).alias("name"), F.col(name).alias("value")) for name in names]
    return counts.select(F.inline(F.array(*pairs)))
