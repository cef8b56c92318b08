"""What Prometheus is told of a coordinated consumer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.settings import ConsumerSettings
from harvester.http.consumers import ConsumerMetrics
from tests.support.coordinated import fill, settings
from tests.support.wait import eventually

__all__ = ["settings"]


def test_counts_follow_the_consumer_until_it_is_closed(settings: ConsumerSettings) -> None:
    fill(settings, 60)
    registry = CollectorRegistry()
    with CoordinatedConsumer(settings) as consumer:
        who = {"group": settings.group, "client": consumer.client.id}
        registry.register(ConsumerMetrics(consumer))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"harvester_consumer_{name}", {**who, **labels})

        def lag() -> list[float | None]:
            return [value("lag_records", topic=settings.topics[0], partition=str(each)) for each in range(4)]

        assert value("records_total") == 0
        for _, record in zip(range(60), consumer, strict=False):
            consumer.commit(record)
        assert value("records_total") == 60
        assert value("claims") == value("claims_made_total", outcome="won") == 4
        eventually(lambda: lag() == [0, 0, 0, 0], what="no lag")
        assert value("coordination_messages_total", kind="ClaimingPartition") == 4
        assert (value("coordination_bytes_total") or 0) > 4 * 100
    assert value("claims") == 0
    assert lag() == [None] * 4
    assert value("claims_ended_total", how="released") == 4


def test_failures_retries_dead_letters_and_processing_time_are_counted(settings: ConsumerSettings) -> None:
    fill(settings, 40)
    registry = CollectorRegistry()
    consumer = CoordinatedConsumer(replace(settings, on_error="dead-letter", attempts=3, backoff_s=0.01))
    registry.register(ConsumerMetrics(consumer))
    who = {"group": settings.group, "client": consumer.client.id}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"harvester_consumer_{name}", {**who, **labels})

    handled: list[Any] = []
    seen: dict[str, float] = {}

    def handle(record: Any) -> None:
        if record.offset() == 2:
            age = value("lag_seconds", topic=record.topic(), partition=str(record.partition()))
            seen["lag"] = max(seen.get("lag", 0), age or 0)
            seen["parked"] = max(seen.get("parked", 0), value("parked_keys") or 0)
            raise ValueError("poison")
        handled.append(record)

    def stop_at_the_end() -> None:
        try:
            eventually(lambda: len(handled) == 36 and value("given_up_total", how="dead-letter") == 4, what="all of it")
        finally:
            consumer.stop()

    watching = threading.Thread(target=stop_at_the_end)
    watching.start()
    consumer.run(handle)
    watching.join()
    count = 4  # partitions
    assert seen["parked"]
    assert seen["lag"] < 60
    assert value("failures_total") == 3 * count
    assert value("retries_total") == 2 * count
    assert value("given_up_total", how="skip") == 0
    assert value("parked_keys") == 0
    calls = value("processing_seconds_count")
    assert calls == 40 + 2 * count == value("processing_seconds_bucket", le="+Inf")
    assert 0 < (value("processing_seconds_sum") or 0) < 60


def test_an_asynchronous_consumer_has_the_same_metrics(settings: ConsumerSettings) -> None:
    fill(settings, 20)

    registry, seen = CollectorRegistry(), list[float | None]()
    consumer = AsyncCoordinatedConsumer(settings)

    async def handle(_: Any) -> None:
        if not seen:
            registry.register(ConsumerMetrics(consumer))  # now it has begun
        who = {"group": settings.group, "client": consumer.client.id}
        seen.append(registry.get_sample_value("harvester_consumer_processing_seconds_count", who))
        if len(seen) == 20:
            consumer.stop()

    asyncio.run(consumer.run(handle))
    assert seen == list(range(20))
