"""Answers HTTP requests from a harvester's snapshots: metrics, health, status, status page.

Metrics use base units (seconds, records, ratios), with `_total` for counters. Unknown values have no sample, so that a
rule never takes them for zero. A shard's metrics carry its number as a label; its counters start over with its process,
as Prometheus expects of counters. docs/operations.md lists them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from harvester.http.server import Request, Response, Route
from harvester.outbox.tables import OutboxTable
from harvester.status import ShardState, State, Status, awaited, to_json
from harvester.telemetry.metrics import SOURCES, Totals

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def expose(status: Status, totals: Totals) -> bytes:
    """The text of a scrape."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(status, totals))
    ProcessCollector(registry=registry)  # of the supervisor: process_cpu_seconds_total etc.
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, status: Status, totals: Totals) -> None:
        self._status, self._totals = status, totals

    def collect(self) -> Iterator[Metric]:
        return families(self._status, self._totals)


def families(status: Status, totals: Totals) -> Iterator[Metric]:
    """Every metric family with its samples."""
    yield from _leadership(status, totals)
    yield from _records(status, totals)
    yield _latency(totals)
    yield from _shards(status)
    yield from _troubles(totals)


def _leadership(status: Status, totals: Totals) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "harvester",
        "Identity of this harvester.",
        {"name": status.name, "outbox": _plain(status.outbox), "version": _version()},
    )
    yield _gauge("start_time_seconds", "Start time, as UNIX time.", status.started_at.timestamp())
    yield _labelled("state", "1 for the current state.", "state", ((s.value, float(s is status.state)) for s in State))
    leads = status.leader_id is not None and status.term is not None
    yield _gauge("leader", "1 while it leads and is trusted.", float(leads))
    yield _gauge("term", "The leader's number, while it leads.", status.term if leads else None)
    yield _counter("acquired", "How often it became leader.", totals.acquired)
    yield _counter("remarks", "How often everything queued was dropped and marked again.", totals.remarks)
    yield _counter("fenced", "How often it stopped leading because trust expired.", totals.fenced)


def _plain(outbox: str) -> str:
    """The table without SQL quotes, which a label's quotes would escape."""
    table = OutboxTable.parse(outbox)
    return table.name if table.schema is None else f"{table.schema}.{table.name}"


@cache
def _version() -> str:
    """The version of the installed distribution; a plain copy of the files has none."""
    try:
        return version("outbox-harvester")
    except PackageNotFoundError:
        return "unknown"


def _records(status: Status, totals: Totals) -> Iterator[Metric]:
    backlog = status.backlog
    yield _gauge("backlog_records", "Rows in the outbox, counted up to a limit.", backlog.records if backlog else None)
    yield _gauge(
        "backlog_capped", "1 if counting the backlog stopped at its limit.", backlog.capped if backlog else None
    )
    age_s = None if backlog is None else backlog.oldest_age_s or 0.0
    yield _gauge("backlog_oldest_age_seconds", "Age of the first row in the outbox, 0 when empty.", age_s)
    quarantine = backlog.quarantine if backlog else None
    yield _gauge("quarantine_records", "Rows in the quarantine table, counted up to a limit.", quarantine)
    yield _gauge("in_flight_records", "Records sent but not settled.", status.in_flight)
    yield _gauge("in_flight_limit_records", "The setting limits.max_in_flight_records.", status.max_in_flight)
    yield _gauge("queued_records", "Records marked but not sent.", status.queued)
    yield _gauge("settled_records_per_second", "Settled records, over the last seconds.", status.rate_per_s)
    settled = status.delivered + totals.quarantined
    yield _counter("settled_records", "Records that left the outbox: published, or in quarantine.", settled)
    yield _counter("quarantined_records", "Records quarantined by this process.", totals.quarantined)
    text = "Records sent again although they may have been published; an upper bound, for faults of this process."
    yield _counter("repeats_suspected", text, totals.repeats_suspected)


def _latency(totals: Totals) -> Metric:
    latency = totals.latency
    counts = latency.counts_up_to([bound * 1000 for bound in LATENCY_BOUNDS_S])
    buckets = [(str(bound), float(count)) for bound, count in zip(LATENCY_BOUNDS_S, counts, strict=True)]
    return HistogramMetricFamily(
        "harvester_latency_seconds",
        "From a row's create_time to Kafka's acknowledgement, across two clocks.",
        buckets=[*buckets, ("+Inf", float(len(latency)))],
        sum_value=latency.total_ms() / 1000,
    )


