"""Exposes the batches of a lake's job to Prometheus: what `harvester pipeline lake --listen` serves.

Counters start over with the job. A gauge has no sample until there is something to report.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harvester.http.server import Request, Response, Router, Trouble, WebServer

_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class LakeMetrics:
    """Counts a lake's batches since the job started. `take` and the server may use it at the same time."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._records = Counter("harvester_lake_records", "Records read from the topics.", registry=registry)
        text = "Later deliveries of records, written to the table repeats."
        self._repeats = Counter("harvester_lake_repeats", text, registry=registry)
        text = "Records without a sound header and values that do not fit their schema, written to the table rejects."
        self._rejects = Counter("harvester_lake_rejects", text, registry=registry)
        text = "Duration of batches."
        self._seconds = Histogram("harvester_lake_batch_seconds", text, buckets=_BOUNDS_S, registry=registry)
        self._ended: Gauge | None = None
        self._behind: Gauge | None = None

    def take(self, *, records: int, repeats: int, rejects: int, seconds: float, behind: int | None) -> None:
        """Count a batch that has just ended. `behind`: records after it in the partition that is furthest behind."""
        self._records.inc(records)
        self._repeats.inc(repeats)
        self._rejects.inc(rejects)
        self._seconds.observe(seconds)
        if self._ended is None:
            text = "When the last batch ended."
            self._ended = Gauge("harvester_lake_last_batch_timestamp_seconds", text, registry=self._registry)
        self._ended.set(time.time())
        if behind is None:
            return
        if self._behind is None:
            text = "Records that the last batch left unread in the partition that is furthest behind."
            self._behind = Gauge("harvester_lake_behind_records", text, registry=self._registry)
        self._behind.set(behind)

    def server(self, host: str, port: int, trouble: Trouble, say: Callable[[str], None]) -> WebServer:
        """A server of `/metrics`, not started yet."""
        return WebServer(host, port, Router({("GET", "/metrics"): self._answer}), trouble, say)

    def _answer(self, _request: Request) -> Response:
        return Response(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
