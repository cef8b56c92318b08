"""The examples of docs/consuming.md run."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import psycopg
import pytest
from confluent_kafka import Producer
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span

import harvester
from harvester import AsyncCoordinatedConsumer, CoordinatedConsumer
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import fill
from tests.support.servers import Servers

pytestmark = pytest.mark.servers

PAGE = (Path(__file__).parents[2] / "docs" / "consuming.md").read_text(encoding="utf-8")
RECORDS = 20


class Example:
    """Runs the block that contains some words, for a topic with records and a group of its own."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.bootstrap, self.topic, self.group = bootstrap, topic, uuid.uuid4().hex[:8]
        fill(ConsumerSettings(kafka={"bootstrap.servers": bootstrap}, group="", topics=(topic,)), RECORDS)
        self.names: dict[str, Any] = {"bootstrap": bootstrap}

    @property
    def settings(self) -> ConsumerSettings:
        """Those that the page's first block makes."""
        return ConsumerSettings(kafka={"bootstrap.servers": self.bootstrap}, group=self.group, topics=(self.topic,))

    def run(self, containing: str, **names: Any) -> dict[str, Any]:
        (found,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if containing in text]
        text = found.replace('"orders"', repr(self.topic)).replace('"billing"', repr(self.group))
        self.names |= names
        exec(compile(text, "consuming.md", "exec"), self.names)
        return self.names

    def until(self, all_came: Callable[[], bool]) -> Callable[..., None]:
        """What a handler calls: ends the consumer once that is so."""

        def look(*_: Any) -> None:
            if all_came():
                self.names["consumer"].stop()

        return look


@pytest.fixture
def example(servers: Servers, topic: str) -> Example:
    return Example(servers.bootstrap, topic)


def test_the_first_example_prints_each_record(example: Example) -> None:
    printed: list[tuple[bytes, bytes]] = []
    stop = example.until(lambda: len(printed) == RECORDS)

    def display(key: bytes, value: bytes) -> None:
        printed.append((key, value))
        stop()

    example.run("def handle(record):", print=display)
    assert sorted(int(value) for _, value in printed) == list(range(RECORDS))


def test_the_loop_is_given_each_record(example: Example) -> None:
    handled: list[int] = []
    stop = example.until(lambda: len(handled) == RECORDS)

    def handle(record: Any) -> None:
        handled.append(int(record.value()))
        stop()

    example.run("with CoordinatedConsumer(settings)", handle=handle)
    assert sorted(handled) == list(range(RECORDS))


