"""Continues traces: a record whose headers carry a trace context is published in a producer span of that trace.

    row's headers ─extract─▶ parent ─▶ span "send <topic>" ─inject─▶ the Kafka record's headers

`TracingProducer` wraps a shard's producer, so tracing costs nothing when it is off. A record without a trace context is
passed on unchanged; so are the other headers, including `baggage`. Each attempt is a separate span; it ends with the
delivery report, in a transaction with the transaction. Sampling and destination of spans are defined by the environment
(OTEL_…), as usual: see docs/operations.md. `traced` continues the trace at a consumer. An extra: `[otel]`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib.metadata import entry_points
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from opentelemetry.baggage import clear as without_baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagate import get_global_textmap
from opentelemetry.propagators.textmap import Getter, Setter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace import TracerProvider as AnyProvider

from harvester.errors import ConfigurationError, Problem

Provider = TracerProvider
Headers = list[tuple[str, bytes | None]]
Report = Callable[[Any, Any], None]  # error or None, message
F = TypeVar("F", bound=Callable[[Any], Any])

_EXPORTERS = "opentelemetry_traces_exporter"  # the entry points for OTEL_TRACES_EXPORTER
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_FLUSH_S = 2.0
# We add nothing to baggage: it is passed on byte for byte. If rewritten, its properties and whatever exceeds the
# propagator's limits would change.
_BAGGAGE = W3CBaggagePropagator().fields


def make_provider(instance: str, environ: Mapping[str, str] = os.environ) -> TracerProvider:
    """A provider configured by the environment. Raises ConfigurationError for an exporter that is not installed."""
    attributes = {"service.instance.id": instance}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = "harvester"
    provider = TracerProvider(resource=Resource.create(attributes))
    for name in exporter_names(environ):
        provider.add_span_processor(BatchSpanProcessor(_exporter_class(name)()))
    return provider


def exporter_names(environ: Mapping[str, str]) -> list[str]:
    """The exporters in OTEL_TRACES_EXPORTER (default: `otlp`), as names of entry points."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp = _PROTOCOLS.get(protocol or "http/protobuf", "otlp_proto_http")
    named = [name.strip() for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")]
    return [otlp if name == "otlp" else name for name in named if name not in ("", "none")]


def check_tracing(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigurationError if spans could not be exported."""
    for name in exporter_names(environ):
        _exporter_class(name)


def _exporter_class(name: str) -> Any:
    for entry in entry_points(group=_EXPORTERS, name=name):
        return entry.load()
    known = ", ".join(sorted({entry.name for entry in entry_points(group=_EXPORTERS)}))
    problem = Problem("OTEL_TRACES_EXPORTER", f"names {name!r}, which is not installed", known)
    raise ConfigurationError([problem], hint="pip install 'outbox-harvester[otel]', or the exporter's own package")


def flush(provider: TracerProvider) -> None:
    """Export what is left, for at most two seconds: an unavailable collector must not delay the end."""
    thread = threading.Thread(target=provider.force_flush, name="spans", daemon=True)
    thread.start()
    thread.join(_FLUSH_S)


class _FromHeaders(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = [value.decode("utf-8", "replace") for name, value in carrier if name.lower() == key and value]
        return values or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, _ in carrier]


class _IntoHeaders(Setter[Headers]):
    def set(self, carrier: Headers, key: str, value: str) -> None:
        carrier.append((key, value.encode()))


_GETTER, _SETTER = _FromHeaders(), _IntoHeaders()


class TracingProducer:
    """A producer with the interface of confluent_kafka.Producer, as far as shards use it by name."""

    def __init__(self, producer: Any, provider: TracerProvider, *, transactional: bool) -> None:
        self._producer, self._transactional = producer, transactional
        self._tracer = provider.get_tracer("harvester")
        self._map = get_global_textmap()
        self._fields = frozenset(self._map.fields) - _BAGGAGE
        self._open: list[Span] = []  # spans of the transaction
        self._none = Context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        on_delivery: Report | None = None,
        callback: Report | None = None,
        timestamp: int = 0,
        headers: Headers | None = None,
    ) -> None:
        """Like the original, with positional arguments."""
        begun = self._begin(topic, key, headers) if headers else None
        if begun is None:
            self._producer.produce(topic, value, key, partition, on_delivery, callback, timestamp, headers)
            return
        span, parent = begun
        given = self._replaced(headers or [], set_span_in_context(span, without_baggage(parent)))
        try:
            report = partial(self._reported, span, on_delivery)
            self._producer.produce(topic, value, key, partition, report, callback, timestamp, given)
        except BaseException as error:
            _end(span, str(error))
            raise
        if self._transactional:
            self._open.append(span)

    def commit_transaction(self, *arguments: Any) -> None:
        """Like the original."""
        try:
            self._producer.commit_transaction(*arguments)
        except BaseException as error:
            self._end_all(f"not known to be committed: {error}")
            raise
        self._end_all(None)

    def abort_transaction(self, *arguments: Any) -> None:
        """Like the original."""
        self._end_all("the transaction was aborted")
        self._producer.abort_transaction(*arguments)

    def purge(self, *arguments: Any) -> None:
        """Like the original; what is purged is not sent."""
        self._end_all("the producer was given up")
        self._producer.purge(*arguments)

    def _begin(self, topic: str, key: bytes | None, headers: Headers) -> tuple[Span, Context] | None:
        """A span below the one in the headers, and their whole context; None if they have none."""
        parent = self._map.extract(headers, self._none, _GETTER)
        if not get_current_span(parent).get_span_context().is_valid:
            return None
        attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "send",
            "messaging.operation.name": "send",
            "messaging.destination.name": topic,
        }
        if key is not None:
            attributes["messaging.kafka.message.key"] = key.decode("utf-8", "replace")
        return self._tracer.start_span(f"send {topic}", parent, SpanKind.PRODUCER, attributes), parent

    def _replaced(self, headers: Headers, context: Context) -> Headers:
        """Headers with this context in place of their own: the harvester's header stays the last one."""
        is_old = [name.lower() in self._fields for name, _ in headers]
        first, injected = is_old.index(True) if any(is_old) else 0, Headers()
        self._map.inject(injected, context, _SETTER)
        kept = [header for header, old in zip(headers, is_old, strict=True) if not old]
        return [*kept[:first], *injected, *kept[first:]]

    def _reported(self, span: Span, on_delivery: Report | None, error: Any, message: Any) -> None:
        if error is not None:
            span.set_attribute("error.type", error.name())
            _end(span, error.str())
        else:
            partition, offset = message.partition(), message.offset()
            if partition is not None:
                span.set_attribute("messaging.destination.partition.id", str(partition))
            if offset is not None:
                span.set_attribute("messaging.kafka.offset", offset)
            if not self._transactional:
                span.end()
        if on_delivery is not None:
            on_delivery(error, message)

    def _end_all(self, error: str | None) -> None:
        spans, self._open = self._open, []
        for span in spans:
            _end(span, error)


def traced(handler: F, *, group: str | None = None, provider: AnyProvider | None = None) -> F:
    """A consumer's handler, function or coroutine function, with a span "process <topic>" for each call.

    The span of a record continues the trace in its headers, and is the current one while the handler runs; the span of
    a list has a link to each of those traces. The handler's exceptions are recorded and propagated. `provider` defaults
    to the application's own; `group` becomes an attribute.
    """
    tracer = (provider or get_tracer_provider()).get_tracer("harvester")

    def span(given: Any) -> AbstractContextManager[Span]:
        records: Sequence[Any] = given if isinstance(given, list) else [given]
        parents = [get_global_textmap().extract(list(each.headers() or ()), Context(), _GETTER) for each in records]
        attributes: dict[str, str | int] = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
        }
        topics = {each.topic() for each in records}
        topic = topics.pop() if len(topics) == 1 else "several topics"
        attributes["messaging.destination.name"] = topic
        if group is not None:
            attributes["messaging.consumer.group.name"] = group
        if given is not records:
            attributes["messaging.destination.partition.id"] = str(given.partition())
            attributes["messaging.kafka.offset"] = given.offset()
            return tracer.start_as_current_span(f"process {topic}", parents[0], SpanKind.CONSUMER, attributes)
        attributes["messaging.batch.message_count"] = len(records)
        contexts = [get_current_span(parent).get_span_context() for parent in parents]
        links = [Link(context) for context in contexts if context.is_valid]
        return tracer.start_as_current_span(f"process {topic}", None, SpanKind.CONSUMER, attributes, links)

    async def awaited(given: Any) -> Any:
        with span(given):
            return await handler(given)

    def called(given: Any) -> Any:
        with span(given):
            return handler(given)

    return cast("F", wraps(handler)(awaited if iscoroutinefunction(handler) else called))


def _end(span: Span, error: str | None) -> None:
    if span.is_recording():  # a span that has ended does not
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
