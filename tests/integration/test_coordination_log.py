"""The writer and the reader of the coordination topic, on a real broker."""

from __future__ import annotations

import uuid
from concurrent.futures import Future

import pytest
from confluent_kafka import Producer, TopicPartition

from harvester.coordination.core.messages import ClaimingPartition, Client, GroupPartition, encode
from harvester.coordination.core.world import World
from harvester.coordination.log import CoordinationLog
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import ensure_coordination_topic
from tests.support.coordinated import admin, settings
from tests.support.proxy import Proxy
from tests.support.refusing import NOT_ENOUGH_REPLICAS, RefusingProxy
from tests.support.wait import eventually

__all__ = ["settings"]


@pytest.fixture
def name(settings: ConsumerSettings) -> str:
    """The coordination topic, made."""
    topic = settings.coordination_topic
    ensure_coordination_topic(topic, settings.kafka, settings.coordination_partitions, settings.timing.interval_ms)
    return topic


def test_a_writer_that_gets_nothing_through_is_replaced(settings: ConsumerSettings, name: str) -> None:
    """As after an outage that its client does not get over: here it asks at an address where nobody is."""
    given_up: list[int] = []
    log = CoordinationLog(name, settings.kafka, lambda _, number: given_up.append(number), 1.0)
    log._writer = Producer({"bootstrap.servers": "127.0.0.1:1", "delivery.timeout.ms": 1000, "log_level": 0})
    place, client = GroupPartition("billing", "orders", 0), Client("one", uuid.uuid4().hex)
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


def test_who_was_cut_off_goes_on_with_the_brokers_it_knows(settings: ConsumerSettings, name: str) -> None:
    """It does not ask anew who they are, which takes its client up to a second: nobody is there to be asked."""
    with Proxy(settings.kafka["bootstrap.servers"], kafka=True) as link, Proxy(link.address) as door:
        link.open()
        door.open()
        options = {**settings.kafka, "bootstrap.servers": door.address, "log_level": 0}
        log = CoordinationLog(name, options, lambda place, number: None, 5.0)
        place, client = GroupPartition("billing", "orders", 0), Client("one", uuid.uuid4().hex)
        log.begin({0: World.begin(settings.timing)})
        sent = 0

        def has_arrived() -> bool:
            nonlocal sent
            log.append(0, ClaimingPartition(place, client, sent, None, None))
            sent += 1
            return any(log.poll(0.05))

        eventually(has_arrived, 30, "a message")
        writer, reader = log._writer, log._reader
        door.cut()
        link.cut()
        eventually(lambda: link.links == 0, 10, "the end of all connections")
        link.open()
        eventually(lambda: any(log.poll(0.05)) or has_arrived(), 5, "a message after the cut")
        assert (log._writer, log._reader) == (writer, reader)
        log.close(0)


def test_a_message_that_is_only_inferred_to_be_written_is_given_up(settings: ConsumerSettings, name: str) -> None:
    """The broker refuses the writer's first request on a partition, and takes the second (P45, KAFKA-15591)."""
    given_up: list[int] = []
    with RefusingProxy(settings.kafka["bootstrap.servers"]) as proxy:
        options = {**settings.kafka, "bootstrap.servers": proxy.address}
        log = CoordinationLog(name, options, lambda _, number: given_up.append(number), 30.0)
        place, client = GroupPartition("billing", "orders", 0), Client("one", uuid.uuid4().hex)
        log.begin({0: World.begin(settings.timing)})
        refusal = proxy.refuse(name, NOT_ENOUGH_REPLICAS)
        arrived: list[Future[bool]] = [Future(), Future()]
        read: list[bytes | None] = []

        def turn() -> bool:
            read.extend(value for _, _, _, value in log.poll(0.05))
            return refusal.caught.is_set()

        first, second = (ClaimingPartition(place, client, number, None, None) for number in range(2))
        log.append(0, first, arrived[0])
        eventually(turn, 30, "the first request")
        log.append(0, second, arrived[1])
        eventually(lambda: turn() and given_up and read, 30, "what becomes of the first, and the second")
        assert ([each.result(0) for each in arrived], given_up, read) == ([False, True], [0], [encode(second)])
        log.close(1)


def test_a_reader_that_stands_still_is_replaced(settings: ConsumerSettings, name: str) -> None:
    """Kafka's client may not go on with a partition after an outage: here it is paused. Nothing is missed by that."""
    given_up: set[int] = set()  # by a busy machine; they may be in the log all the same
    log = CoordinationLog(name, settings.kafka, lambda _, number: given_up.add(number), 0.5)
    place, client = GroupPartition("billing", "orders", 0), Client("one", uuid.uuid4().hex)
    sent: dict[bytes | None, int] = {}
    read: list[int] = []

    def turn() -> None:
        message = ClaimingPartition(place, client, len(sent), None, None)
        sent[encode(message)] = message.number
        log.append(0, message)
        read.extend(sent[value] for _, _, _, value in log.poll(0.05))

    def all_is_read() -> bool:
        turn()
        assert read == sorted(set(read)), "once, and in order"
        return len(read) > before and given_up.issuperset(set(range(read[-1])) - set(read))

    def is_replaced() -> bool:
        turn()
        return log._reader is not first

    log.begin({partition: World.begin(settings.timing) for partition in range(settings.coordination_partitions)})
    before = 0
    eventually(all_is_read, 30, "a message")
    first = log._reader
    first.pause([TopicPartition(name, 0)])
    eventually(is_replaced, 30, "another reader")
    before = len(read)
    eventually(all_is_read, 30, "what came since")
    log.close(5)


def test_a_topic_that_is_deleted_under_a_writer_is_not_made_anew_by_it(settings: ConsumerSettings, name: str) -> None:
    """The broker of the tests makes topics that a client wishes: with its own settings, which are not safe for claims.

    Writers are given up with their messages and made anew meanwhile, as in a living group.
    """
    given_up: list[int] = []
    log = CoordinationLog(name, settings.kafka, lambda _, number: given_up.append(number), 1.0)
    place, client = GroupPartition("billing", "orders", 0), Client("one", uuid.uuid4().hex)
    log.begin({0: World.begin(settings.timing)})
    sent = 0

    def turn() -> int:
        nonlocal sent
        log.append(0, ClaimingPartition(place, client, sent, None, None))
        sent += 1
        return len(list(log.poll(0.05)))

    def another_writer() -> bool:
        turn()
        return log._writer is not lost

    eventually(turn, 30, "a message")
    asked = admin(settings)
    asked.delete_topics([name], operation_timeout=30)[name].result(60)
    for _ in range(2):
        lost, before = log._writer, len(given_up)
        eventually(another_writer, 30, "another writer")
        assert len(given_up) > before
    assert name not in asked.list_topics(timeout=10).topics
    log.close(1)
