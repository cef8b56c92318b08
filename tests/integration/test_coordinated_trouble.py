"""What goes wrong under a running consumer, on a real broker: it ends or recovers, and loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from harvester.clock import clock_s
from harvester.coordination import fetcher, offsets
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.errors import CoordinationTopicError
from harvester.coordination.offsets import GroupOffsets
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import ensure_coordination_topic
from harvester.errors import BrokerError, BrokerUnavailable
from tests.support.coordinated import INTERVAL_S, Join, admin, failure, fill, heartbeats, held, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]


class Denied:
    """The client of a real consumer; among the records that it brings there is a right that was taken away, once.

    The broker of the tests knows no rights.
    """

    def __init__(self, client: Consumer, topic: str) -> None:
        self._client, self._topic, self._error = client, topic, True
        self.brought = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def poll(self, timeout_s: float) -> Message | None:
        message = self._client.poll(timeout_s)
        self.brought += message is not None
        return message

    def consume(self, most: int, timeout_s: float) -> list[Message]:
        messages = self._client.consume(most, timeout_s)
        self.brought += len(messages)
        if self._error:
            self._error = False
            messages.append(Message(topic=self._topic, partition=0, error=_code("TOPIC_AUTHORIZATION_FAILED")))
        return messages


def _code(name: str) -> KafkaError:
    return KafkaError(getattr(KafkaError, name))


def test_an_error_among_records_loses_none_for_who_goes_on(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 200)
    seen: list[int] = []
    consumer = CoordinatedConsumer(settings)
    client: Any = Denied(consumer._fetcher._data, settings.topics[0])
    consumer._fetcher._data = client

    def denied() -> bool:
        try:
            record = consumer.poll(0.05)
        except BrokerError:
            return True
        if record is not None:
            seen.append(int(record.value()))
            consumer.commit(record)
        return False

    eventually(denied, what="an error")
    assert client.brought > 0
    with consumer._session.lock:
        waiting = sum(len(buffer.fetched) for buffer in consumer._session.buffer.values())
    assert len(seen) + waiting == client.brought
    assert all(denied() for _ in range(20))
    consumer.close()
    other = join()
    eventually(lambda: len(seen) + len(other.seen) == 200, what="all records")
    assert sorted(seen + other.seen) == list(range(200))


def test_a_coordination_topic_that_was_made_anew_ends_the_consumer(settings: ConsumerSettings, join: Join) -> None:
    one = join()
    eventually(lambda: held(one) == [4] and heartbeats(one.consumer) > 8, what="claims")
    name = settings.coordination_topic
    client = admin(settings)  # which answers as long as it is there
    client.delete_topics([name], operation_timeout=30)[name].result(60)

    def made() -> bool:
        ensure_coordination_topic(name, settings.kafka, settings.coordination_partitions, settings.timing.interval_ms)
        return name in client.list_topics(timeout=10).topics

    eventually(lambda: _unless_broken(made), what="another topic of that name")
    error = failure(one, CoordinationTopicError)
    assert "recreated" in str(error)


def test_a_coordination_topic_that_takes_no_messages_ends_the_consumer_with_the_cause(
    settings: ConsumerSettings, join: Join
) -> None:
    one = join()
    eventually(lambda: held(one) == [4], what="claims")
    change = ConfigEntry("max.message.bytes", "50", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, settings.coordination_topic, incremental_configs=[change])
    client = admin(settings)
    client.incremental_alter_configs([resource])[resource].result(30)
    error = failure(one, CoordinationTopicError)
    assert isinstance(error, CoordinationTopicError)
    assert settings.coordination_topic in str(error)
    assert "max.message.bytes" in str(error.hint)
    with pytest.raises(CoordinationTopicError, match=r"max.message.bytes is 50"):
        ensure_coordination_topic(settings.coordination_topic, settings.kafka, 2, settings.timing.interval_ms)


def _unless_broken(ask: Any) -> bool:
    try:
        return bool(ask())
    except (BrokerError, KafkaException):
        return False


def test_offsets_that_nobody_takes_are_neither_waited_for_nor_paid_for(
    settings: ConsumerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is at the address until there is another writer. What was let go must not take a core meanwhile."""
    mirror = GroupOffsets(settings)
    bootstrap = mirror._options["bootstrap.servers"]
    away = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    mirror._writer = unanswered = offsets._Writer({**mirror._options, **away})
    place = GroupPartition(settings.group, settings.topics[0], 0)
    mirror.mirror({place: 4})
    began = clock_s()
    monkeypatch.setattr(offsets, "clock_s", lambda: began + 5)
    mirror.mirror({place: 5})
    assert len(unanswered.sent_at) == 1  # one at a time
    monkeypatch.setattr(offsets, "clock_s", lambda: began + 11)
    mirror._options |= away
    mirror.mirror({place: 6})
    kept = mirror._last
    assert kept is not None
    assert mirror._writer is not unanswered
    monkeypatch.setattr(offsets, "clock_s", lambda: began + 22)
    mirror.mirror({place: 7})
    assert mirror._last is kept  # no more of them
    monkeypatch.undo()
    spent_s = time.process_time()
    threading.Event().wait(2)  # for nothing in particular: it is how long those that were let go may work on
    assert time.process_time() - spent_s < 1
    offsets._let_go(mirror._writer)  # forgotten at once, it would keep a core and this thread busy for 45 s
    mirror._writer = offsets._Writer({**mirror._options, "bootstrap.servers": bootstrap})
    mirror.mirror({place: 8})
    eventually(lambda: mirror.committed([place]) == {place: 9}, what="the group's offset")
    mirror.close()


