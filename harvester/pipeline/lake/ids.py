"""Which ids of a batch the lake already has, decided from sets of ids alone.

A batch is described by *words*: for each incarnation and each stretch of 64 ids, one bit for an id that occurs, another
for one that occurs an odd number of times, and how many records there are. What silver holds is a `SeenIds`, the set
that an inbox keeps of what it has processed: where ids are dense that is one interval, however many there are. It is
exact, so a repeat from years ago is found like one beside its record, and nothing is assumed about who sent it. Two
deliveries of a record may bear the same number of the same producer: a retry keeps its own.

The set is bounded. What it drops lies at or below a *floor*, of which the table has to be asked. Where nothing is
remembered, such as of tables that an earlier version filled, the floor is the highest id that they have.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from harvester.errors import CorruptSeenIds
from harvester.idempotence.seen import SeenIds

_BITS = 64
_ALL = 2**64 - 1
MOST_INTERVALS = 100_000
"""Of all incarnations together: a few megabytes in memory, and in the file that is written with each batch."""


@dataclass(frozen=True, slots=True)
class Word:
    """The ids from 64 × `at` on, of records of a batch: bit i is the id 64 × `at` + i. `records` have one of them."""

    at: int
    ids: int
    odd: int
    records: int

    @property
    def repeated(self) -> int:
        """A superset of the ids that occur more than once, and exact unless one does three times."""
        twice = self.ids & ~self.odd
        return twice if self.records == self.ids.bit_count() + twice.bit_count() else self.ids

    def __add__(self, other: Word) -> Word:
        return Word(self.at, self.ids | other.ids, self.odd ^ other.odd, self.records + other.records)


@dataclass(frozen=True, slots=True)
class Suspects:
    """Ids of a word of which not every record is new.

    `known`: silver has them. `asked`: it may, so the table has to be asked. The others are several times in the batch.
    """

    incarnation: UUID
    at: int
    ids: int
    known: int
    asked: int


@dataclass(slots=True)
class StoredIds:
    """The ids that silver has: `seen` above the floor of their incarnation, and any at or below it."""

    seen: SeenIds = field(default_factory=SeenIds)
    floors: dict[UUID, int] = field(default_factory=dict)

    def matching(self, incarnation: UUID, word: Word) -> tuple[int, int]:
        """Of the ids of a word those that are stored, and those of which the table has to be asked."""
        first, last = word.at * _BITS, word.at * _BITS + _BITS - 1
        known = asked = 0
        for low, high in self.seen.overlapping(incarnation, first, last):
            known |= _bits(max(low, first) - first, min(high, last) - first)
        if (floor := self.floors.get(incarnation)) is not None and floor >= first:
            asked = _bits(0, min(floor, last) - first)
        return known & word.ids, asked & ~known & word.ids

    def highest(self, incarnation: UUID) -> int | None:
        """Above this id all is new; None where everything is."""
        ends = (self.seen.highest(incarnation), self.floors.get(incarnation))
        return max((end for end in ends if end is not None), default=None)

    def add(self, batch: BatchIds, most: int = MOST_INTERVALS) -> None:
        """Add a batch. Beyond so many intervals the lowest are dropped, half of all at once, below a higher floor."""
        for incarnation, words in batch.words.items():
            for first, last in _runs(words):
                self.seen.add_range(incarnation, first, last)
        if len(self.seen) <= most:
            return
        before = {one: list(self.seen.intervals(one)) for one in self.seen.incarnations}
        self.seen.shed(most // 2)
        for incarnation, intervals in before.items():
            left = set(self.seen.intervals(incarnation))
            if dropped := [last for first, last in intervals if (first, last) not in left]:
                self.floors[incarnation] = max(dropped[-1], self.floors.get(incarnation, dropped[-1]))

    def to_text(self) -> str:
        """The stored form."""
        floors = {str(incarnation): floor for incarnation, floor in sorted(self.floors.items())}
        return json.dumps({"version": 1, "floors": floors, "seen": base64.b64encode(self.seen.to_bytes()).decode()})

    @classmethod
    def from_text(cls, text: str) -> StoredIds:
        """Read `to_text`; CorruptSeenIds for anything else."""
        try:
            stored = json.loads(text)
            if stored["version"] != 1:
                raise CorruptSeenIds(f"they have version {stored['version']}, this harvester knows 1")
            floors = {UUID(incarnation): int(floor) for incarnation, floor in stored["floors"].items()}
            return cls(SeenIds.from_bytes(base64.b64decode(stored["seen"], validate=True)), floors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSeenIds(f"they cannot be read: {error}") from error


@dataclass(slots=True)
class BatchIds:
    """The words of a batch by incarnation, each stretch once."""

    words: dict[UUID, dict[int, Word]] = field(default_factory=dict)

    def add(self, incarnation: UUID, words: Iterable[Word]) -> None:
        """More of them, such as those of another topic."""
        ours = self.words.setdefault(incarnation, {})
        for word in words:
            found = ours.get(word.at)
            ours[word.at] = word if found is None else found + word

    def suspects(self, stored: StoredIds) -> list[Suspects]:
        """What may not be new, given what silver holds without this batch; of all others each record is."""
        found = []
        for incarnation, words in self.words.items():
            highest = stored.highest(incarnation)
            for at, word in words.items():
                repeated, known, asked = word.repeated, 0, 0
                if highest is not None and at * _BITS <= highest:
                    known, asked = stored.matching(incarnation, word)
                if repeated | known | asked:
                    found.append(Suspects(incarnation, at, repeated | known | asked, known, asked))
        return found


def _bits(first: int, last: int) -> int:
    return (2 << last) - (1 << first)


def _runs(words: Mapping[int, Word]) -> Iterator[tuple[int, int]]:
    """The ids as intervals, ascending; neighbours of full words are one."""
    run: tuple[int, int] | None = None
    for at in sorted(words):
        for first, last in _pieces(words[at].ids):
            low, high = at * _BITS + first, at * _BITS + last
            if run is not None and run[1] + 1 == low:
                run = run[0], high
                continue
            if run is not None:
                yield run
            run = low, high
    if run is not None:
        yield run


def _pieces(bits: int) -> Iterator[tuple[int, int]]:
    if bits == _ALL:
        yield 0, _BITS - 1
        return
    at = 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        length = (~bits & (bits + 1)).bit_length() - 1
        yield at + skipped, at + skipped + length - 1
        bits >>= length
        at += skipped + length
