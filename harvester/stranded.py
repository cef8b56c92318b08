"""Notices that a client of Kafka has dropped its last broker, so that its owner can make another one.

librdkafka drops the brokers that the brokers' answers leave out (2.10 and later). A broker leaves out those that are
fenced, itself included: after a start, or after a pause in which the controller has not heard of it. A client that has
dropped its last broker asks those that it was configured with again, but a race of its threads can lose that, and then
it stays alone for good, without an error and without a line in its log (librdkafka issue 5301).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRANDED = "Kafka's client has dropped its last broker (librdkafka issue 5301)"
_AFTER_S = 2.0  # a client may be without a broker for a moment
_USUAL = ('"source":"learned"', '"source":"configured"')
_NO_BROKERS = frozenset({"logical", "internal"})  # a group's coordinator, which stands for another; the client itself


class Stranded:
    """Of one client. Pure; belongs to the thread that polls it.

    States: it has a broker, or may be about to have one; it is stranded (`is_so`), which lasts.
    """

    def __init__(self) -> None:
        self._since_us: int | None = None  # by the client's clock
        self.is_so = False

    def heard(self, report: str) -> None:
        """Take a report of the client (librdkafka's STATISTICS.md)."""
        now_us = None if any(map(report.__contains__, _USUAL)) else _alone_at(report)  # to read all would take longer
        if now_us is None or self._since_us is None:
            self._since_us = now_us
        elif now_us - self._since_us >= _AFTER_S * 1e6:
            self.is_so = True


def _alone_at(report: str) -> int | None:
    """The time of a report that knows no broker; None if it knows one, or cannot be read."""
    try:
        statistics = json.loads(report)
        alone = all(broker["source"] in _NO_BROKERS for broker in statistics["brokers"].values())
        return int(statistics["ts"]) if alone else None
    except (ValueError, KeyError):
        return None


def watched(options: Mapping[str, Any], every_ms: int) -> tuple[dict[str, Any], Stranded]:
    """Options for one client that reports at this interval, and what will be known of it.

    Only for a client that is polled all the time, since reports that nobody takes fill the memory, and that has little
    to do: one that reports takes a lock for each record (a shard's producer had 15 to 30 % less throughput). An
    interval among the options is replaced; reports go to their `stats_cb`, too.
    """
    stranded, theirs = Stranded(), options.get("stats_cb", lambda _: None)

    def heard(report: str) -> None:
        stranded.heard(report)
        theirs(report)

    return {**options, "statistics.interval.ms": every_ms, "stats_cb": heard}, stranded
