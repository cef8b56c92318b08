"""A progress topic that refuses records while the relay runs: what is said of it, and how often it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tests.support.families import family
from tests.support.harvesting import Scene
from tests.support.kafka_proxy import END_TXN, KafkaProxy
from tests.support.wait import eventually
from tests.support.writing import verify, writing

pytest_plugins = ["tests.support.scenes"]

ONCE: dict[str, Any] = {"delivery": "exactly-once", "shards": 1}


@pytest.fixture
def proxy(scene: Scene) -> Iterator[KafkaProxy]:
    with KafkaProxy(scene.bootstrap) as proxy:
        yield proxy


def alter(scene: Scene, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, f"{scene.group}.progress", incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"})
    admin.incremental_alter_configs([resource])[resource].result(10)


def test_a_record_that_is_refused_is_said_with_its_remedy_and_tried_ever_more_seldom(
    scene: Scene, proxy: KafkaProxy
) -> None:
    """Nothing else fails: without a pause the same transaction would be sent and given up without end."""
    with scene.embedded(base_kafka_config={"bootstrap.servers": proxy.address}, **ONCE) as running:
        running.wait_leading()

        def problem() -> str:
            return running.harvester.status().problem or ""

        with writing(scene) as load:
            load.wait(100)
            alter(scene, "max.message.bytes", "100")
            eventually(lambda: "max.message.bytes=" in problem(), what="the problem and its remedy")
            tries = proxy.seen[END_TXN]
            load.wait(3_000)  # some seconds
            assert proxy.seen[END_TXN] - tries < 10
            alter(scene, "max.message.bytes", "1048588")
            eventually(lambda: not problem(), 60, "no problem any more")
            load.wait(100)
        assert verify(scene, load) == 0


def test_a_topic_that_is_recreated_while_the_relay_runs_is_not_trusted(scene: Scene) -> None:
    """P22: it says of nothing that it was committed. As brokers make one when a client asks for it."""
    name = f"{scene.group}.progress"
    admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"})

    def recreate() -> bool:
        """Kafka may still be deleting the former one."""
        try:
            admin.create_topics([NewTopic(name, 2)])[name].result(30)
        except KafkaException:
            return False
        return True

    with family(scene, "one", hooks=True, **ONCE) as one:
        one.wait_leads()
        with scene.plan.blocked("shard.committed") as reached:
            scene.add(("k", "1"))
            reached()
            admin.delete_topics([name])[name].result(30)
            eventually(recreate, what="a new topic")
            one.kill(*one.shards)
        said = one.running.wait_for_line("lane 0 cannot be opened: the progress topic, [^ ]+, is (a different one|.*)")
        assert said[1].startswith("a different one")
        one.kill()
    assert scene.published() == {"k": ["1"]}
    with scene.cli(**ONCE) as two:
        assert two.process.wait(60) == 65
        assert "is a different one" in two.output
    assert scene.published() == {"k": ["1"]}
