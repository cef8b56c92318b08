"""The writer and the reader of the coordination topic, on a real broker."""

from __future__ import annotations

import uuid

from confluent_kafka import Producer

from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.log import CoordinationLog
from harvester.coordination.messages import ClaimingPartition, Client, Place, encode
from harvester.coordination.topic import ensure_coordination_topic
from harvester.coordination.world import World
from tests.support.coordinated import settings
from tests.support.wait import eventually

__all__ = ["settings"]


def test_a_writer_that_gets_nothing_through_is_replaced(settings: ConsumerSettings) -> None:
    """As after an outage that its client does not get over: here it asks at an address where nobody is."""
    ensure_coordination_topic(
        settings.coordination_topic, settings.kafka, settings.coordination_partitions, settings.timing.interval_ms
    )
    given_up: list[int] = []
    log = CoordinationLog(settings.coordination_topic, settings.kafka, lambda _, number: given_up.append(number), 1.0)
    log._writer = Producer({"bootstrap.servers": "127.0.0.1:1", "delivery.timeout.ms": 1000, "log_level": 0})
    place, client = Place("billing", "orders", 0), Client("one", uuid.uuid4().hex)
    log.begin({0: World.begin(settings.timing)})
    sent: list[bytes] = []
    read: list[bytes | None] = []

    def has_arrived() -> bool:
        message = ClaimingPartition(place, client, len(sent), None, None)
        sent.append(encode(message))
        log.append(0, message)
        read.extend(value for _, _, _, value in log.poll(0.1))
        return bool(read)

    eventually(has_arrived, 30, "a message")
    assert given_up[0] == 0
    assert read[0] in sent
    log.close(1)
