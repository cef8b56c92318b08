"""Notices that a client of Kafka has dropped its last broker, so that its owner can make another one.

librdkafka drops the brokers that the brokers' answers leave out (2.10 and later). A broker leaves out those that are
fenced, itself included: after a start, or after a pause in which the controller has not heard of it. A client that has
dropped its last broker asks those that it was configured with again, but a race of its threads can lose that, and then
it stays alone for good, without an error and without a line in its log (librdkafka issue 5301).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

STRANDED = "Kafka's client has dropped its last broker (librdkafka issue 5301)"
_EVERY_MS = 5000  # a report about 1,000 partitions takes some milliseconds
_AFTER_S = 2.0  # between two brokers a client may have none
_KINDS = frozenset({"learned", "configured"})  # not those that stand for another, as a group's coordinator does


class Stranded:
    """Of one client. Pure; belongs to the thread that polls it.

    States: it has a broker, or may be about to have one; it is stranded (`is_so`), which lasts.
    """

    def __init__(self) -> None:
        self._since_us: int | None = None  # by the client's clock
        self.is_so = False

    def heard(self, report: str) -> None:
        """Take a report of the client (librdkafka's STATISTICS.md)."""
        if any(f'"source":"{kind}"' in report for kind in _KINDS):  # nearly always; to read all would take longer
            self._since_us = None
            return
        statistics = json.loads(report)
        now_us: int = statistics["ts"]
        if any(broker["source"] in _KINDS for broker in statistics["brokers"].values()):
            self._since_us = None
        elif self._since_us is None:
            self._since_us = now_us
        elif now_us - self._since_us >= _AFTER_S * 1e6:
            self.is_so = True


def watched(
    options: Mapping[str, Any], every_ms: int = _EVERY_MS, then: Callable[[], object] = lambda: None
) -> tuple[dict[str, Any], Stranded]:
    """Options for one client, and what will be known of it; `then` is called with each report once it is stranded.

    Only for a client that is polled all the time: reports that nobody takes fill the memory. They go to the `stats_cb`
    of the options, too.
    """
    stranded, theirs = Stranded(), options.get("stats_cb")

    def heard(report: str) -> None:
        stranded.heard(report)
        if stranded.is_so:
            then()
        if theirs is not None:
            theirs(report)

    return {"statistics.interval.ms": every_ms, **options, "stats_cb": heard}, stranded
