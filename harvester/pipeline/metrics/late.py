"""How many records of a batch came after their window was closed.

Spark drops them, and says only how many groups they would have fallen into. So where it says any, the batch is read
once more, between the offsets that Spark has written down for it, and what is behind the watermark is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harvester.pipeline import files, source
from harvester.pipeline.errors import CheckpointMismatch
from harvester.pipeline.metrics import windows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ends = Mapping[str, Mapping[str, int]]
_EARLIEST = -2


@dataclass(frozen=True, slots=True)
class Planned:
    """What Spark writes down before a batch begins: where it ends in each partition, and the watermark it has."""

    watermark_ms: int
    ends: Ends


def parse(text: str) -> Planned:
    """Read an entry of the checkpoint's directory `offsets`; CheckpointMismatch for anything else."""
    try:
        _, about, ends = text.splitlines()
        return Planned(int(json.loads(about)["batchWatermarkMs"]), json.loads(ends))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(f"{text[:80]!r} is no batch of Spark's") from error


def beginnings(ends: Ends, before: Ends) -> dict[str, dict[str, int]]:
    """Where a batch begins, given where it and the one before end; partitions that are new begin where they do."""
    return {
        topic: {partition: before.get(topic, {}).get(partition, _EARLIEST) for partition in partitions}
        for topic, partitions in ends.items()
    }


def count(spark: SparkSession, kafka: Mapping[str, str], checkpoint: str, batch: int, window_s: int) -> dict[str, int]:
    """Late records of a batch by topic; only topics with any. Records that Kafka has removed since are not counted."""
    texts = [files.read_text(spark, f"{checkpoint}/offsets/{number}") for number in (batch - 1, batch)]
    if texts[0] is None or texts[1] is None:
        return {}
    before, here = parse(texts[0]), parse(texts[1])
    options = {
        **source.options(kafka),
        "includeHeaders": "false",
        "assign": json.dumps({topic: sorted(map(int, partitions)) for topic, partitions in here.ends.items()}),
        "startingOffsets": json.dumps(beginnings(here.ends, before.ends)),
        "endingOffsets": json.dumps(here.ends),
        "failOnDataLoss": "false",
    }
    rows = spark.read.format("kafka").options(**options).load()
    # What a batch drops is judged by the watermark of the one before, what it closes by its own.
    found = windows.late(rows, window_s, before.watermark_ms).collect()
    return {row["topic"]: row["records"] for row in found}
