"""What Prometheus is told of a coordinated consumer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

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
