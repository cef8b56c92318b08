"""Reports what a relay does, and decides nothing: logs, metrics, traces, and service manager notifications.

    logging   formats lines, for people on a terminal and as JSON elsewhere; also those of the Kafka client
    metrics   counts acknowledged records and troubles, and derives rates: `Meter` for hosts, `RateHistory` for the
              dashboard, `Tally` and `Totals` for monitoring
    latency   histograms with a bounded error, small enough to be sent by shards and added up
    process   CPU use of the shards
    notify    sd_notify: ready, status, watchdog, reload
    tracing   continues traces that records carry; the extra `[otel]`

`metrics` and `latency` are pure: times are passed in. A failure here never fails the relay: if a log's reader goes
away, the output ends; a service manager that does not listen is not notified; an unavailable collector gets no spans.
"""

from __future__ import annotations

from harvester.errors import ConfigurationError, Problem


def require_tracing() -> None:
    """Raises ConfigurationError if spans cannot be created or exported."""
    try:
        from harvester.telemetry.tracing import check_tracing
    except ModuleNotFoundError as error:
        problem = Problem("tracing.enabled", f"needs {error.name}, which is not installed", "or false")
        raise ConfigurationError([problem], hint="pip install 'outbox-harvester[otel]'") from None
    check_tracing()
