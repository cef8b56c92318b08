"""Consumers that share a topic on a real broker."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from harvester.coordination.core.messages import ClaimingPartition, Heartbeat, Unreadable, decode
from harvester.coordination.core.world import ClaimVerdict, Freshness, LogTiming, World
from harvester.coordination.errors import CoordinationTopicError, DuplicateClient, OtherInterval, OtherMode
from harvester.coordination.settings import ConsumerSettings
from harvester.coordination.topic import ensure_coordination_topic
from tests.conftest import MakeTopic
from tests.support.client_threads import OF_CLIENTS
from tests.support.consuming import read_topic
from tests.support.coordinated import INTERVAL_S, Join, Member, admin, failure, fill, held, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_every_record_once_while_consumers_come_and_go(
    settings: ConsumerSettings, join: Join, at_most_once: bool
) -> None:
    fill(settings, 500)
    # At most once, a claim that a busy machine loses costs records.
    unhurried = {"at_most_once": at_most_once, "heartbeat_interval_s": 3 * INTERVAL_S}
    one = join(**unhurried)
    eventually(lambda: len(one.seen) == 500, what="all records seen by the first")
    two = join(**unhurried)
    eventually(lambda: held(one, two) == [2, 2], what="a fair share")
    fill(settings, 500, first=500)
    eventually(lambda: len(one.seen) + len(two.seen) == 1000, what="all records seen by both")
    assert two.seen
    one.stop(release=True)
    eventually(lambda: held(two) == [4], what="a hand-over")
    fill(settings, 100, first=1000)
    eventually(lambda: len(one.seen) + len(two.seen) >= 1100, what="all records seen by the second")
    assert set(Counter(one.seen + two.seen).values()) == {1}


def test_what_a_dead_consumer_held_is_taken_over_behind_what_it_did(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 400)
    one, two = join(), join()
    eventually(lambda: held(one, two) == [2, 2] and len(one.seen) + len(two.seen) == 400, what="all records, shared")
    one.stop(release=False)
    eventually(lambda: held(two) == [4], what="a take-over")
    fill(settings, 100, first=400)
    eventually(lambda: set(one.seen + two.seen) == set(range(500)), what="all records")


def test_a_stable_client_id_gets_its_claims_back_and_a_second_process_none(
    settings: ConsumerSettings, join: Join
) -> None:
    unhurried: dict[str, Any] = {"client_id": "stable", "heartbeat_interval_s": 4 * INTERVAL_S}
    one = join(**unhurried)
    timing = replace(settings, **unhurried).timing
    eventually(lambda: held(one) == [4], what="all claims")
    twin = join(**unhurried)
    failure(twin, DuplicateClient)
    for _ in range(3):  # a slow machine may need one more life
        one.stop(release=False)
        one = join(**unhurried)
        eventually(partial(_holds_all, one), 60, "all claims")
        fresh = [
            freshness in (Freshness.FRESH, Freshness.UNKNOWN) for freshness in _found_when_won(settings, timing, one)
        ]
        if fresh == [True] * 4:
            return
    pytest.fail("what an earlier life held is not claimed before it is stale")


def _holds_all(member: Member) -> bool:
    return held(member) == [4]


def _found_when_won(settings: ConsumerSettings, timing: LogTiming, by: Member) -> list[Freshness]:
    """How what it claimed was held until then, by what stands in the coordination log."""
    worlds = {partition: World.begin(timing) for partition in range(settings.coordination_partitions)}
    found = []
    for record in read_topic(str(settings.kafka["bootstrap.servers"]), settings.coordination_topic):
        world = worlds[record.partition]
        for reading in world.read(record.offset, record.created_ms, record.value):
            message, before = reading.message, reading.before
            ours = isinstance(message, ClaimingPartition) and message.client == by.consumer.client
            if ours and before is not None and reading.verdict is ClaimVerdict.WON:
                found.append(before.freshness(world.now_ms, timing))
    return found


def test_a_consumer_that_counts_by_another_interval_is_refused(settings: ConsumerSettings, join: Join) -> None:
    one = join()
    eventually(lambda: held(one) == [4], what="all claims")
    other = join(heartbeat_interval_s=2 * INTERVAL_S)
    failure(other, OtherInterval)
    fill(settings, 100)
    eventually(lambda: len(one.seen) == 100, what="all records")
    assert held(one) == [4]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_consumer_of_the_other_mode_is_refused(settings: ConsumerSettings, join: Join, at_most_once: bool) -> None:
    one = join(at_most_once=at_most_once)
    eventually(lambda: held(one) == [4], what="all claims")
    other = join(at_most_once=not at_most_once)
    error = failure(other, OtherMode)
    assert f"client '{one.consumer.client.id}'" in str(error)
    fill(settings, 100)
    eventually(lambda: len(one.seen) == 100, what="all records")
    one.stop(release=True)
    other = join(at_most_once=not at_most_once)
    eventually(lambda: held(other) == [4], what="the other mode, once nobody uses the first one")


def test_positions_are_mirrored_to_the_group(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 200)
    one = join()
    eventually(lambda: len(one.seen) == 200, what="all records")
    one.stop(release=True)
    reader = Consumer({**settings.kafka, "group.id": settings.group})
    places = [TopicPartition(settings.topics[0], partition) for partition in range(4)]
    committed = {place.partition: place.offset for place in reader.committed(places, timeout=10)}
    reported = {}
    for record in read_topic(str(settings.kafka["bootstrap.servers"]), settings.coordination_topic):
        said = decode(record.value)
        assert not isinstance(said, Unreadable)
        for message in said.parts:
            if isinstance(message, Heartbeat) and message.last_offset is not None:
                reported[message.place.partition] = message.last_offset
    reader.close()
    ends = {partition: offset for partition, offset in committed.items() if offset > 0}
    assert sum(ends.values()) == 200
    assert all(offset <= ends[partition] - 1 for partition, offset in reported.items())


def test_a_topic_with_other_settings_is_refused(settings: ConsumerSettings, make_topic: MakeTopic) -> None:
    wrong = make_topic(2, {"cleanup.policy": "compact"})
    with pytest.raises(CoordinationTopicError) as caught:
        ensure_coordination_topic(wrong, settings.kafka, 2, 1000)
    assert "cleanup.policy is compact" in str(caught.value)
    assert "CreateTime" in str(caught.value)


def test_another_number_of_partitions_is_refused(settings: ConsumerSettings) -> None:
    name = settings.coordination_topic
    ensure_coordination_topic(name, settings.kafka, 2, 1000)
    eventually(lambda: name in admin(settings).list_topics(timeout=10).topics, what="the topic")
    with pytest.raises(CoordinationTopicError, match="fixed for its life"):
        ensure_coordination_topic(name, settings.kafka, 3, 1000)


def test_no_client_is_left_when_it_is_closed(settings: ConsumerSettings) -> None:
    """OpenSSL frees at the end of a process what a client that makes a connection still uses."""
    fill(settings, 1)
    text = f"""
from harvester import ConsumerSettings, CoordinatedConsumer
from harvester.coordination.events import GivenUp

def handle(record):
    raise ValueError("no")

def told(event):
    if isinstance(event, GivenUp):
        consumer.stop()

consumer = CoordinatedConsumer(ConsumerSettings(
    kafka={settings.kafka!r}, group={settings.group!r}, topics={settings.topics!r},
    coordination_topic={settings.coordination_topic!r}, on_error="dead-letter", attempts=1,
), on_event=told)
assert of_clients()
consumer.run(handle)
print(consumer.statistics().dead_letters, of_clients())
"""
    done = subprocess.run(
        [sys.executable, "-c", OF_CLIENTS + text], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 []\n"), done.stderr
