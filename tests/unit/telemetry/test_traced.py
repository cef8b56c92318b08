"""Handlers of a consumer in spans that continue the trace of their records."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from harvester.serializers import Json, Values
from harvester.telemetry.tracing import traced

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Record:
    at: int = 7
    given: Any = field(default_factory=lambda: [("traceparent", f"00-{TRACE}-{SPAN}-01".encode())])

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return self.at

    def value(self) -> bytes:
        return b"%d" % self.at

    def headers(self) -> Any:
        return self.given


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(spans))
    return made


def test_a_record_continues_its_trace(provider: TracerProvider, spans: InMemorySpanExporter) -> None:
    def handle(record: Record) -> int:
        assert format(get_current_span().get_span_context().trace_id, "032x") == TRACE
        return record.at

    assert traced(handle, group="billing", provider=provider)(Record()) == 7
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind) == ("process orders", SpanKind.CONSUMER)
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == SPAN
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka", "messaging.operation.type": "process", "messaging.operation.name": "process",
        "messaging.destination.name": "orders", "messaging.destination.partition.id": "3", "messaging.kafka.offset": 7,
        "messaging.consumer.group.name": "billing",
    }  # fmt: skip


def test_a_record_without_a_trace_begins_one(provider: TracerProvider, spans: InMemorySpanExporter) -> None:
    traced(lambda _: None, provider=provider)(Record(given=None))
    assert spans.get_finished_spans()[0].parent is None


def test_what_the_handler_raises_is_noted_and_comes_out(provider: TracerProvider, spans: InMemorySpanExporter) -> None:
    async def fail(_: Record) -> None:
        raise ValueError("poison")

    with pytest.raises(ValueError, match="poison"):
        asyncio.run(traced(fail, provider=provider)(Record()))
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]
    assert span.end_time is not None


def test_the_span_of_a_coroutine_that_is_given_values_is_current_until_it_ends(
    provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    async def fail(value: int | None, record: Record) -> None:
        assert (value, record.at) == (7, 7)
        await asyncio.sleep(0)
        assert format(get_current_span().get_span_context().trace_id, "032x") == TRACE
        raise ValueError("poison")

    with pytest.raises(ValueError, match="poison"):
        asyncio.run(traced(Values(Json()).handler(fail), provider=provider)(Record()))
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_a_list_links_to_each_trace(provider: TracerProvider, spans: InMemorySpanExporter) -> None:
    traced(lambda _: None, provider=provider)([Record(1), Record(2), Record(3, given=None)])
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert [format(link.context.span_id, "016x") for link in span.links] == [SPAN, SPAN]
    assert dict(span.attributes or {})["messaging.batch.message_count"] == 3
