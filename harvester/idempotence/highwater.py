"""The high-water mark: a single number for which of a producer's numbers a log already has (pure).

A producer numbers what it sends 1, 2, 3, … without holes. Because the log accepts a number only if it follows the last
one, "everything up to n is there, nothing above it" is all the state that a producer needs:

    brought                               becomes     the mark
    any number, of an expired lease       EXPIRED     stays
    any number, of an older generation    FENCED      stays
    any number, two generations ahead     UNKNOWN     stays
    mark + 1                              ACCEPTED    mark + 1, generation as brought
    mark or less                          REPEATED    stays, generation as brought
    mark + 2 or more                      GAP         stays

The rows are checked in order. A generation one ahead of the stored one is a successor's: it is stored with the first
number that is not a gap, and from then on fences the holder of the old one. A gap leaves even that unchanged, and since
the mark stays, all higher numbers sent behind it are gaps as well: pipelined records all fail from the first failure
on, and can be sent again in order.

A batch is a run of numbers. It may begin below the mark (resent batches may be divided differently): what is below is a
repeat, the rest is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIRST_GENERATION = 1


class RunVerdict(Enum):
    """The verdict on a run of numbers."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    GAP = "gap"
    FENCED = "fenced"
    UNKNOWN = "unknown"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class HighWaterMark:
    """All that a log stores of a producer: its generation, and the last of the numbers 1 … sequence."""

    generation: int = FIRST_GENERATION
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class HighWaterStep:
    """The verdict, the resulting mark, and how many numbers at the beginning of the run the log already had.

    `repeats` is meaningful only for ACCEPTED and REPEATED; otherwise nothing of the run was considered.
    """

    verdict: RunVerdict
    mark: HighWaterMark
    repeats: int = 0


def judge(
    mark: HighWaterMark | None, generation: int, first: int, last: int, *, expired: bool = False
) -> HighWaterStep:
    """Judge the numbers first … last, at least one. `mark` is None if the log does not know the producer."""
    if not 1 <= first <= last:
        raise ValueError(f"{first} to {last} is not a run of numbers")
    if mark is None or expired:
        return HighWaterStep(RunVerdict.EXPIRED, mark or HighWaterMark(generation, 0))
    if generation < mark.generation:
        return HighWaterStep(RunVerdict.FENCED, mark)
    if generation > mark.generation + 1:
        return HighWaterStep(RunVerdict.UNKNOWN, mark)
    if first > mark.sequence + 1:
        return HighWaterStep(RunVerdict.GAP, mark)
    if last <= mark.sequence:
        return HighWaterStep(RunVerdict.REPEATED, HighWaterMark(generation, mark.sequence), last - first + 1)
    return HighWaterStep(RunVerdict.ACCEPTED, HighWaterMark(generation, last), mark.sequence + 1 - first)


def lease(mark: HighWaterMark | None) -> HighWaterMark:
    """The mark for a lease of a producer's name: its next generation, expired or not, or a new producer."""
    if mark is None:
        return HighWaterMark()
    return HighWaterMark(mark.generation + 1, mark.sequence)
