"""Where a coordinated consumer is in its partitions, and how an application changes that, on a real broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import Producer

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Claimed, Lost
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerUnavailable
from tests.support.coordinated import settings
from tests.support.handled import Handled, Start, fill_keys, start
from tests.support.proxy import Proxy
from tests.support.wait import eventually

__all__ = ["settings", "start"]

BEGAN = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_position_moves_with_each_record(settings: ConsumerSettings, at_most_once: bool) -> None:
    topic = settings.topics[0]
    fill_keys(settings, 10, 10, partition=2)
    changed: dict[str, Any] = {"batch_records": 30, "at_most_once": at_most_once}
    with CoordinatedConsumer(kafka=settings.kafka, group=settings.group, topics=topic, heartbeat_interval_s=4,
                             coordination_topic=settings.coordination_topic, **changed) as consumer:  # fmt: skip
        assert consumer.position(topic, 2) is None
        for expected in range(100):
            record: Any = eventually(lambda: consumer.poll(0.05) or None, what="a record")
            assert record.offset() == expected
            consumer.commit(record)
            assert consumer.position(topic, 2) == expected + 1
        assert consumer.poll(0.05) is None
        assert (consumer.position(topic, 2), consumer.position(topic, 9)) == (100, None)


def test_a_seek_back_hands_records_out_again_and_lasts(settings: ConsumerSettings, start: Start) -> None:
    topic = settings.topics[0]
    fill_keys(settings, 1, 100, partition=2)
    handled = Handled()

    def handle(record: Any) -> None:
        handled(record)
        if len(handled.values) == 100:
            runner.consumer.seek(topic, 2, 30)

    runner = start(handle)
    eventually(lambda: len(handled.values) == 170, what="the records from there on")
    assert handled.values[100:] == [f"0-{number}" for number in range(30, 100)]
    assert len([event for event in runner.told(Lost) if event.partition == 2]) == 1
    assert len([event for event in runner.told(Claimed) if event.partition == 2]) == 2
    runner.stop()
    fill_keys(settings, 1, 1, partition=2)
    second = Handled()
    start(second)
    eventually(lambda: bool(second.values), what="what is new")
    assert second.values == ["0-0"]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_seek_forward_leaves_records_out(settings: ConsumerSettings, start: Start, at_most_once: bool) -> None:
    """At most once, records that are ours already come no more."""
    fill_keys(settings, 1, 100, partition=2)
    handled = Handled()

    def handle(record: Any) -> None:
        handled(record)
        if len(handled.values) == 10:
            runner.consumer.seek(settings.topics[0], 2, 95)

    runner = start(handle, at_most_once=at_most_once)
    eventually(lambda: "0-99" in handled.values, what="the last record")
    assert handled.values == [f"0-{number}" for number in (*range(10), *range(95, 100))]


def test_a_partition_that_is_not_held_is_not_sought(settings: ConsumerSettings) -> None:
    with CoordinatedConsumer(settings) as consumer, pytest.raises(ValueError, match="is not held"):
        consumer.seek(settings.topics[0], 2, 0)


def test_a_position_that_did_not_arrive_is_not_said_to_be_set(settings: ConsumerSettings) -> None:
    """The claim ends when the brokers are away, as it does when a position was set."""
    topic = settings.topics[0]
    fill_keys(settings, 1, 1, partition=2)
    with Proxy(settings.kafka["bootstrap.servers"], kafka=True) as link:
        link.open()
        away = replace(settings, kafka={**settings.kafka, "bootstrap.servers": link.address})
        with CoordinatedConsumer(away) as consumer:
            eventually(lambda: consumer.poll(0.05), what="a record")
            link.cut()
            with pytest.raises(BrokerUnavailable, match="may not have been set"):
                consumer.seek(topic, 2, 0)
            link.open()


def test_offsets_of_times(settings: ConsumerSettings) -> None:
    topic = settings.topics[0]
    producer = Producer(dict(settings.kafka))
    for number in range(10):
        at = BEGAN + timedelta(seconds=number)
        producer.produce(topic, value=str(number).encode(), partition=1, timestamp=round(at.timestamp() * 1000))
    producer.flush(30)
    with CoordinatedConsumer(settings) as consumer:
        found = consumer.offsets_for_times({
            (topic, 1): BEGAN + timedelta(seconds=3.5), (topic, 2): BEGAN,
        })  # fmt: skip
        assert found == {(topic, 1): 4, (topic, 2): 0}
        assert consumer.offsets_for_times({(topic, 1): BEGAN + timedelta(hours=1)}) == {(topic, 1): 10}
