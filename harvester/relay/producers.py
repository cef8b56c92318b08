"""A shard's producers: each with its client's log sent to the supervisor, and traced where that is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from harvester.relay.hooks import Hooks
from harvester.telemetry.client_log import ClientLog

if TYPE_CHECKING:
    from harvester.telemetry.tracing import Provider


class Producers:
    """See the module's text."""

    def __init__(self, hooks: Hooks, log: Callable[[int, str], None], traces: str | None) -> None:
        """`log` gets levels as of the module logging, and lines; `traces`: under which name to trace, if at all."""
        self._hooks = hooks
        self.log = ClientLog(log)
        self._tracing = _start_tracing(traces) if traces is not None else None

    def make(self, options: Mapping[str, Any]) -> Any:
        """One more. Its client's lines go to the log, or to a logger among the options."""
        producer = self._hooks.producer({"logger": self.log, **options})
        if self._tracing is None:
            return producer
        from harvester.telemetry.tracing import TracingProducer

        return TracingProducer(producer, self._tracing, transactional="transactional.id" in options)

    def flush_traces(self) -> None:
        """Those that are not exported yet."""
        if self._tracing is not None:
            from harvester.telemetry.tracing import flush

            flush(self._tracing)


def _start_tracing(name: str) -> Provider:
    from harvester.telemetry.tracing import make_provider

    return make_provider(name)
