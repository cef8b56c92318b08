"""For a while the brokers name none of them, as fenced ones do, and Kafka's clients drop all that they knew.

librdkafka drops the brokers that an answer leaves out (2.10 and later, issue 5301). One that has dropped the last may
never find another, and says nothing about it: it takes a race of its threads, which many addresses make likely.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import Join, fill, join, settings
from tests.support.harvesting import Scene, wait_leads
from tests.support.kafka_proxy import KafkaProxy
from tests.support.wait import eventually
from tests.support.writing import figure, longest_gap_ms, verify, writing

__all__ = ["join", "settings"]
pytest_plugins = ["tests.support.scenes"]

ROWS = 300
KEYS = 50
NAMELESS_S = 20.0
SEVERAL = 10  # addresses


@pytest.mark.parametrize("mode", ["at-least-once", "exactly-once"])
def test_a_harvester_goes_on(scene: Scene, mode: str) -> None:
    with KafkaProxy(scene.bootstrap, names=SEVERAL) as proxy:
        given = {"bootstrap.servers": proxy.address, "reconnect.backoff.max.ms": "500", "socket.timeout.ms": "3000"}
        with scene.cli(base_kafka_config=given, delivery=mode) as running:
            wait_leads(running)
            with writing(scene, keys=KEYS) as load:
                load.wait(ROWS)
                proxy.name_no_broker(NAMELESS_S, lambda: "rejoining the group" in running.output)
                load.wait(ROWS)
            repeats = verify(scene, load)
            assert running.stop() == 0
    figure(f"no_brokers_told_{mode}_repeats", repeats, "records")
    figure(f"no_brokers_told_{mode}_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats <= (KEYS if mode == "at-least-once" else 0)


def test_a_shard_whose_producer_has_no_broker_left_is_replaced(scene: Scene) -> None:
    """Without the strategy that asks those of its settings again, it has none for certain, and not by a race."""
    with KafkaProxy(scene.bootstrap) as proxy:
        given = {"bootstrap.servers": proxy.address, "reconnect.backoff.max.ms": "500"}
        forgetful = {"metadata.recovery.strategy": "none", "topic.metadata.refresh.interval.ms": "500"}
        with scene.cli(base_kafka_config=given, producer_kafka_config=forgetful) as running:
            wait_leads(running)
            with writing(scene, keys=KEYS) as load:
                load.wait(ROWS)
                proxy.name_no_broker(5)
                load.wait(ROWS)
            repeats = verify(scene, load)
            assert "has dropped its last broker" in running.output
            assert running.stop() == 0
    figure("stranded_shard_repeats", repeats, "records")
    figure("stranded_shard_longest_gap", longest_gap_ms(scene.log()), "ms")
    assert repeats <= KEYS


@pytest.fixture
def proxy(settings: ConsumerSettings) -> Iterator[KafkaProxy]:
    with KafkaProxy(settings.kafka["bootstrap.servers"], names=SEVERAL) as made:
        yield made


@pytest.mark.parametrize("at_most_once", [False, True])
def test_consumers_go_on(settings: ConsumerSettings, proxy: KafkaProxy, join: Join, at_most_once: bool) -> None:
    kafka = {**settings.kafka, "bootstrap.servers": proxy.address, "reconnect.backoff.max.ms": 500, "log_level": 0}
    members = [join(kafka=kafka, at_most_once=at_most_once) for _ in range(3)]
    fill(settings, 100)
    eventually(lambda: {number for each in members for number in each.seen} == set(range(100)), 60, "all records")
    proxy.name_no_broker(NAMELESS_S)
    fill(settings, 100, 100)
    eventually(lambda: {number for each in members for number in each.seen} >= set(range(100, 200)), 60, "the rest")