def test_a_client_that_is_never_told_where_the_group_stands_is_replaced(
    settings: ConsumerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupOffsets(settings)
    place = GroupPartition(settings.group, settings.topics[0], 0)
    group._reader = unanswered = Consumer({**group._options, "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    monkeypatch.setattr(offsets, "_CALL_S", 0.1)
    began = clock_s()
    for after_s in (0, 9):
        monkeypatch.setattr(offsets, "clock_s", lambda now=began + after_s: now)
        with pytest.raises(BrokerUnavailable, match=settings.group):
            group.committed([place])
        assert group._reader is unanswered  # it may only take its time
    monkeypatch.setattr(offsets, "clock_s", lambda: began + 11)
    with pytest.raises(BrokerUnavailable):
        group.committed([place])
    monkeypatch.undo()
    assert group.committed([place]) == {place: None}
    spent_s = time.process_time()
    del unanswered
    threading.Event().wait(2)  # for nothing in particular: it is how long the one that was let go may work on
    assert time.process_time() - spent_s < 1
    group.close()


def test_the_group_offset_is_the_next_one_and_the_newest(settings: ConsumerSettings) -> None:
    place, other = (GroupPartition(settings.group, settings.topics[0], each) for each in (0, 1))
    mirror = GroupOffsets(settings)
    mirror.mirror({place: 4, other: None})
    eventually(lambda: mirror.committed([place, other]) == {place: 5, other: None}, what="the group's offset")
    mirror.mirror({place: 6}, unanswered=2)
    mirror.close()
    assert GroupOffsets(settings).committed([place]) == {place: 7}


def test_a_place_that_the_client_has_stopped_to_fetch_goes_on(
    settings: ConsumerSettings, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka's client may not go on with a partition after an outage: here it is paused, behind the consumer's back."""
    monkeypatch.setattr(fetcher, "_LEAST_S", INTERVAL_S)
    fill(settings, 20)
    one = join()
    eventually(lambda: len(one.seen) == 20, 60, "the first records")
    stopped = threading.Event()

    def stop_fetching(consumer: CoordinatedConsumer) -> None:
        paused, assign = consumer._fetcher._data.assignment(), consumer._fetcher._assign

        def assign_anew(places: Mapping[GroupPartition, int | None]) -> None:
            consumer._fetcher._data.resume(paused)  # in the client a pause outlasts the assignment
            assign(places)

        consumer._fetcher._data.pause(paused)
        monkeypatch.setattr(consumer._fetcher, "_assign", assign_anew)
        stopped.set()

    one.do(stop_fetching)
    assert stopped.wait(30)
    fill(settings, 20)
    eventually(lambda: len(one.seen) >= 40, 60, "the others")
    assert len(one.seen) == 40, "none came twice"
