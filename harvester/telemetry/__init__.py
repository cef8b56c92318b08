"""Reports what a relay does, and decides nothing: logs, figures, traces, and word to the service manager.

    logging   formats lines, for people on a terminal and as JSON elsewhere; takes those of the Kafka client, too
    metrics   counts acknowledged records and troubles, and derives rates: `Meter` for hosts, `RateHistory` for the
              dashboard, `Tally` and `Totals` for monitoring
    latency   histograms with a bounded error, small enough to be sent by shards and added up
    process   CPU use of the shards
    notify    sd_notify: ready, status, watchdog, reload
    tracing   continues traces that records carry; the extra `[otel]`

`metrics` and `latency` are pure: times are passed in. A failure here never fails the relay: a log's reader that goes
away ends the output, a service manager that does not listen is not told, a collector that is away gets no spans.
"""

from __future__ import annotations

from harvester.errors import ConfigurationError, Problem


def require_tracing() -> None:
    """Raises ConfigurationError where spans cannot be made or exported."""
    try:
        from harvester.telemetry.tracing import check_tracing
    except ModuleNotFoundError as error:
        problem = Problem("tracing.enabled", f"needs {error.name}, which is not installed", "or false")
        raise ConfigurationError([problem], hint="pip install 'outbox-harvester[otel]'") from None
    check_tracing()