def _shards(status: Status) -> Iterator[Metric]:
    shards = status.shards
    yield _gauge("shards", "Configured shard processes.", len(shards))

    def each(name: str, text: str, values: Iterable[float | None], *, counter: bool = False) -> Metric:
        labelled = ((str(shard.index), value) for shard, value in zip(shards, values, strict=True))
        return _labelled(name, text, "shard", labelled, counter=counter)

    ready = (float(shard.state is ShardState.READY) for shard in shards)
    yield each("shard_ready", "1 while the shard takes records.", ready)
    yield each("shard_queued_records", "Records marked but not sent.", (shard.queued for shard in shards))
    yield each("shard_in_flight_records", "Records sent but not settled.", (shard.in_flight for shard in shards))
    yield each("shard_parked_keys", "Keys that wait for a retry.", (shard.parked for shard in shards))
    cpu = (None if shard.cpu_percent is None else shard.cpu_percent / 100 for shard in shards)
    yield each("shard_cpu_ratio", "CPU, as a share of one core.", cpu)
    delivered = (shard.delivered for shard in shards)
    yield each("shard_published_records", "Records published.", delivered, counter=True)
    yield each("shard_retries", "Retried deliveries.", (shard.retries for shard in shards), counter=True)
    yield each("shard_errors", "Deliveries that Kafka refused.", (shard.errors for shard in shards), counter=True)
    stored = (shard.stored for shard in shards)
    yield each("shard_stored_records", "Records whose values were written to the store.", stored, counter=True)
    restarts = (shard.restarts for shard in shards)
    yield each("shard_restarts", "How often its process was replaced.", restarts, counter=True)


def _troubles(totals: Totals) -> Iterator[Metric]:
    now = ((source, float(source in totals.troubled)) for source in SOURCES)
    yield _labelled("trouble", "1 while this source is waited for or has failed.", "source", now)
    counts = ((source, totals.troubles.get(source, 0)) for source in SOURCES)
    yield _labelled("troubles", "How often a trouble of this source began.", "source", counts, counter=True)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"harvester_{name}", text)
    if value is not None:
        family.add_metric([], float(value))
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"harvester_{name}", text, value=float(value))


def _labelled(
    name: str, text: str, label: str, values: Iterable[tuple[str, float | None]], *, counter: bool = False
) -> Metric:
    kind = CounterMetricFamily if counter else GaugeMetricFamily
    family = kind(f"harvester_{name}", text, labels=[label])
    for which, value in values:
        if value is not None:
            family.add_metric([which], value)
    return family


_ENDED = frozenset({State.STOPPED, State.FAILED})


class StatusSource(Protocol):
    """The source of snapshots: `harvester.Harvester`. All methods except `unready` return at once."""

    def status(self) -> Status: ...

    def totals(self) -> Totals: ...

    def is_working(self) -> bool: ...

    def unready(self) -> str | None: ...


class Pages:
    """A harvester's routes: files of the status page, and answers based on its latest snapshot."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def routes(self) -> dict[tuple[str, str], Route]:
        """By method and path."""
        folder = files(__package__)
        routes = {
            "/": _file(folder / "status.html", "text/html"),
            "/status.js": _file(folder / "status.js", "text/javascript"),
            "/status.css": _file(folder / "status.css", "text/css"),
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/leader": self._leadership,
            "/status": lambda _request: Response.json(200, to_json(self._source.status())),
        }
        return {("GET", path): route for path, route in routes.items()}

    def _metrics(self, _request: Request) -> Response:
        return Response(200, CONTENT_TYPE_LATEST, expose(self._source.status(), self._source.totals()))

    def _health(self, _request: Request) -> Response:
        """Whether a restart would help: it would not if the relay's threads make progress."""
        if self._source.is_working():
            return Response.text(200, "ok\n")
        state = self._source.status().state
        return Response.text(503, f"{state.value}\n" if state in _ENDED else "a thread of the relay is stuck\n")

    def _readiness(self, _request: Request) -> Response:
        """Whether it leads or could take over: it is a member of the group, and its servers answer."""
        unready = self._source.unready()
        status = self._source.status()
        why = unready
        if unready in (None, status.waits_for):
            why = status.problem or awaited(status)
        text = f"{status.state.value}: {why}\n" if why else f"{status.state.value}\n"
        return Response.text(200 if unready is None else 503, text)

    def _leadership(self, _request: Request) -> Response:
        """Whether it currently leads and is trusted."""
        status = self._source.status()
        leads = status.leader_id is not None and status.term is not None
        leader_id = None if status.leader_id is None else str(status.leader_id)
        return Response.json(200 if leads else 503, {"leader": leads, "term": status.term, "leader_id": leader_id})


def _file(file: Traversable, kind: str) -> Route:
    response = Response(200, f"{kind}; charset=utf-8", file.read_bytes())
    return lambda _request: response
