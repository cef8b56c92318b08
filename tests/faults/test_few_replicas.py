"""Three brokers, of which two die and one comes back between the first two requests of a producer (P45)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.stack.stack import free_ports
from tests.support.brokers import Brokers, three_brokers
from tests.support.harvesting import Scene
from tests.support.refusing import NOT_ENOUGH_REPLICAS, RefusingProxy
from tests.support.servers import Servers
from tests.support.wait import eventually

# A broker takes some seconds to come back: below this delivery timeout of 59 s.
PATIENT: dict[str, Any] = {"heartbeat_timeout": "10s", "session_timeout": "70s", "drain_interval": "60s"}


@pytest.fixture
def proxy() -> Iterator[RefusingProxy]:
    """In front of broker 1."""
    with RefusingProxy(f"127.0.0.1:{free_ports(1, [])[0]}") as made:
        yield made


@pytest.fixture
def brokers(proxy: RefusingProxy) -> Iterator[Brokers]:
    with three_brokers(proxy.target_port, proxy.port) as made:
        yield made


@pytest.fixture
def scene(servers: Servers, proxy: RefusingProxy, database: str, group: str, tmp_path: Path) -> Iterator[Scene]:
    topic = f"test-{uuid.uuid4().hex[:12]}"
    made = Scene(Servers(servers.dsn, proxy.address, given=False), database, topic, group, tmp_path)
    try:
        yield made
    finally:
        made.db.close()


def test_a_record_refused_for_too_few_replicas_is_published(
    scene: Scene, proxy: RefusingProxy, brokers: Brokers
) -> None:
    admin = AdminClient({"bootstrap.servers": brokers.bootstrap, "broker.address.family": "v4", "log_level": 0})

    def in_sync() -> list[int]:
        try:
            known = admin.list_topics(scene.topic, timeout=10).topics[scene.topic].partitions
        except KafkaException:
            return []  # it has asked one of those that are dead
        return sorted(known[0].isrs) if known else []  # a broker that has not heard of the topic yet names none

    admin.create_topics([NewTopic(scene.topic, 1, replica_assignment=[[1, 2, 3]])])[scene.topic].result(30)
    eventually(lambda: in_sync() == [1, 2, 3], what="three replicas in sync")
    with scene.embedded(shards=1, **PATIENT) as running:
        running.wait_leading()
        brokers.kill(2)
        brokers.kill(3)
        eventually(lambda: in_sync() == [1], 60, "broker 1 alone")
        refusal = proxy.watch(scene.topic)
        scene.add(("first", "1"))
        assert refusal.caught.wait(30)
        eventually(lambda: refusal.answered is not None, what="the broker's answer")
        assert refusal.answered == NOT_ENOUGH_REPLICAS
        scene.add(("second", "1"))
        assert refusal.overtaken.wait(30)
        brokers.start(2)
        eventually(lambda: in_sync() == [1, 2], 60, "two replicas in sync")
        refusal.go.set()
        scene.add(("first", "2"), ("second", "2"))
        scene.wait_left(timeout_s=60)
    assert scene.quarantined() == {}
    assert scene.published() == {"first": ["1", "2"], "second": ["1", "2"]}
