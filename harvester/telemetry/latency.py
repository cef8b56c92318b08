"""Stores latencies compactly: a histogram with logarithmic buckets, and the window shown on a dashboard.

Bucket i holds latencies from `LOWEST_MS * GROWTH**i` up to the next bound, and is represented by the value in between
whose relative error from either is at most ERROR (the scheme of DDSketch, Masson et al., VLDB 2019). So a percentile
needs no sorting, histograms of several shards add up without further loss, and a shard's share fits into a few hundred
bytes. Pure: times are passed in.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from collections.abc import Sequence

from harvester.errors import WireError

LOWEST_MS = 0.1
HIGHEST_MS = 3_600_000.0  # an hour
ERROR = 0.02
GROWTH = (1 + ERROR) / (1 - ERROR)
_PER_LOG = 1 / math.log(GROWTH)
_LAST = int(math.log(HIGHEST_MS / LOWEST_MS) * _PER_LOG)
_LOWEST_US, _HIGHEST_US = LOWEST_MS * 1000, HIGHEST_MS * 1000
_PAIR = struct.Struct("<HQ")  # bucket, count


class Histogram:
    """Counts of latencies in milliseconds.

    Values outside LOWEST_MS … HIGHEST_MS count at that end: even those below zero, since the clocks of database and
    relay differ.
    """

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def __len__(self) -> int:
        """The number of latencies added."""
        return self._total

    def __eq__(self, other: object) -> bool:
        return self._counts == other._counts if isinstance(other, Histogram) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def add_all(self, latencies_us: Sequence[float]) -> None:
        """Count these latencies, given in microseconds; shards do this for every record."""
        counts, log = self._counts, math.log
        for latency_us in latencies_us:
            if not latency_us > _LOWEST_US:  # written so that NaN ends up here as well
                bucket = 0
            elif latency_us >= _HIGHEST_US:
                bucket = _LAST
            else:
                bucket = int(log(latency_us / _LOWEST_US) * _PER_LOG)
            counts[bucket] = counts.get(bucket, 0) + 1
        self._total += len(latencies_us)

    def merge(self, other: Histogram) -> None:
        """Add everything that `other` has counted, as if it had been added here."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._total += other._total

    def percentile(self, p: float) -> float | None:
        """The latency in ms not exceeded by `p` percent (0 … 100), by nearest rank; None if empty.

        Within ERROR of the true value for latencies between LOWEST_MS and HIGHEST_MS.
        """
        if not self._total:
            return None
        rank = min(max(math.ceil(self._total * p / 100), 1), self._total)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return _value(bucket)
        raise AssertionError("the counts do not add up to the total")

    def counts_up_to(self, bounds_ms: Sequence[float]) -> list[int]:
        """The numbers of latencies up to each of these ascending bounds, within ERROR of the bound."""
        sums = [0] * len(bounds_ms)
        for bucket, count in list(self._counts.items()):
            place = bisect.bisect_left(bounds_ms, _value(bucket))
            if place < len(sums):
                sums[place] += count
        return list(itertools.accumulate(sums))

    def total_ms(self) -> float:
        """The sum of all latencies, within ERROR."""
        return sum(_value(bucket) * count for bucket, count in list(self._counts.items()))

    def pack(self) -> bytes:
        """Ten bytes per used bucket, in bucket order."""
        return b"".join(_PAIR.pack(*pair) for pair in sorted(self._counts.items()))

    @classmethod
    def unpack(cls, data: bytes) -> Histogram:
        """The reverse of `pack`; raises WireError on anything else."""
        if len(data) % _PAIR.size:
            raise WireError(f"{len(data)} bytes are not a histogram: {_PAIR.size} are needed for each bucket")
        histogram = cls()
        previous = -1
        for bucket, count in _PAIR.iter_unpack(data):
            if not previous < bucket <= _LAST or not count:
                raise WireError(f"not a histogram: bucket {bucket} with {count} after bucket {previous}")
            histogram._counts[bucket] = count
            histogram._total += count
            previous = bucket
        return histogram


class LatencyWindow:
    """The histogram of the last interval in which there was traffic.

    Intervals follow each other from the first use on. A complete interval replaces the one shown; an empty one does
    not, so an idle relay shows the values of its last traffic. Until the first interval is complete, its part is shown.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._begun: float | None = None
        self._filling = Histogram()
        self._complete = Histogram()

    def add(self, latencies: Histogram, now: float) -> None:
        """Add a shard's share at `now`, in seconds of a single monotonic clock."""
        if not len(latencies):
            return
        self._turn(now)
        self._filling.merge(latencies)

    def current(self, now: float) -> Histogram:
        """The histogram to show at `now`; the caller must not change it."""
        self._turn(now)
        return self._complete if len(self._complete) else self._filling

    def _turn(self, now: float) -> None:
        if self._begun is None:
            self._begun = now
        passed = int((now - self._begun) / self._interval_s)
        if passed < 1:
            return
        self._begun += passed * self._interval_s
        if len(self._filling):
            self._complete, self._filling = self._filling, Histogram()


def _value(bucket: int) -> float:
    """The value whose relative distance to both bounds of the bucket is ERROR."""
    return float(LOWEST_MS * GROWTH**bucket * 2 * GROWTH / (GROWTH + 1))
