"""Leases, their high-water marks, and the numbers that a stasher gives out under one (pure; docs/adr/0013-leases.md).

*The high-water mark* is a single number for which of a producer's numbers a log already has.
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from harvester.errors import LeaseError, LeaseExpired, LeaseFenced, LeaseUnknown, OutboxError, SequenceGap

FIRST_GENERATION = 1
DEFAULT_LEASE_TIME = timedelta(days=7)
MAX_NAME_CHARACTERS = 255
_MAX_BIGINT = 2**63 - 1
_ANEW = "lease the name again and continue after the position and sequence of the new lease"
_LOST = "lease the name again; if the new lease has no position, continue after the last one noted elsewhere"


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


@dataclass(frozen=True, slots=True)
class Lease:
    """A producer id with a generation, and the last number used.

    `id`, `generation` and `sequence` are enough to continue, wherever they were saved. The other fields are set if the
    lease comes from the database: `expires_at`, by its clock, before use renews it, and the last saved upstream
    `position`.
    """

    id: int
    generation: int
    sequence: int
    name: str | None = None
    position: str | None = None
    expires_at: datetime | None = None

    @property
    def resumed(self) -> bool:
        """Whether the name was leased before; if not, this producer is new and has no position."""
        return self.generation > FIRST_GENERATION

    def raised(self) -> Lease:
        """For the one successor of a stasher that saved this: its first record fences whoever continues with `self`."""
        return replace(self, generation=self.generation + 1)

    def __str__(self) -> str:
        return f"lease {self.id}{f' of {self.name!r}' if self.name is not None else ''} (generation {self.generation})"


class Stashed(NamedTuple):
    """The row's id, None for a repeat, which wrote no row; and the record's number under its lease."""

    id: int | None
    sequence: int

    @property
    def repeated(self) -> bool:
        """Whether the record was already in the outbox; it may be published and purged by now."""
        return self.id is None


class Run(NamedTuple):
    """The numbers of the records in one statement."""

    first: int
    last: int


class Course:
    """The numbers that one stasher gives out, and the meaning of the database's answers.

    A number is used up when it is given out, whatever happens, until `seek` goes back. So when one record fails, all
    records sent behind it are above the database's mark, and none of them is accepted.
    """

    def __init__(self, lease: Lease) -> None:
        if not (lease.id >= 1 and lease.generation >= FIRST_GENERATION and 0 <= lease.sequence < _MAX_BIGINT):
            raise LeaseError(f"{lease} at sequence {lease.sequence} could not have come from a database", lease=lease)
        self.start = lease
        self.sequence = lease.sequence  # the last number given
        self.at: str | None = None  # where the lease's row was last seen (its ctid)
        self._accepted = False

    @property
    def lease(self) -> Lease:
        """The lease with the last number given."""
        return replace(self.start, sequence=self.sequence)

    def give(self, count: int) -> Run:
        run = Run(self.sequence + 1, self.sequence + count)
        self.sequence = run.last
        return run

    def seek(self, sequence: int) -> None:
        """Make the number after this one the next."""
        if sequence < 0:
            raise LeaseError(f"{self.start}: there is no sequence {sequence}", lease=self.lease)
        self.sequence = sequence
        self._accepted = False

    def hoped(self, run: Run, row: tuple[Any, ...]) -> list[Stashed]:
        """Process the answer to a hopeful step: the whole run is new."""
        self.at = row[0]
        return self._stashed(run, 0, row[1])

    def decided(self, run: Run, row: tuple[Any, ...] | None) -> list[Stashed]:
        """Process the result of a deciding step, None if there is no such lease; raises unless it is a success."""
        if row is None:
            self.at = None
            self._refuse(RunVerdict.EXPIRED, run, None)
        self.at, ids, previous, generation, expired = row
        mark = HighWaterMark(generation, previous)
        step = judge(mark, self.start.generation, run.first, run.last, expired=expired)
        if step.verdict not in (RunVerdict.ACCEPTED, RunVerdict.REPEATED):
            self._refuse(step.verdict, run, mark)
        if step.repeats and self._accepted:
            # Ours was accepted, and then another's was. Our records under their numbers were not written.
            raise LeaseFenced(
                f"{self.start}: another stasher uses the same generation, and used the numbers from {run.first}"
                f" to {run.first + step.repeats - 1}; what was stashed under them here was not written",
                lease=self.lease,
                hint=f"roll the transaction back; {_ANEW}",
            )
        return self._stashed(run, step.repeats, ids)

    def _stashed(self, run: Run, repeats: int, found: int | list[int] | None) -> list[Stashed]:
        ids = [] if found is None else sorted(found) if isinstance(found, list) else [found]
        fresh = run.last - run.first + 1 - repeats
        if len(ids) != fresh:
            raise OutboxError(
                f"{len(ids)} of {fresh} rows under {self.start} were inserted",
                hint="a trigger or rule of the table suppressed the others; roll the transaction back",
            )
        self._accepted = self._accepted or fresh > 0
        known = [Stashed(None, run.first + at) for at in range(repeats)]
        return known + [Stashed(row, run.first + repeats + at) for at, row in enumerate(ids)]

    def _refuse(self, verdict: RunVerdict, run: Run, mark: HighWaterMark | None) -> NoReturn:
        lease = self.lease
        if verdict is RunVerdict.EXPIRED or mark is None:
            gone = "does not exist (removed since, or newer than this transaction's snapshot)"
            raise LeaseExpired(
                f"{lease} {'has expired' if mark is not None else gone}; record {run.first} was not written",
                lease=lease,
                hint=_ANEW if mark is not None else _LOST,
            )
        if verdict is RunVerdict.FENCED:
            raise LeaseFenced(
                f"{lease} was taken over: its generation is {mark.generation} now; record {run.first} was not written",
                lease=lease,
                hint="stop: another stasher has taken over; lease the name again only to fence that one",
            )
        if verdict is RunVerdict.UNKNOWN:
            raise LeaseUnknown(
                f"{lease}: the database has generation {mark.generation} and never gave this one out",
                lease=lease,
                hint=f"is it an older copy of the database? If this is the right one, {_ANEW}",
            )
        expected = mark.sequence + 1
        raise SequenceGap(
            f"{lease}: record {run.first} came where {expected} is next; it was not written",
            sequence=run.first,
            expected=expected,
            lease=lease,
            hint=f"records from {expected} on were rolled back, failed or lost: seek({mark.sequence}), then stash them"
            " again in order",
        )


def lease_of(row: Sequence[Any]) -> Lease:
    """Parse a row of `lease_queries.take`."""
    name, identity, generation, sequence, position, expires_at = row
    return Lease(identity, generation, sequence, name, position, expires_at)


def checked_names(names: Iterable[str]) -> list[str]:
    """Lease names, each once; raises LeaseError for an invalid one."""
    asked = list(dict.fromkeys(names))
    for name in asked:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or "\x00" in name:
            raise LeaseError(
                f"{name!r} is not a valid lease name", hint=f"a str of 1 to {MAX_NAME_CHARACTERS} characters"
            )
    return asked


def checked_position(position: str | None) -> str | None:
    """The position; raises LeaseError if it cannot be stored."""
    if position is not None and (not isinstance(position, str) or "\x00" in position):
        raise LeaseError(
            f"{position!r} is not a valid upstream position", hint="a str without NUL, such as str(offset) or JSON"
        )
    return position
