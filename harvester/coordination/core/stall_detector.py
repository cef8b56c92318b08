"""Whether a reader stands still, though the brokers are there and have more for it. Pure.

Kafka's client sometimes does not go on with a partition after its broker was away (librdkafka 5153). It says nothing,
and nothing else shows it. Where that is the coordination log, a client would win claims without ever hearing of it, so
that nobody else could have them either; where it is a place that is held, its records would wait as long as it is.

What shows it is that the brokers tell of a record, twice, so long apart, and nothing of its partition was read between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class Standstill(Generic[P]):
    """Of many partitions. Times are in seconds of one clock; `limit_s`: how long a reader may be behind."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._next: dict[P, int] = {}
        self._there: dict[P, int] = {}  # the newest record that is known, where it is not read yet
        self._moved_at: dict[P, float] = {}  # of the same: when something was read, or there was first more to read

    def begin(self, positions: Mapping[P, int]) -> None:
        """By partition the offset that is read next; what was known before is forgotten."""
        self._next = dict(positions)
        self._there.clear()

    def forget(self, partition: P) -> None:
        """It is not read any more."""
        self._next.pop(partition, None)
        self._there.pop(partition, None)

    @property
    def positions(self) -> Mapping[P, int]:
        """As of now."""
        return self._next

    def read(self, partition: P, offset: int, now: float) -> None:
        """A record was."""
        self._next[partition] = offset + 1
        self._moved_at[partition] = now
        if self._there.get(partition, -1) <= offset:
            self._there.pop(partition, None)

    def is_there(self, partition: P, offset: int, now: float) -> bool:
        """The brokers have told just now that they have this record; whether that shows the reader to stand still."""
        if offset < self._next.get(partition, 0):
            return False
        if partition not in self._there:
            self._moved_at[partition] = now
        self._there[partition] = offset
        return now - self._moved_at[partition] > self._limit_s
