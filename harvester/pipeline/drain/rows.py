"""The outbox's rows as Spark's Kafka sink takes them, with the header that says where each comes from. Pure.

Lane is the number of the task, and sequences count the rows of a task in their order, so that a task that runs again
gives each row the same number. Everything that differs from slice to slice is text or binary: Spark builds such
constants not into the code that it generates, which so is compiled once, and stays warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from harvester import origin
from harvester.pipeline.schemas import HEADERS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SINK = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
    ]
)
LATE = "the lease of this slice does not last long enough for another record"

_LANE_AT, _LANE_BYTES = 26, 4  # in the header
_ROW_BITS = 33  # of monotonically_increasing_id, the number of the row; the others are that of the task


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose records these are. `header`: its name. `producer`: a number that is another one for each slice."""

    header: str
    incarnation: UUID
    term: int
    producer: int


def sink_rows(rows: DataFrame, stamp: Stamp, headers: tuple[int, int], deadline_ms: int) -> DataFrame:
    """Columns id, key, value, topic, partition, created_us and name_n, value_n of each header → SINK, row for row.

    `headers`: the fewest and the most that a row has. Rows stay in their order and partition. After the deadline, by
    the clock of the machine that evaluates it, a row fails its task. Raises AnalysisException under ANSI rules, which
    forbid to read a number as its bytes.
    """
    fewest, most = headers
    pairs = [_header(F.col(f"name_{number}"), F.col(f"value_{number}")) for number in range(1, most + 1)]
    # Those that not every row has are told by their name, which is never NULL where there is one.
    pairs[fewest:] = [
        F.when(F.col(f"name_{number}").isNotNull(), pair) for number, pair in enumerate(pairs[fewest:], fewest + 1)
    ]
    listed = F.array(*pairs, _header(F.lit(stamp.header), _origin(stamp)))
    return rows.select(
        _in_time(F.col("topic"), deadline_ms).alias("topic"),
        "partition",
        "key",
        "value",
        (listed if fewest == most else F.array_compact(listed)).cast(HEADERS).alias("headers"),
    ).to(SINK)


def _header(name: Column, value: Column) -> Column:
    return F.struct(name.alias("key"), value.alias("value"))


def _origin(stamp: Stamp) -> Column:
    """The value that `harvester.origin.encode` gives."""
    head = origin.head(stamp.incarnation, stamp.term, 0, stamp.producer)
    sequence = F.monotonically_increasing_id().bitwiseAND(F.lit((1 << _ROW_BITS) - 1)) + F.lit(1).cast("bigint")
    return F.concat(
        F.lit(head[:_LANE_AT]),
        F.spark_partition_id().cast("binary"),
        F.lit(head[_LANE_AT + _LANE_BYTES :]),
        F.col("id").cast("binary"),
        sequence.cast("binary"),
        F.col("created_us").cast("binary"),
    )


def _in_time(value: Column, deadline_ms: int) -> Column:
    # Not current_timestamp, which is the query's; times of 13 digits are in their order as texts, too.
    now = F.java_method(F.lit("java.lang.System"), F.lit("currentTimeMillis"))
    return F.when(now < F.lit(f"{deadline_ms:013d}"), value).otherwise(F.raise_error(F.lit(LATE)))
