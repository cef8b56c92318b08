"""Traces that go on: a span of each publication below the writer's, and its context on the Kafka record."""

from __future__ import annotations

import gzip
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from opentelemetry.context import Context, get_value, set_value
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator, default_getter, default_setter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from harvester.errors import ConfigurationError
from harvester.telemetry import tracing
from harvester.telemetry.tracing import TracingProducer, check_tracing, exporter_names, make_provider
from tests.support.harvesting import Scene, wait_leads
from tests.support.hooks import Fault

pytest_plugins = ["tests.support.scenes"]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
HEADERS = [("kind", b"x"), ("traceparent", TRACEPARENT.encode()), ("tracestate", b"a=b"), ("last", b"y")]


class Message:
    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return 77


class Recorded:
    """What a TracingProducer gave to the producer inside of it. It stands for the client, whose answers a test cannot
    choose one by one; the real one is in the tests below."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raises: Exception | None = None

    def produce(self, *arguments: Any) -> None:
        if self.raises is not None:
            raise self.raises
        self.calls.append(arguments)

    def report(self, error: KafkaError | None = None) -> None:
        """Of the last record."""
        self.calls[-1][4](error, Message())

    def commit_transaction(self, _timeout_s: float) -> None:
        if self.raises is not None:
            raise self.raises

    def abort_transaction(self, _timeout_s: float) -> None: ...

    def purge(self) -> None: ...

    def flush(self) -> int:
        return 5


class Desk:
    def __init__(self, *, transactional: bool = False) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.inner = Recorded()
        self.producer = TracingProducer(self.inner, provider, transactional=transactional)
        self.reports: list[Any] = []

    def produce(self, headers: list[tuple[str, bytes | None]] | None) -> None:
        self.producer.produce(
            "orders", b"v", b"k", 1, lambda error, _message: self.reports.append(error), None, 0, headers
        )

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


def test_a_span_below_the_writers_and_its_context_on_the_record() -> None:
    desk = Desk()
    desk.produce([*HEADERS])
    assert desk.spans() == []  # not before the report
    desk.inner.report()
    (span,) = desk.spans()
    assert desk.reports == [None]
    assert span.name == "send orders"
    assert span.kind is SpanKind.PRODUCER
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.destination.name": "orders",
        "messaging.kafka.message.key": "k",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.offset": 77,
    }
    topic, value, key, partition, _, callback, timestamp, headers = desk.inner.calls[0]
    assert (topic, value, key, partition, callback, timestamp) == ("orders", b"v", b"k", 1, None, 0)
    assert (headers[0], headers[-1]) == (("kind", b"x"), ("last", b"y"))
    assert dict(headers[1:-1]) == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01".encode(),
        "tracestate": b"a=b",
    }


def test_baggage_goes_on_as_it_came() -> None:
    desk = Desk()
    baggage = [("Baggage", b"user=a%20b;secret, odd = 1"), ("baggage", b"not an entry"), ("baggage", None)]
    desk.produce([*HEADERS, *baggage])
    headers = desk.inner.calls[0][7]
    assert [header for header in headers if header[0].lower() == "baggage"] == baggage
    assert sum(name == "traceparent" for name, _ in headers) == 1


class Tenant(TextMapPropagator):
    """What an application may have besides: a header that is part of the context."""

    fields = {"tenant"}  # noqa: RUF012 - a property there

    def extract(self, carrier: Any, context: Context | None = None, getter: Any = default_getter) -> Context:
        return set_value("tenant", (getter.get(carrier, "tenant") or [""])[0], context)

    def inject(self, carrier: Any, context: Context | None = None, setter: Any = default_setter) -> None:
        setter.set(carrier, "tenant", str(get_value("tenant", context)))


def test_what_other_propagators_have_read_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CompositePropagator([TraceContextTextMapPropagator(), Tenant()])
    monkeypatch.setattr(tracing, "get_global_textmap", lambda: known)
    desk = Desk()
    desk.produce([*HEADERS, ("tenant", b"acme")])
    assert [value for name, value in desk.inner.calls[0][7] if name == "tenant"] == [b"acme"]


@pytest.mark.parametrize(
    "headers",
    [None, [], [("kind", b"x")], [("traceparent", b"nonsense \xff")], [("traceparent", None)],
     [("traceparent", f"00-{'0' * 32}-{PARENT}-01".encode())]],
)  # fmt: skip
def test_without_a_context_a_record_is_passed_on_as_it_is(headers: list[tuple[str, bytes | None]] | None) -> None:
    desk = Desk()
    desk.produce(headers)
    desk.inner.report()
    assert desk.inner.calls[0][7] is headers
    assert desk.reports == [None]
    assert desk.spans() == []


def test_a_trace_that_is_not_sampled_goes_on_unsampled() -> None:
    desk = Desk()
    desk.produce([("traceparent", f"{TRACEPARENT[:-2]}00".encode())])
    desk.inner.report()
    assert desk.spans() == []
    ((_, context),) = desk.inner.calls[0][7]
    assert context.startswith(f"00-{TRACE}-".encode())
    assert context.endswith(b"-00")


def test_a_failed_attempt_has_its_error() -> None:
    desk = Desk()
    desk.produce([*HEADERS])
    desk.inner.report(KafkaError(KafkaError._MSG_TIMED_OUT))
    desk.inner.raises = BufferError("full")
    with pytest.raises(BufferError):
        desk.produce([*HEADERS])
    timed_out, refused = desk.spans()
    assert timed_out.status.status_code is StatusCode.ERROR
    assert (timed_out.attributes or {})["error.type"] == "_MSG_TIMED_OUT"
    assert (refused.status.status_code, refused.status.description) == (StatusCode.ERROR, "full")


@pytest.mark.parametrize("end", ["commit", "abort", "purge", "unclear"])
def test_in_a_transaction_spans_end_with_it(end: str) -> None:
    desk = Desk(transactional=True)
    desk.produce([*HEADERS])
    desk.produce([*HEADERS])
    assert desk.spans() == []
    if end == "commit":
        desk.producer.commit_transaction(1.0)
    elif end == "abort":
        desk.producer.abort_transaction(1.0)
    elif end == "purge":
        desk.producer.purge()
    else:
        desk.inner.raises = KafkaException(KafkaError(KafkaError._TIMED_OUT))
        with pytest.raises(KafkaException):
            desk.producer.commit_transaction(1.0)
    expected = StatusCode.UNSET if end == "commit" else StatusCode.ERROR
    assert [span.status.status_code for span in desk.spans()] == [expected] * 2
    assert desk.producer.flush() == 5  # all else is the producer's own


def test_what_the_environment_says() -> None:
    assert exporter_names({}) == ["otlp_proto_http"]
    assert exporter_names({"OTEL_TRACES_EXPORTER": "none"}) == []
    assert exporter_names({"OTEL_TRACES_EXPORTER": "console, otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == [
        "console",
        "otlp_proto_grpc",
    ]
    check_tracing({"OTEL_TRACES_EXPORTER": "otlp,console"})
    with pytest.raises(ConfigurationError, match="'carrier-pigeon', which is not installed"):
        check_tracing({"OTEL_TRACES_EXPORTER": "carrier-pigeon"})
    named = make_provider("billing-1", {"OTEL_TRACES_EXPORTER": "none"}).resource.attributes
    assert (named["service.name"], named["service.instance.id"]) == ("harvester", "billing-1")


def add_traced(scene: Scene) -> None:
    """A row of the key `traced` that names a span."""
    scene.db.execute(
        """INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,
                               kafka_header_values) VALUES (now(), %s, 'traced', '1', %s, %s)""",
        (scene.topic, ["traceparent"], [TRACEPARENT]),
    )


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_spans_of_a_running_harvester(delivery: str, scene: Scene) -> None:
    """Two attempts of one record are two spans; the record in Kafka carries the context of the one that got through."""
    scene.plan.add(Fault(error="TOPIC_AUTHORIZATION_FAILED", key="traced"))
    env = {**scene.plan.env, "OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "billing"}
    with scene.cli(env=env, tracing={"enabled": True}, delivery=delivery, shards=1) as running:
        wait_leads(running)
        scene.add(("plain", "1"))
        add_traced(scene)
        scene.wait_left()
        assert running.stop() == 0
        spans = _spans("\n".join(running.stdout))
    published = {record.key: dict(record.headers) for record in scene.log()}
    assert "traceparent" not in published[b"plain"]
    assert [span["name"] for span in spans] == [f"send {scene.topic}"] * 2
    assert {span["parent_id"] for span in spans} == {f"0x{PARENT}"}
    assert [span["status"]["status_code"] for span in spans] == ["ERROR", "UNSET"]
    assert spans[1]["resource"]["attributes"]["service.name"] == "billing"
    sent = published[b"traced"]["traceparent"]
    assert sent is not None
    assert sent.decode() == f"00-{TRACE}-{spans[1]['context']['span_id'][2:]}-01"


def _spans(output: str) -> list[dict[str, Any]]:
    """The JSON objects that the console exporter printed between other lines, in the order of their beginning."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while (at := output.find('{\n    "name": "send ', at)) >= 0:
        span, at = decoder.raw_decode(output, at)
        found.append(span)
    return sorted(found, key=lambda span: str(span["start_time"]))


def test_spans_arrive_at_a_collector(scene: Scene) -> None:
    """By OTLP over HTTP, the exporter that is used unless the environment names another."""
    with _collector() as (url, received):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with scene.cli(env=env, tracing={"enabled": True}, shards=1) as running:
            wait_leads(running)
            add_traced(scene)
            scene.wait_left()
            path, resource, span = received.get(timeout=60)
            assert running.stop() == 0
    assert path == "/v1/traces"
    named = {each.key: each.value.string_value for each in resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("harvester", "test")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    (record,) = scene.log()
    assert dict(record.headers)["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01".encode()


@contextmanager
def _collector() -> Iterator[tuple[str, queue.Queue[tuple[str, Any, Any]]]]:
    """Where spans are sent to: (path, resource, span) of each that comes."""
    received: queue.Queue[tuple[str, Any, Any]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in group.scope_spans:
                    for span in scope.spans:
                        received.put((self.path, group.resource, span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_an_exporter_that_is_not_installed_is_an_error_of_the_configuration(scene: Scene) -> None:
    with scene.cli(env={"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, tracing={"enabled": True}) as running:
        assert running.wait() == 78
        assert "outbox-harvester[otel]" in running.output
        assert "Traceback" not in running.output
