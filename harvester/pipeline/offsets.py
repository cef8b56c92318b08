"""Which records a batch has: the ranges of offsets that Spark writes down in the checkpoint before the batch begins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.errors import CheckpointMismatch

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True, slots=True)
class Range:
    """From `first` on, or from the beginning, to before `end`."""

    topic: str
    partition: int
    first: int | None
    end: int


def file_of(checkpoint: str, batch: int) -> str:
    """Where the ends of a batch stand; it begins where those of the one before are."""
    return f"{checkpoint}/offsets/{batch}"


def ranges(before: str | None, now: str, where: str) -> list[Range]:
    """What lies between two of these files; `before` is None for the first batch. CheckpointMismatch names `where`."""
    begun = {} if before is None else _ends(before, where)
    return [
        Range(topic, partition, begun.get((topic, partition)), end)
        for (topic, partition), end in sorted(_ends(now, where).items())
        if end > begun.get((topic, partition), 0)
    ]


def most_records(found: Iterable[Range]) -> int:
    """There cannot be more in these ranges; fewer, where offsets are without a record."""
    return sum(each.end - (each.first or 0) for each in found)


def within(found: Sequence[Range]) -> Column:
    """Whether a row of schemas.BRONZE is of one of these ranges."""
    return _any([_one(each) for each in found]) if found else F.lit(False)


def inside(ranges: Iterable[Range], topic: str, partition: int, lowest: int, highest: int) -> bool:
    """Whether all between these offsets, both included, is in one of the ranges."""
    return any(
        (each.topic, each.partition) == (topic, partition) and (each.first or 0) <= lowest and highest < each.end
        for each in ranges
    )


def _one(found: Range) -> Column:
    here = (F.col("topic") == found.topic) & (F.col("partition") == found.partition) & (F.col("offset") < found.end)
    return here if found.first is None else here & (F.col("offset") >= found.first)


def _any(conditions: Sequence[Column]) -> Column:
    # As a tree: a chain of a thousand partitions would be too deep for Spark to walk.
    half = len(conditions) // 2
    return _any(conditions[:half]) | _any(conditions[half:]) if half else conditions[0]


def _ends(text: str, where: str) -> dict[tuple[str, int], int]:
    # A line with the format's version, one about the batch, and one for each source of the stream (OffsetSeqLog).
    try:
        version, _, ends = text.strip().splitlines()
        if version != "v1":
            raise ValueError(version)
        return {(topic, int(one)): int(end) for topic, parts in json.loads(ends).items() for one, end in _items(parts)}
    except (ValueError, AttributeError) as error:
        raise CheckpointMismatch(
            f"the checkpoint {where} was not written by a Spark that this harvester knows",
            hint="go on with the Spark that it was made with",
        ) from error


def _items(parts: dict[str, int]) -> Iterable[tuple[str, int]]:
    return parts.items()
