"""What supervisor and shards share in memory: three numbers that the supervisor alone writes (P16).

No lock is shared: a shard that is killed while it holds one would hang all others. Each number is one aligned
64-bit word, so a reader sees the old value or the new one and nothing between.

Trust is a moment of CLOCK_BOOTTIME, which runs through suspend. Inside the supervisor several threads may move it
(the member extends it, the relay opens and closes it); `TrustCell` orders them with a lock of its own process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableSequence
from time import CLOCK_BOOTTIME, clock_gettime_ns

from harvester.clock import clock_s

_TRUST, _IN_FLIGHT, _LIMIT = 0, 1, 2
WORDS = 3

Shared = MutableSequence[int]  # a multiprocess RawArray of WORDS signed 64-bit integers


def trust_check(shared: Shared) -> Callable[[], bool]:
    """A function that says whether a shard may hand a record to its producer now (P12); one call per record."""

    def trusted() -> bool:
        return clock_gettime_ns(CLOCK_BOOTTIME) < shared[_TRUST]

    return trusted


def set_in_flight(shared: Shared, records: int, limit: int) -> None:
    """Publish how many records may be at producers now, and the most that is allowed."""
    shared[_IN_FLIGHT] = records
    shared[_LIMIT] = limit


def in_flight(shared: Shared) -> tuple[int, int]:
    """(records in flight over all shards, max_in_flight_records)."""
    return shared[_IN_FLIGHT], shared[_LIMIT]


class TrustCell:
    """The supervisor's side of the trust word. It is 0 while closed; opening needs an unexpired trust."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._open = False
        self._until_s = 0.0
        shared[_TRUST] = 0

    def extend(self, until_s: float) -> None:
        """The election proved leadership up to this moment."""
        with self._lock:
            self._until_s = until_s
            if self._open:
                self._shared[_TRUST] = int(until_s * 1e9)

    def revoke(self) -> None:
        """The election fenced: nothing is proved any more."""
        with self._lock:
            self._until_s = 0.0
            self._open = False
            self._shared[_TRUST] = 0

    def open(self) -> None:
        """Let shards produce up to the proven moment, and on as the election proves more."""
        with self._lock:
            self._open = True
            self._shared[_TRUST] = int(self._until_s * 1e9)

    def close(self) -> None:
        """No shard may produce; what the election proves is kept for the next opening."""
        with self._lock:
            self._open = False
            self._shared[_TRUST] = 0

    @property
    def trusted(self) -> bool:
        """Whether leadership is proven now, open or not."""
        return clock_s() < self._until_s
