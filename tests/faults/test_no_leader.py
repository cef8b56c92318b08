"""Transactions that end while one of their partitions has no leader (KAFKA-20734).

No harvester takes part. docs/guarantees.md says what follows for one with Kafka 4.3; the broker of `harvester stack`
waits for the leader.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.stack import java
from harvester.stack.stack import free_ports
from tests.support.brokers import Brokers, three_brokers
from tests.support.longs import long
from tests.support.wait import eventually

pytestmark = [long, pytest.mark.timeout(300)]

# Their coordinators are on all brokers; some are not on the one that goes.
IDS = ("t0", "t1", "t2", "t3")


LOCK = Path(__file__).parents[2] / "scripts" / "kafka-4.3.0.lock"


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    (port,) = free_ports(1, [])
    with three_brokers(port, port) as made:
        yield made


def options(brokers: Brokers) -> dict[str, Any]:
    return {"bootstrap.servers": brokers.bootstrap, "broker.address.family": "v4", "log_level": 0}


def committed(brokers: Brokers, topic: str) -> list[bytes | None]:
    reading = {"group.id": "g", "isolation.level": "read_committed", "enable.partition.eof": True}
    consumer = Consumer({**options(brokers), **reading})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    try:
        while (message := consumer.poll(30)) is not None:
            error = message.error()
            if error is None:
                found.append(message.value())
            elif error.code() == KafkaError._PARTITION_EOF:
                return found
    finally:
        consumer.close()
    raise TimeoutError(topic)


def holds(brokers: Brokers, topic: str, expected: list[bytes]) -> bool:
    return committed(brokers, topic) == expected


def write(producer: Producer, topic: str, value: bytes) -> None:
    producer.begin_transaction()
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def committed_without_a_leader(brokers: Brokers) -> dict[str, Producer]:
    """Producers that have been told that their transaction is committed, by the name of their topic, on broker 3."""
    admin = AdminClient(options(brokers))
    topics = [NewTopic(one, 1, replica_assignment=[[3]], config={"min.insync.replicas": "1"}) for one in IDS]
    for created in admin.create_topics(topics).values():
        created.result(30)
    producers = {one: Producer({**options(brokers), "transactional.id": one}) for one in IDS}
    for name, producer in producers.items():
        producer.init_transactions(60)
        write(producer, name, b"first")
    brokers.kill(3)
    eventually(
        lambda: all(admin.list_topics(one, timeout=10).topics[one].partitions[0].leader == -1 for one in IDS),
        60,
        "no leader",
    )
    ended = {}
    for name, producer in producers.items():
        try:
            producer.commit_transaction(5)
            ended[name] = producer
        except KafkaException:  # its coordinator is away
            pass
    assert len(ended) >= 2
    brokers.start(3)
    return ended


def test_the_broker_of_the_stack_ends_them_when_there_is_a_leader(brokers: Brokers) -> None:
    for name in committed_without_a_leader(brokers):
        eventually(partial(holds, brokers, name, [b"first"]), 30, "the markers")


def test_with_kafka_4_3_the_next_transaction_of_the_producer_decides(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    jars = java.locked_jars("kafka-4.3.0", LOCK.read_text(), what="Kafka 4.3.0")
    monkeypatch.setenv("HARVESTER_KAFKA_JARS", str(jars))
    brokers: Brokers = request.getfixturevalue("brokers")
    aborted, *others = committed_without_a_leader(brokers).items()
    for name, producer in (aborted, *others):
        assert committed(brokers, name) == []
        write(producer, name, b"second")
    aborted[1].abort_transaction(30)
    for _, producer in others:
        producer.commit_transaction(30)
    eventually(partial(holds, brokers, aborted[0], []), 30, "the markers")
    for name, _ in others:
        eventually(partial(holds, brokers, name, [b"first", b"second"]), 30, "the markers")
