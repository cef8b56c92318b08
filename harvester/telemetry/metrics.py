"""Counts and rates: throughput for hosts and the dashboard, totals since the start for a monitoring system.

Pure. All times passed to one object are readings, in seconds, of the same clock: a monotonic one, so that a step of the
wall clock distorts no rate.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from harvester.events import MeterRead
from harvester.telemetry.latency import Histogram

HISTORY_S = 60


class Meter:
    """Counts acknowledgements and periodically reports their rate.

    A reading is given at most every `interval_s` seconds, and only by `add`: a relay that acknowledges nothing reports
    nothing. The first reading after an idle time includes the idle time in its average.
    """

    def __init__(self, name: str, start_at: datetime, interval_s: float, *, started: float | None = None) -> None:
        """`started` is `start_at` on the clock passed to `add`; without it, that clock is UNIX time."""
        self._name = name
        self._start = start_at.timestamp()
        self._interval_s = interval_s
        self._started = self._start if started is None else started
        self._last_read = self._started
        self._total_count = 0
        self._interval_count = 0

    def add(self, count: int, now: float) -> MeterRead | None:
        """Count `count` acknowledged records; a reading if the last one is at least `interval_s` old."""
        if count <= 0:
            return None
        self._total_count += count
        self._interval_count += count
        if now - self._last_read < self._interval_s:
            return None
        reading = MeterRead(
            name=self._name,
            start=self._start,
            total_count=self._total_count,
            total_rate_per_s=_rate(self._total_count, now - self._started),
            interval_count=self._interval_count,
            interval_rate_per_s=_rate(self._interval_count, now - self._last_read),
        )
        self._last_read = now
        self._interval_count = 0
        return reading


class RateHistory:
    """Records per second in the last minute: one bucket per second, as in `Status.rate_history`.

    The current second is never shown, because half a second's count would look like a slump. Times must not run
    backwards; one that does counts as the latest second seen.
    """

    def __init__(self, start: float) -> None:
        self._second = int(start)  # the current one
        self._filling = 0
        self._full: deque[int] = deque(maxlen=HISTORY_S)

    def add(self, count: int, now: float) -> None:
        """Count `count` records at `now`."""
        self._advance(now)
        self._filling += count

    def rates(self, now: float) -> tuple[float, ...]:
        """The complete seconds before `now`, oldest first; fewer than 60 while the history is young."""
        self._advance(now)
        return tuple(map(float, self._full))

    def rate(self, now: float) -> float:
        """Records/s over the last three complete seconds, or as many as exist; 0 before the first."""
        recent = self.rates(now)[-3:]
        return sum(recent) / len(recent) if recent else 0.0

    def _advance(self, now: float) -> None:
        passed = int(now) - self._second
        if passed <= 0:
            return
        self._full.append(self._filling)
        # After a long silence, no more zeros than the history holds are needed.
        self._full.extend([0] * min(passed - 1, HISTORY_S))
        self._second += passed
        self._filling = 0


def _rate(count: int, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0


# The parts of a harvester that report troubles, and the names under which they are counted: the servers first.
SOURCES = ("database", "kafka", "shard", "archive", "http")
_NAMES = {"group": "kafka", "term": "database"}
_NUMBER = re.compile(r" \d+$")


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters that only grow while the process lives; they do not decrease when a shard is replaced or removed."""

    latency: Histogram  # create_time -> acknowledged, of all records
    quarantined: int
    repeats_suspected: int  # records that may have been published and were sent again; an upper bound
    acquired: int  # times that this process came to lead
    remarks: int
    fenced: int
    troubles: Mapping[str, int]  # by source: how often one began
    troubled: frozenset[str]  # sources that have a trouble now


@dataclass(slots=True)
class Tally:
    """Counts troubles and latencies. Not thread-safe: its owner has a lock."""

    latency: Histogram = field(default_factory=Histogram)
    troubles: Counter[str] = field(default_factory=Counter)
    _now: set[str] = field(default_factory=set)

    def trouble(self, source: str, *, new: bool, over: bool) -> None:
        """A trouble of a source, possibly one of several (`shard 3`)."""
        self.troubles[source_of(source)] += new
        (self._now.discard if over else self._now.add)(source)

    def copy_of_latency(self) -> Histogram:
        """The latencies so far, for a reader on another thread."""
        copy = Histogram()
        copy.merge(self.latency)
        return copy

    @property
    def troubled(self) -> frozenset[str]:
        """The sources that have a trouble now."""
        return frozenset(map(source_of, self._now))


def source_of(source: str) -> str:
    """The name under which a source is counted."""
    bare = bare_source(source)
    return _NAMES.get(bare, bare)


def bare_source(source: str) -> str:
    """The source without a number: `shard` for all shards."""
    return _NUMBER.sub("", source)
