"""The form in which seen ids are stored.

    1 byte        version, 1
    varint        number of incarnations, which follow in the order of their bytes, each:
      16 bytes      the incarnation
      varint        number of intervals, which follow in ascending order:
        varint        the first one: its beginning, zigzag (2n, or -2n - 1 for a negative n)
        varint                       its length - 1
        varint        the others: 2g, or 2g + 1 where more than one id follows; g + 1 ids are missing before it
        varint                    with 2g + 1 only: its length - 2
    4 bytes       CRC-32 of all before, big-endian

A varint has seven bits a byte, the lowest first; the eighth says that more follow. So an interval of one id behind a
gap of up to 64 takes one byte. The checksum is there because a flipped bit would mostly give a valid set of other
ids, and an id that only seems to have been seen is a record lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from uuid import UUID

from harvester.errors import CorruptSeenIds
from harvester.idempotence.intervals import Intervals

_VERSION = 1
_CHECKSUM_BYTES = 4
_MAX_VARINT_BYTES = 10
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def pack(sets: Mapping[UUID, Intervals]) -> bytes:
    """The same bytes for the same ids."""
    out = bytearray((_VERSION,))
    present = sorted((incarnation.bytes, found) for incarnation, found in sets.items() if len(found))
    _put(out, len(present))
    for raw, intervals in present:
        out += raw
        _put(out, len(intervals))
        _put_intervals(out, intervals)
    out += zlib.crc32(out).to_bytes(_CHECKSUM_BYTES, "big")
    return bytes(out)


def unpack(data: bytes) -> dict[UUID, Intervals]:
    """The reverse; raises CorruptSeenIds for anything that `pack` has not made."""
    if not data:
        raise CorruptSeenIds("they are empty")
    if data[0] != _VERSION:
        raise CorruptSeenIds(f"they have version {data[0]}, this harvester knows {_VERSION}")
    body = data[:-_CHECKSUM_BYTES]
    if len(body) < 2 or zlib.crc32(body) != int.from_bytes(data[-_CHECKSUM_BYTES:], "big"):
        raise CorruptSeenIds("their checksum is wrong")
    reader = _Reader(body)
    sets: dict[UUID, Intervals] = {}
    before = b""
    for _ in range(reader.number()):
        raw = reader.take(16)
        if raw <= before:
            raise CorruptSeenIds("their incarnations are not in order")
        before = raw
        sets[UUID(bytes=raw)] = reader.intervals()
    if reader.at != len(body):
        raise CorruptSeenIds(f"{len(body) - reader.at} bytes are left over")
    return sets


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
        if at < len(data) and data[at] < 0x80:  # nearly always
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
