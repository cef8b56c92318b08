"""Which leaders sent what: terms, lanes and producers, and how one term followed another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline.audit.schemas import MARKED, STREAM

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Stream:
    """What one producer of a lane sent under a term. Times are Kafka's."""

    incarnation: str
    term: int
    lane: int
    producer: int
    records: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Term:
    """A leadership. `silence_s`: from the last record of the term before to its first; below 0: they overlap."""

    incarnation: str
    term: int
    lanes: int
    producers: int
    records: int
    first_at: datetime
    last_at: datetime
    silence_s: float | None


def streams(marked: DataFrame) -> DataFrame:
    """MARKED → (STREAM, records, first_at, last_at): few rows, a handful for each leadership."""
    assert set(STREAM) <= set(MARKED.names)
    return marked.groupBy(*STREAM).agg(
        F.count(F.lit(1)).alias("records"),
        F.min("timestamp").alias("first_at"),
        F.max("timestamp").alias("last_at"),
    )


def terms(streams: Iterable[Stream]) -> tuple[Term, ...]:
    """In the order of the incarnations' first records, then of the terms."""
    grouped: dict[tuple[str, int], list[Stream]] = {}
    began: dict[str, datetime] = {}
    for one in streams:
        grouped.setdefault((one.incarnation, one.term), []).append(one)
        began[one.incarnation] = min(one.first_at, began.get(one.incarnation, one.first_at))
    found: list[Term] = []
    for (incarnation, term), members in sorted(grouped.items(), key=lambda item: (began[item[0][0]], item[0])):
        first_at = min(one.first_at for one in members)
        before = found[-1] if found and found[-1].incarnation == incarnation else None
        silence_s = None if before is None else (first_at - before.last_at).total_seconds()
        lanes, records = len({one.lane for one in members}), sum(one.records for one in members)
        last_at = max(one.last_at for one in members)
        found.append(Term(incarnation, term, lanes, len(members), records, first_at, last_at, silence_s))
    return tuple(found)