def test_the_event_loop_is_given_each_record(example: Example) -> None:
    handled: list[int] = []

    class Watched(AsyncCoordinatedConsumer):
        """Ends once all records were committed."""

        async def commit(self, record: Any) -> None:
            await super().commit(record)
            if len(handled) == RECORDS:
                self.stop()

    async def handle(record: Any) -> None:
        handled.append(int(record.value()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harvester, "AsyncCoordinatedConsumer", Watched, raising=False)
        example.run("async for record in consumer", settings=example.settings, handle_async=handle)
    assert sorted(handled) == list(range(RECORDS))


def test_an_application_handles_records_as_long_as_it_runs(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI is none of our dependencies; of it, only that the lifespan is entered and left is played."""
    handled: list[int] = []

    async def handle(record: Any) -> None:
        handled.append(int(record.value()))

    monkeypatch.setitem(sys.modules, "fastapi", cast("Any", SimpleNamespace(FastAPI=SimpleNamespace)))
    app = example.run(
        "FastAPI", settings=example.settings, handle_async=handle, AsyncCoordinatedConsumer=AsyncCoordinatedConsumer
    )["app"]

    async def serve() -> None:
        async with app.lifespan(app):
            async with asyncio.timeout(60):
                while len(handled) < RECORDS:
                    await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert sorted(handled) == list(range(RECORDS))


def test_settings_from_a_table_and_from_a_plain_consumer_are_the_same_but_for_out_of_range(example: Example) -> None:
    settings = example.run("from_table")["settings"]
    assert (settings.group, settings.topics, settings.on_error) == (example.group, (example.topic,), "dead-letter")
    assert settings.out_of_range == "earliest"


def test_values_are_read_and_what_is_none_goes_to_the_dead_letter_topic(example: Example) -> None:
    printed: list[Any] = []
    producer = Producer({"bootstrap.servers": example.bootstrap})
    producer.produce(example.topic, key=b"k", value=b'{"total": 99}')
    producer.flush(30)

    class Watched(CoordinatedConsumer):
        """Ends once all records were committed."""

        def commit(self, record: Any) -> None:
            super().commit(record)
            if self.statistics().given_up == RECORDS and printed:
                self.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harvester, "CoordinatedConsumer", Watched, raising=False)
        example.run("handle_order", print=lambda *shown: printed.append(shown))
    assert printed == [(b"k", 99)]


def test_the_record_that_fails_is_tried_three_times(example: Example) -> None:
    handled: list[int] = []
    stop = example.until(lambda: len(handled) == RECORDS + 2)

    def handle(record: Any) -> None:
        handled.append(int(record.value()))
        stop()
        if handled[-1] == 7:
            raise ValueError

    names = example.run("attempts=3", handle=handle)
    assert sorted(handled) == sorted([*range(RECORDS), 7, 7])
    assert names["consumer"].statistics().failures == 3


def test_batches_go_through_the_inbox(example: Example, empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE ledger (entry text)")

        def entries() -> list[str]:
            return [entry for (entry,) in connection.execute("SELECT entry FROM ledger").fetchall()]

        class Watched(CoordinatedConsumer):
            """Ends once all expected effects are there."""

            def commit(self, record: Any) -> None:
                super().commit(record)
                if len(entries()) == expected:
                    self.stop()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(harvester, "CoordinatedConsumer", Watched, raising=False)
            expected = RECORDS
            example.run("handle_batch", connection=connection)
            assert sorted(map(int, entries())) == list(range(RECORDS))
            # A database that is restored knows only the first record of each partition; its table is as young.
            connection.execute("DELETE FROM ledger")
            connection.execute("UPDATE harvester_inbox SET next_offset = 1, version = 1, generation = 1")
            expected = RECORDS - 4
            example.run("handle_batch", connection=connection)
        assert len(entries()) == len(set(entries())) == RECORDS - 4


def test_arrow_batches_come_until_nothing_is_left(example: Example) -> None:
    printed: list[dict[str, int]] = []

    def are_all_there() -> bool:
        return sum(row["value_count"] for row in printed) == RECORDS

    class Patient(CoordinatedConsumer):
        """On a busy machine it may take long until all partitions are claimed."""

        def consume_arrow(self, most: int, timeout_s: float) -> Any:
            return super().consume_arrow(most, timeout_s if are_all_there() else 60.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(harvester, "CoordinatedConsumer", Patient, raising=False)
        names = example.run("consume_arrow", print=printed.extend)
    assert are_all_there()
    settings = names["consumer"].settings
    with CoordinatedConsumer(settings) as successor:
        assert successor.consume(1, 3.0) == [], "all of it is committed"


def test_metrics_and_traces(example: Example) -> None:
    seen: list[Any] = []
    stop = example.until(lambda: len(seen) == RECORDS)

    def handle(record: Any) -> None:
        assert get_current_span().is_recording()
        seen.append(record)
        stop()

    previous = trace.get_tracer_provider()
    with patch.object(trace, "_TRACER_PROVIDER", TracerProvider()):
        assert previous is not trace.get_tracer_provider()
        consumer = CoordinatedConsumer(
            kafka={"bootstrap.servers": example.bootstrap}, group=example.group, topics=[example.topic]
        )
        names = example.run("REGISTRY.register", consumer=consumer)
        try:
            example.run("traced(", handle=handle)
            who = {"group": example.group, "client": consumer.client.id}
            assert names["REGISTRY"].get_sample_value("harvester_consumer_processing_seconds_count", who) == RECORDS
        finally:
            for each in [each for each in names["REGISTRY"]._collector_to_names if hasattr(each, "_consumer")]:
                names["REGISTRY"].unregister(each)
