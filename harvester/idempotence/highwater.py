"""The high-water mark: which numbers of a producer a log already has, told by one number (pure).

A producer numbers what it sends 1, 2, 3, … without holes. Because the log takes a number only if it is the one after
the last, "everything up to n is there, nothing above it" is all that has to be kept of a producer:

    brought                               becomes     the mark
    any number, of an expired lease       EXPIRED     stays
    any number, of an older generation    FENCED      stays
    any number, two generations ahead     UNKNOWN     stays
    mark + 1                              ACCEPTED    mark + 1, generation as brought
    mark or less                          REPEATED    stays, generation as brought
    mark + 2 or more                      GAP         stays

The rows stand in the order in which they are asked. A generation one ahead of the stored one is a successor's: it is
stored with the first number that is not a gap, and fences whoever brings the old one from then on. A gap leaves even
that alone, and since the mark stays, all higher numbers that were sent behind it are gaps as well: what was pipelined
fails as a whole from its first failure on, and can be sent again in order.

A batch is a run of numbers. It may begin below the mark (batches may be cut otherwise when they are sent again): what
lies below is a repeat, the rest is accepted.
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
    """All that a log keeps of a producer: its generation, and the last of the numbers 1 … sequence."""

    generation: int = FIRST_GENERATION
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class HighWaterStep:
    """The verdict, the mark afterwards, and how many numbers at the beginning of the run the log already had.

    `repeats` means something for ACCEPTED and REPEATED only; for the others nothing of the run was looked at.
    """

    verdict: RunVerdict
    mark: HighWaterMark
    repeats: int = 0


def judge(
    mark: HighWaterMark | None, generation: int, first: int, last: int, *, expired: bool = False
) -> HighWaterStep:
    """Bring the numbers first … last, at least one. `mark` is None when the log knows nothing of the producer."""
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
    """What a lease of a producer's name gives: its next generation, expired or not, or a producer that begins."""
    if mark is None:
        return HighWaterMark()
    return HighWaterMark(mark.generation + 1, mark.sequence)
