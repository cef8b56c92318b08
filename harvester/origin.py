"""The header that identifies a record's origin: its codec, and the stamps that a shard puts on its records.

One header, named `harvester` unless configured otherwise; its value has 66 bytes, with numbers in network byte order:

    at  bytes  field
     0    1    mark, 0xB5: no UTF-8 text begins with it
     1    1    version, 1
     2   16    incarnation of the outbox (UUID)
    18    8    term, signed
    26    4    lane, unsigned
    30    4    producer incarnation, unsigned: one number for each producer that the lane has under a term
    34    8    low water, signed; the smallest value, which no id is below, says that none is known
    42    8    id, signed
    50    8    sequence, signed
    58    8    creation time, signed: microseconds since the UNIX epoch, or the nearest number that has room

The first 42 bytes are the same for many consecutive records: `head` builds them once, and `stamp` adds the rest.

`Stamps` numbers a shard's records (P25). Sequences are dense within a *scope*: term, lane (the shard's index) and a
random number drawn for each producer, or for each remark, so that records dropped by a remark leave no hole in a
continuing scope.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

HEADER = "harvester"
VERSION = 1
SMALLEST = -(2**63)
_LARGEST = 2**63 - 1

_MARK = 0xB5
_BEGIN = bytes((_MARK, VERSION))
_HEAD = struct.Struct(">2s16sqIIq")
_TAIL = struct.Struct(">qqq")
_ALL = struct.Struct(">16sqIIqqqq")
SIZE = _HEAD.size + _TAIL.size
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_pack_tail = _TAIL.pack
_uuid = lru_cache(maxsize=64)(lambda raw: UUID(bytes=raw))


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a record. Only `incarnation` and `id` together identify it: ids start again in another incarnation.

    Sequences count from 1 without holes within (incarnation, term, lane, producer); a retried record keeps its number.
    `low_water`: every id below it is settled and no new one can appear there (protocol P25); it never exceeds `id`.
    None: the relay does not know one.
    """

    incarnation: UUID
    id: int
    term: int
    lane: int
    producer: int
    sequence: int
    created_us: int
    low_water: int | None = None

    @property
    def created_at(self) -> datetime:
        """Aware, UTC; raises OverflowError for a time that a datetime cannot represent."""
        return _EPOCH + timedelta(microseconds=self.created_us)


def head(incarnation: UUID, term: int, lane: int, producer: int, low_water: int | None = None) -> bytes:
    """The common part of a producer's records, until its low watermark moves."""
    low = SMALLEST if low_water is None else low_water
    return _HEAD.pack(_BEGIN, incarnation.bytes, term, lane, producer, low)


def stamp(head: bytes, record_id: int, sequence: int, created_us: int) -> bytes:
    """The header's value for one record; called for every record."""
    try:
        return head + _pack_tail(record_id, sequence, created_us)
    except struct.error:  # `infinity`, and years from 294247: PostgreSQL counts microseconds from 2000
        return head + _pack_tail(record_id, sequence, max(SMALLEST, min(created_us, _LARGEST)))


def encode(origin: Origin) -> bytes:
    """The whole header value; raises struct.error for a number that does not fit."""
    return stamp(
        head(origin.incarnation, origin.term, origin.lane, origin.producer, origin.low_water),
        origin.id,
        origin.sequence,
        origin.created_us,
    )


def decode(value: bytes | None) -> Origin | None:
    """Decode a header's value; None for anything that is not valid and of version 1. Raises nothing."""
    if value is None or len(value) != SIZE or value[:2] != _BEGIN:
        return None
    incarnation, term, lane, producer, low, record_id, sequence, created_us = _ALL.unpack_from(value, 2)
    # A low watermark above the record itself would make consumers take it, and others, for seen.
    if sequence < 1 or low > record_id:
        return None
    low_water = None if low == SMALLEST else low
    return Origin(_uuid(incarnation), record_id, term, lane, producer, sequence, created_us, low_water)


def version(value: bytes | None) -> int | None:
    """The version that a value claims, if it begins like ours; `decode` does not read newer ones."""
    if value is None or len(value) < 2 or value[0] != _MARK:
        return None
    return value[1]


def find(headers: Any, name: str = HEADER) -> bytes | None:
    """The value of the last header of this name; `headers` are pairs or None, as in a consumed message.

    The last one counts because the relay adds its own after the writer's, which may include one copied from a record of
    another outbox.
    """
    found: bytes | None = None
    for key, value in headers or ():
        if key == name:
            found = value
    return found


_FIRST_US, _END_US = -62_135_596_800_000_000, 253_402_300_800_000_000  # the years 1 to 9999


def timestamp_ms(created_us: int) -> int:
    """The timestamp for a record's creation time: 1 before 1970, and 0, which the client replaces by the current time,
    for `infinity`, `-infinity` and everything outside the years 1 to 9999.
    """
    return max(1, created_us // 1000) if _FIRST_US <= created_us < _END_US else 0


class Stamps:
    """Makes the values of the header `name`; none if it is "". Any thread may call `stamp`, only one the others."""

    def __init__(self, name: str, lane: int) -> None:
        self.name = name
        self._lane = lane
        self._scope: tuple[UUID, int, int] | None = None
        self._low_water: int | None = None
        # The head, and the next number: of one scope, since another thread may stamp while a new one begins.
        self._made: tuple[bytes, Callable[[], int]] = b"", itertools.count(1).__next__

    def begin(self, term: int | None, incarnation: str | None, producer: int) -> None:
        """Begin a new scope; `producer` is a random 32-bit number."""
        self._scope, self._low_water = None, None
        if term is not None and incarnation is not None:
            self._scope = UUID(incarnation), term, producer
        self._make(itertools.count(1).__next__)

    def rewind(self, sequence: int) -> None:
        """The last valid number was this one."""
        self._made = self._made[0], itertools.count(sequence + 1).__next__

    def set_low_water(self, low_water: int | None) -> None:
        """Every id below it is settled, and none can appear there."""
        if low_water != self._low_water:
            self._low_water = low_water
            self._make(self._made[1])

    def stamp(self, record_id: int, created_us: int) -> bytes:
        """The header's value for this record, with the next number; empty while there is no scope."""
        head, following = self._made
        return stamp(head, record_id, following(), created_us) if head else b""

    def _make(self, following: Callable[[], int]) -> None:
        if self._scope is None:
            self._made = b"", following
            return
        incarnation, term, number = self._scope
        self._made = head(incarnation, term, self._lane, number, self._low_water), following
