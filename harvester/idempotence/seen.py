"""The ids a consumer has seen: an exact set, whose size grows with the gaps, and its stored form.

Concurrent transactions commit out of id order, so an id below the highest one seen may be new: a simple mark would lose
it. Seen ids are kept as intervals, separately for each incarnation of an outbox, because the same id of another
incarnation is another record. If all ids from the first on have been seen, that is a single interval, and its end is
the high-water mark.

They are stored as

    1 byte        version, 1
    varint        number of incarnations, which follow in the order of their bytes, each:
      16 bytes      the incarnation
      varint        number of intervals, which follow in ascending order:
        varint        the first one: its beginning, zigzag (2n, or -2n - 1 for a negative n)
        varint                       its length - 1
        varint        the others: 2g, or 2g + 1 where more than one id follows; g + 1 ids are missing before it
        varint                    with 2g + 1 only: its length - 2
    4 bytes       CRC-32 of all before, big-endian

A varint has seven bits per byte, the lowest first; the eighth bit says that more bytes follow. So an interval of one id
after a gap of up to 64 takes one byte. The checksum is needed because a flipped bit would usually give a valid set of
other ids, and an id wrongly counted as seen is a lost record.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from uuid import UUID

from harvester.errors import CorruptSeenIds
from harvester.idempotence.intervals import Intervals

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_VERSION = 1
_CHECKSUM_BYTES = 4
_MAX_VARINT_BYTES = 10
_FIRST = 1  # the first id of a new sequence


class SeenIds:
    """A set of (incarnation, id). Not thread-safe."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: dict[UUID, Intervals] = {}

    def add(self, incarnation: UUID, record_id: int) -> bool:
        """Add an id; returns whether it was new."""
        found = self._sets.get(incarnation)
        if found is None:
            self._sets[incarnation] = Intervals([(record_id, record_id)])
            return True
        return found.add(record_id)

    def add_range(self, incarnation: UUID, first: int, last: int) -> None:
        """Add the ids first … last; nothing if last < first."""
        if first <= last:
            self._sets.setdefault(incarnation, Intervals()).add_range(first, last)

    def contains(self, incarnation: UUID, record_id: int) -> bool:
        """Whether it was added, or is below a low watermark."""
        found = self._sets.get(incarnation)
        return found is not None and record_id in found

    def low_water(self, incarnation: UUID, record_id: int) -> None:
        """Count all ids below this one as seen; their intervals become one. A lower value than before is ignored."""
        if record_id > _SMALLEST:
            self._sets.setdefault(incarnation, Intervals()).add_range(_SMALLEST, record_id - 1)

    def high_water(self, incarnation: UUID) -> int | None:
        """The highest id up to which all have been seen; None if the first one (1) has not."""
        found = self._sets.get(incarnation)
        return None if found is None else found.end_from(_FIRST)

    def intervals(self, incarnation: UUID) -> Iterator[tuple[int, int]]:
        """(first, last) of each interval, ascending; after a low watermark the first begins at -2**63."""
        return iter(self._sets.get(incarnation, ()))

    def highest(self, incarnation: UUID) -> int | None:
        """The highest id that has been seen."""
        found = self._sets.get(incarnation)
        return None if found is None else found.last

    def overlapping(self, incarnation: UUID, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The whole intervals that contain any of the ids first … last."""
        found = self._sets.get(incarnation)
        return iter(()) if found is None else found.overlapping(first, last)

    @property
    def incarnations(self) -> tuple[UUID, ...]:
        """The incarnations that at least one seen id belongs to."""
        return tuple(self._sets)

    def forget(self, incarnation: UUID) -> bool:
        """Drop everything about an incarnation; False if there was nothing. Its ids then count as new."""
        return self._sets.pop(incarnation, None) is not None

    def shed(self, most: int) -> int:
        """Drop the lowest intervals until `most` are left; returns how many were dropped. Their ids then count as new.

        They are taken from the incarnation with the most intervals; what is below a low watermark stays.
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
        """Add everything that another set contains."""
        for incarnation, found in other._sets.items():
            ours = self._sets.setdefault(incarnation, Intervals())
            for first, last in found:
                ours.add_range(first, last)

    def copy(self) -> SeenIds:
        twin = SeenIds()
        twin.update(self)
        return twin

    def to_bytes(self) -> bytes:
        """The stored form; equal sets give equal bytes."""
        out = bytearray((_VERSION,))
        present = sorted((incarnation.bytes, found) for incarnation, found in self._sets.items() if len(found))
        _put(out, len(present))
        for raw, intervals in present:
            out += raw
            _put(out, len(intervals))
            _put_intervals(out, intervals)
        out += zlib.crc32(out).to_bytes(_CHECKSUM_BYTES, "big")
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> SeenIds:
        """Parse the stored form; raises CorruptSeenIds for anything else."""
        if not data:
            raise CorruptSeenIds("they are empty")
        if data[0] != _VERSION:
            raise CorruptSeenIds(f"they have version {data[0]}, but this harvester only supports {_VERSION}")
        body = bytes(data[:-_CHECKSUM_BYTES])
        if len(body) < 2 or zlib.crc32(body) != int.from_bytes(data[-_CHECKSUM_BYTES:], "big"):
            raise CorruptSeenIds("their checksum is wrong")
        reader = _Reader(body)
        seen = cls()
        before = b""
        for _ in range(reader.number()):
            raw = reader.take(16)
            if raw <= before:
                raise CorruptSeenIds("their incarnations are not in order")
            before = raw
            seen._sets[UUID(bytes=raw)] = reader.intervals()
        if reader.at != len(body):
            raise CorruptSeenIds(f"{len(body) - reader.at} bytes are left over")
        return seen

    def __len__(self) -> int:
        """The number of intervals, to which memory and stored size are proportional."""
        return sum(map(len, self._sets.values()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenIds):
            return NotImplemented
        return self._sets == other._sets

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"SeenIds({self._sets!r})"


def _put_intervals(out: bytearray, intervals: Intervals) -> None:
    before: int | None = None
    for first, last in intervals:
        more = last - first
        if before is None:
            _put(out, first << 1 if first >= 0 else (-first << 1) - 1)
            _put(out, more)
        else:
            begin = (first - before - 2) << 1 | (more > 0)
            if begin < 0x80:
                out.append(begin)
            else:
                _put(out, begin)
            if more:
                _put(out, more - 1)
        before = last


def _put(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 1

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise CorruptSeenIds("they are cut off")
        self.at += count
        return taken

    def number(self) -> int:
        data, at = self.data, self.at
        if at < len(data) and data[at] < 0x80:  # almost always
            self.at = at + 1
            return data[at]
        value = 0
        for place in range(_MAX_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if not byte and place:
                    raise CorruptSeenIds("a number is longer than it has to be")
                return value
        raise CorruptSeenIds("a number is too long")

    def intervals(self) -> Intervals:
        count = self.number()
        if not count:
            raise CorruptSeenIds("an incarnation has no ids")
        found = Intervals()
        zigzag = self.number()
        first = zigzag >> 1 if not zigzag & 1 else -((zigzag + 1) >> 1)
        last = first + self.number()
        self._check(first, last)
        found.add_range(first, last)
        for _ in range(count - 1):
            begin = self.number()
            first = last + 2 + (begin >> 1)
            last = first + (self.number() + 1 if begin & 1 else 0)
            self._check(first, last)
            found.add_range(first, last)
        return found

    @staticmethod
    def _check(first: int, last: int) -> None:
        if first < _SMALLEST or last > _LARGEST:
            raise CorruptSeenIds("an id is out of range")
