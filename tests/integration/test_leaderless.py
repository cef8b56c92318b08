"""Partitions that are led by nobody yet, or by another broker than was said: whoever asks for their ends gets them.

As while brokers start, or just after a topic was made. The broker is real; a proxy changes its first answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from harvester.bounds import read_bounds
from harvester.coordination.admin import Observer
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.world import World
from harvester.coordination.log import CoordinationLog
from harvester.coordination.offsets import GroupOffsets
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import ensure_coordination_topic
from harvester.errors import BrokerUnavailable
from harvester.neli.election import ElectionTiming
from harvester.neli.reach import ASKING, Pulse
from harvester.verify.reader import read
from tests.support.coordinated import admin, fill, settings
from tests.support.kafka_proxy import LIST_OFFSETS, METADATA, KafkaProxy, Leaderless, Misled
from tests.support.servers import Servers
from tests.support.wait import eventually

__all__ = ["settings"]


@pytest.fixture
def proxy(servers: Servers) -> Iterator[KafkaProxy]:
    with KafkaProxy(servers.bootstrap) as opened:
        yield opened


@pytest.fixture
def behind(settings: ConsumerSettings, proxy: KafkaProxy) -> ConsumerSettings:
    """The same, through the proxy; the coordination topic is there, and has one partition."""
    name, client = settings.coordination_topic, admin(settings)
    ensure_coordination_topic(name, settings.kafka, 1, settings.timing.interval_ms)
    eventually(lambda: name in client.list_topics(timeout=10).topics, what="the coordination topic")
    return replace(settings, coordination_partitions=1, kafka={**settings.kafka, "bootstrap.servers": proxy.address})


def lead_astray(proxy: KafkaProxy, topic: str, api: int) -> Leaderless | Misled:
    """The next answers about the topic, one of metadata or two of offsets: one is asked for the beginning."""
    answers = Leaderless(topic) if api == METADATA else Misled(topic, 2)
    proxy.change(api, answers)
    return answers


@pytest.mark.parametrize("api", [METADATA, LIST_OFFSETS])
def test_a_client_that_starts_while_a_partition_of_the_log_has_no_leader(
    behind: ConsumerSettings, proxy: KafkaProxy, api: int
) -> None:
    answers = lead_astray(proxy, behind.coordination_topic, api)
    log = CoordinationLog(behind.coordination_topic, behind.kafka, lambda *_: None)
    try:
        assert log.begin({0: World.begin(behind.timing)}) == {0: 0}
    finally:
        log.close(0)
    assert answers.told > 0


@pytest.mark.parametrize("api", [METADATA, LIST_OFFSETS])
def test_an_administrator(behind: ConsumerSettings, proxy: KafkaProxy, api: int) -> None:
    topic = behind.topics[0]
    with Observer(behind) as observer:
        answers = lead_astray(proxy, topic, api)
        assert observer.bounds([topic]) == {(topic, each): (0, 0) for each in range(4)}
    assert answers.told > 0


@pytest.mark.parametrize("api", [METADATA, LIST_OFFSETS])
def test_verification(behind: ConsumerSettings, proxy: KafkaProxy, api: int) -> None:
    topic = behind.topics[0]
    fill(behind, 20)
    if api == METADATA:
        proxy.change(api, Leaderless(topic, 2))  # the first answer is the list of topics
    else:
        lead_astray(proxy, topic, api)
    assert read(dict(behind.kafka), [topic]).records == 20


def test_the_ends_that_show_a_standstill(behind: ConsumerSettings, proxy: KafkaProxy) -> None:
    """They are asked for again by whoever wants them; the client must not stay with its first answer."""
    topic = behind.topics[0]
    fill(behind, 4)
    places = [GroupPartition(behind.group, topic, each) for each in range(4)]
    offsets = GroupOffsets(behind)
    answers = lead_astray(proxy, topic, METADATA)

    def ends() -> int:
        try:
            found = offsets.ends(places)
        except BrokerUnavailable:
            return 0
        return sum(found.values()) if len(found) == len(places) else 0

    eventually(lambda: ends() == 4, 10, "all ends")
    assert answers.told == 1
    offsets.close()


def test_a_standby_that_listens_for_a_leader(behind: ConsumerSettings, proxy: KafkaProxy) -> None:
    topic = behind.topics[0]
    lead_astray(proxy, topic, METADATA)
    client = AdminClient({**behind.kafka, **ASKING})
    pulse = Pulse(topic, "listens", 6.0, ElectionTiming(0.05, 5.0, 10.0, 10.0, 10.0))

    def is_heard() -> bool:
        pulse.look(client)
        return pulse._end is not None

    eventually(is_heard, 10, "the end of the topic")


def test_what_lasts_is_raised_when_the_time_is_over(behind: ConsumerSettings, proxy: KafkaProxy) -> None:
    topic = behind.coordination_topic  # of one partition: brokers tell several in any order
    proxy.change(METADATA, Leaderless(topic, 1000))
    consumer = Consumer({**behind.kafka, "group.id": "asks"})
    consumer.list_topics(topic, timeout=30)  # what is told is in its cache: a slow connection is no error of its own
    with pytest.raises(Exception, match="Unknown partition"):
        read_bounds(consumer, topic, 0, 0.5)
    consumer.close()
