"""Transactions that end while one of their partitions has no leader, with Kafka 4.3 and 4.4 (KAFKA-20734).

No harvester takes part. docs/guarantees.md says what follows for one; once a broker waits for the leader, as up to 4.2,
this fails, and that text is to be changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.stack.stack import free_ports
from tests.support.brokers import Brokers, three_brokers
from tests.support.longs import long
from tests.support.wait import eventually

pytestmark = [long, pytest.mark.timeout(300)]

# Their coordinators are on all brokers; some are not on the one that goes.
IDS = ("t0", "t1", "t2", "t3")


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


def test_the_next_transaction_of_the_producer_decides(brokers: Brokers) -> None:
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
    ended = []
    for name, producer in producers.items():
        try:
            producer.commit_transaction(5)
            ended.append(name)
        except KafkaException:  # its coordinator is away
            pass
    assert len(ended) >= 2
    brokers.start(3)
    for name in ended:
        # The producer has been told that it is committed.
        assert committed(brokers, name) == []
        write(producers[name], name, b"second")
        if name == ended[0]:
            producers[name].abort_transaction(30)
        else:
            producers[name].commit_transaction(30)
        expected = [] if name == ended[0] else [b"first", b"second"]
        eventually(partial(holds, brokers, name, expected), 30, "the markers")
