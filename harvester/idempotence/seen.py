"""The ids that a consumer has seen, exactly, in memory that grows with the gaps between them.

Concurrent transactions commit out of the order of their ids, so an id below the highest one seen may be new: a bare
mark would lose it. What has been seen is kept as intervals, for each incarnation of an outbox by itself, because the
same id of another incarnation is another record. Where all ids from the first on have been seen, that is one
interval, and its end is the high-water mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from harvester.idempotence.intervals import Intervals
from harvester.idempotence.seen_bytes import pack, unpack

_SMALLEST = -(2**63)
_FIRST = 1  # where the ids of a new sequence begin


class SeenIds:
    """A set of (incarnation, id). It is not safe to be used from several threads at once."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: dict[UUID, Intervals] = {}

    def add(self, incarnation: UUID, record_id: int) -> bool:
        """Whether it was new."""
        found = self._sets.get(incarnation)
        if found is None:
            self._sets[incarnation] = Intervals([(record_id, record_id)])
            return True
        return found.add(record_id)

    def contains(self, incarnation: UUID, record_id: int) -> bool:
        """Whether it was added, or lies below a low water."""
        found = self._sets.get(incarnation)
        return found is not None and record_id in found

    def low_water(self, incarnation: UUID, record_id: int) -> None:
        """Let all ids below this one count as seen; their intervals become one. A lower one than before is ignored."""
        if record_id > _SMALLEST:
            self._sets.setdefault(incarnation, Intervals()).add_range(_SMALLEST, record_id - 1)

    def high_water(self, incarnation: UUID) -> int | None:
        """The highest id up to which all have been seen; None when the first one (1) has not."""
        found = self._sets.get(incarnation)
        return None if found is None else found.end_from(_FIRST)

    def intervals(self, incarnation: UUID) -> Iterator[tuple[int, int]]:
        """(first, last) of each interval, ascending; after a low water the first begins at -2**63."""
        return iter(self._sets.get(incarnation, ()))

    @property
    def incarnations(self) -> tuple[UUID, ...]:
        """Those of which anything is known."""
        return tuple(self._sets)

    def forget(self, incarnation: UUID) -> bool:
        """Drop all that is known of an incarnation; false when that was nothing. Its ids count as new again."""
        return self._sets.pop(incarnation, None) is not None

    def shed(self, most: int) -> int:
        """Drop the lowest intervals until `most` are left; returns how many went. Their ids count as new again.

        They are taken from the incarnation that has most; what lies below a low water stays.
        """
        excess = max(0, len(self) - max(most, 0))
        left = excess
        for found in sorted(self._sets.values(), key=len, reverse=True):
            if not left:
                break
            keep = 1 if next(iter(found))[0] == _SMALLEST else 0
            count = min(left, len(found) - keep)
            found.drop(keep, count)
            left -= count
        self._sets = {incarnation: found for incarnation, found in self._sets.items() if len(found)}
        return excess - left

    def update(self, other: SeenIds) -> None:
        """Add all that another has seen."""
        for incarnation, found in other._sets.items():
            ours = self._sets.setdefault(incarnation, Intervals())
            for first, last in found:
                ours.add_range(first, last)

    def copy(self) -> SeenIds:
        """One that changes by itself."""
        twin = SeenIds()
        twin.update(self)
        return twin

    def to_bytes(self) -> bytes:
        """To be stored; equal sets give equal bytes."""
        return pack(self._sets)

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenIds:
        """The reverse; raises CorruptSeenIds."""
        seen = cls()
        seen._sets = unpack(bytes(data))
        return seen

    def __len__(self) -> int:
        """The number of intervals: what memory and stored size grow with."""
        return sum(map(len, self._sets.values()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenIds):
            return NotImplemented
        return self._sets == other._sets

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"SeenIds({self._sets!r})"
