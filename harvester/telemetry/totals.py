"""What has happened since the harvester was started, as counters for a monitoring system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harvester.telemetry.latency import Histogram

# The parts of a harvester that report troubles, and under which name they are counted: the servers' come first.
SOURCES = ("database", "kafka", "shard", "archive", "http")
_NAMES = {"group": "kafka"}
_NUMBER = re.compile(r" \d+$")


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters that only grow while the process lives; they do not fall when a shard is replaced or goes."""

    latency: Histogram  # create_time -> acknowledged, of all records
    quarantined: int
    repeats_suspected: int  # records that may have been published and were sent again; an upper bound
    acquired: int  # times that this process came to lead
    remarks: int
    fenced: int
    troubles: Mapping[str, int]  # by source: how often one began, or became another
    troubled: frozenset[str]  # sources that have a trouble now


@dataclass(slots=True)
class Tally:
    """Counts troubles and latencies. Not thread-safe: whoever keeps it has a lock."""

    latency: Histogram = field(default_factory=Histogram)
    troubles: Counter[str] = field(default_factory=Counter)
    _now: set[str] = field(default_factory=set)

    def trouble(self, source: str, *, new: bool, over: bool) -> None:
        """Something about a source, which may be one of many (`shard 3`)."""
        self.troubles[source_of(source)] += new
        (self._now.discard if over else self._now.add)(source)

    def copy_of_latency(self) -> Histogram:
        """The latencies until now, for a reader on another thread."""
        copy = Histogram()
        copy.merge(self.latency)
        return copy

    @property
    def troubled(self) -> frozenset[str]:
        """The sources that have a trouble now."""
        return frozenset(map(source_of, self._now))


def source_of(source: str) -> str:
    """The name under which it is counted."""
    bare = _NUMBER.sub("", source)
    return _NAMES.get(bare, bare)
