"""What a shard puts on its records: the header that says where each comes from, its number (P25); its timestamp. Thin.

A sequence is dense within a *scope*: term, lane (which is the shard's index) and a number drawn at random for each
producer, or for each remark, so that what a remark dropped leaves no hole in a scope that goes on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from uuid import UUID

from harvester import origin

_FIRST_US, _END_US = -62_135_596_800_000_000, 253_402_300_800_000_000  # of the years 1 to 9999


def timestamp_ms(created_us: int) -> int:
    """The timestamp of a record that was created then: 1 before 1970, and 0, which the client replaces by the present
    moment, for `infinity`, `-infinity` and all that lies outside the years 1 to 9999."""
    return max(1, created_us // 1000) if _FIRST_US <= created_us < _END_US else 0


class Stamps:
    """Makes the value of the header `name`; "" makes none. `stamp` may be called by any thread, the rest by one."""

    def __init__(self, name: str, lane: int) -> None:
        self.name = name
        self._lane = lane
        self._scope: tuple[UUID, int, int] | None = None
        self._low_water: int | None = None
        self._head = b""
        self._next: Callable[[], int] = itertools.count(1).__next__

    def begin(self, term: int | None, incarnation: str | None) -> None:
        """A new scope."""
        self._scope, self._low_water = None, None
        if term is not None and incarnation is not None:
            self._scope = UUID(incarnation), term, random.getrandbits(32)
        self.rewind(0)
        self._make()

    def rewind(self, sequence: int) -> None:
        """The last number that counts was this one."""
        self._next = itertools.count(sequence + 1).__next__

    def set_low_water(self, low_water: int | None) -> None:
        """Every id below it is settled, and none can appear there."""
        if low_water != self._low_water:
            self._low_water = low_water
            self._make()

    def stamp(self, record_id: int, created_us: int) -> bytes:
        """The header's value for this record, with the next number; nothing while there is no scope."""
        return origin.stamp(self._head, record_id, self._next(), created_us) if self._head else b""

    def _make(self) -> None:
        if self._scope is None:
            self._head = b""
            return
        incarnation, term, number = self._scope
        self._head = origin.head(incarnation, term, self._lane, number, self._low_water)
