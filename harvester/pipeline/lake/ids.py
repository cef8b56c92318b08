"""Decides which ids of a batch the lake already has, from sets of ids alone. Pure.

A batch is described by *words*: for each incarnation and each stretch of 64 ids, one bit for each id that occurs,
another for each that occurs an odd number of times, and the number of records. The ids in silver are kept as `SeenIds`,
the set in which an inbox keeps what it has processed: if ids are dense, it is a single interval, however many there
are. It is exact, so a repeat from years ago is found like a recent one, and nothing is assumed about its sender.
Sequence numbers could not replace it: a retry keeps its number, so two deliveries of a record may have the same one.

The set is bounded. The ids that it drops lie at or below a *floor*; for ids up to there, the table is queried. If there
is no set, as for tables that an earlier version filled, the floor is their highest id.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from harvester.errors import CorruptSeenIds
from harvester.idempotence.seen import SeenIds

_BITS = 64
_ALL = 2**64 - 1
MOST_INTERVALS = 100_000
"""For all incarnations together: a few megabytes in memory, and in the file written with each batch."""


@dataclass(frozen=True, slots=True)
class Word:
    """The ids of a batch in one stretch of 64: bit i stands for the id 64 × `at` + i.

    `ids`: those that occur; `odd`: those that occur an odd number of times; `records`: how many records have them.
    """

    at: int
    ids: int
    odd: int
    records: int

    @property
    def repeated(self) -> int:
        """A superset of the ids that occur more than once; exact unless an id occurs more than twice."""
        twice = self.ids & ~self.odd
        return twice if self.records == self.ids.bit_count() + twice.bit_count() else self.ids

    def __add__(self, other: Word) -> Word:
        return Word(self.at, self.ids | other.ids, self.odd ^ other.odd, self.records + other.records)


@dataclass(frozen=True, slots=True)
class Suspects:
    """The ids of a word with a record that is not new, or may not be.

    `known`: silver has them. `asked`: it may have them, so the table must be queried. The others are repeated within
    the batch.
    """

    incarnation: UUID
    at: int
    ids: int
    known: int
    asked: int


@dataclass(slots=True)
class StoredIds:
    """The ids in silver: above the floor of their incarnation exactly `seen`, at or below it possibly any."""

    seen: SeenIds = field(default_factory=SeenIds)
    floors: dict[UUID, int] = field(default_factory=dict)

    def matching(self, incarnation: UUID, word: Word) -> tuple[int, int]:
        """The bits of a word's ids that are stored, and of those for which the table must be queried."""
        first, last = word.at * _BITS, word.at * _BITS + _BITS - 1
        known = asked = 0
        for low, high in self.seen.overlapping(incarnation, first, last):
            known |= _bits(max(low, first) - first, min(high, last) - first)
        if (floor := self.floors.get(incarnation)) is not None and floor >= first:
            asked = _bits(0, min(floor, last) - first)
        return known & word.ids, asked & ~known & word.ids

    def highest(self, incarnation: UUID) -> int | None:
        """The id above which every id is new; None if every id is."""
        ends = (self.seen.highest(incarnation), self.floors.get(incarnation))
        return max((end for end in ends if end is not None), default=None)

    def add(self, batch: BatchIds, most: int = MOST_INTERVALS) -> None:
        """Adds a batch. Beyond `most` intervals, drops the lowest, down to half of `most`, and raises the floors."""
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

    def to_text(self, **beside: Any) -> str:
        """The stored form. `beside`: what the same file has for others."""
        floors = {str(incarnation): floor for incarnation, floor in sorted(self.floors.items())}
        seen = base64.b64encode(self.seen.to_bytes()).decode()
        return json.dumps({"version": 1, "floors": floors, "seen": seen, **beside})

    @classmethod
    def from_text(cls, text: str) -> StoredIds:
        """The inverse of `to_text`; raises CorruptSeenIds for anything else."""
        try:
            stored = json.loads(text)
            if stored["version"] != 1:
                raise CorruptSeenIds(f"they have version {stored['version']}, not 1")
            floors = {UUID(incarnation): int(floor) for incarnation, floor in stored["floors"].items()}
            return cls(SeenIds.from_bytes(base64.b64decode(stored["seen"], validate=True)), floors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSeenIds(f"they cannot be read: {error}") from error


@dataclass(slots=True)
class BatchIds:
    """The words of a batch, by incarnation and position."""

    words: dict[UUID, dict[int, Word]] = field(default_factory=dict)

    def add(self, incarnation: UUID, words: Iterable[Word]) -> None:
        """Adds words, such as those of another topic, to the existing ones of the same positions."""
        ours = self.words.setdefault(incarnation, {})
        for word in words:
            found = ours.get(word.at)
            ours[word.at] = word if found is None else found + word

    def suspects(self, stored: StoredIds) -> list[Suspects]:
        """The ids that may not be new, given those in silver before this batch; all other records are new."""
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
    """The ids as ascending intervals, joined across words."""
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
