"""What a consumer claims, keeps and lets go of, on a real broker, and what its application is told of it."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from harvester.clock import clock_s
from harvester.coordination import log
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import Client, GroupPartition, Heartbeat, ReleasingPartition, encode
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.events import Claimed, Event, Lost, Paused, Released, Resumed
from harvester.coordination.settings import ConsumerSettings
from tests.conftest import MakeTopic
from tests.support.coordinated import Join, create_topic, ends, fill, grow_topic, heartbeats, held, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]


# -- events


def test_a_claim_is_announced_before_its_first_record_and_its_release_after_the_last(
    settings: ConsumerSettings,
) -> None:
    fill(settings, 200)
    story: list[object] = []
    with CoordinatedConsumer(settings, on_event=story.append) as consumer:
        for _, record in zip(range(200), consumer, strict=False):
            story.append(record)
            consumer.commit(record)
        generations = consumer.claims()
    claimed: set[int] = set()
    for what in story:
        if isinstance(what, Claimed):
            assert generations[what.topic, what.partition] == what.generation
            claimed.add(what.partition)
        elif isinstance(what, Released):
            assert generations[what.topic, what.partition] == what.generation
            claimed.remove(what.partition)
        else:
            assert what.partition() in claimed  # type: ignore[attr-defined]
    assert not claimed
    assert consumer.statistics().releases == 4


def test_whose_claims_were_taken_is_told_that_they_are_lost(settings: ConsumerSettings, join: Join) -> None:
    one = join(client_id="same")
    eventually(lambda: held(one) == [4], what="all claims")
    place = GroupPartition(settings.group, settings.topics[0], 0)
    session = one.consumer._session
    token = one.consumer.claims()[place.topic, place.partition]
    generation = session.holding(place).generation
    with session.lock:  # as an administrator does
        session._log.append(
            log_partition(place, 2),
            ReleasingPartition(place, one.consumer.client, 0, generation, generation, None),
        )
    eventually(lambda: one.told(Lost), what="a loss")
    (lost,) = one.told(Lost)
    assert (lost.topic, lost.partition, lost.generation) == (place.topic, 0, token)
    eventually(lambda: held(one) == [4] and len(one.told(Claimed)) == 5, what="the claim again")


def test_what_an_event_handler_raises_comes_out_of_the_poll(settings: ConsumerSettings) -> None:
    class Refused(Exception):
        pass

    refused: list[Event] = []

    def refuse(event: Event) -> None:
        if isinstance(event, Claimed) and not refused:  # the others may come as late as with close()
            refused.append(event)
            raise Refused

    with CoordinatedConsumer(settings, on_event=refuse) as consumer, pytest.raises(Refused):
        consumer.poll(30)


def test_who_stood_still_and_goes_on_is_handed_nothing_again(settings: ConsumerSettings) -> None:
    """When its claims run out, no message has said yet what was processed since the last heartbeat."""
    fill(settings, 40)
    events: list[Event] = []
    with CoordinatedConsumer(settings, on_event=events.append) as consumer:

        def take(count: int) -> list[Any]:
            taken: list[Any] = []

            def enough() -> bool:
                record = consumer.poll(0.01)
                if record is not None:
                    taken.append(record)
                return len(taken) == count

            eventually(enough, what=f"{count} records")
            return taken

        before = take(20)
        with consumer._session.lock:  # its heartbeats stop, as if it were frozen
            for record in before:
                consumer.commit(record)
            until = clock_s() + 3 * settings.heartbeat_interval_s
            eventually(lambda: clock_s() > until, what="the end of all claims")
        after = take(20)
    assert any(isinstance(event, Lost) for event in events)
    assert sorted(int(record.value()) for record in before + after) == list(range(40))


# -- pauses


@pytest.mark.parametrize("at_most_once", [False, True])
def test_nothing_is_handed_out_while_paused_and_the_claims_are_kept(
    settings: ConsumerSettings, join: Join, at_most_once: bool
) -> None:
    fill(settings, 100)
    # With an interval of a second, a busy machine takes longer than it for the way of a message.
    one = join(at_most_once=at_most_once, heartbeat_interval_s=2.0)
    eventually(lambda: len(one.seen) == 100, what="all records")
    one.do(lambda consumer: consumer.pause())
    eventually(lambda: one.told(Paused), what="a pause")
    fill(settings, 100, first=100)
    written = heartbeats(one.consumer)
    eventually(lambda: heartbeats(one.consumer) >= written + 4 * 2, what="two intervals of heartbeats")
    assert len(one.seen) == 100
    assert held(one) == [4]
    assert not one.told(Lost)
    one.do(lambda consumer: consumer.resume())
    eventually(lambda: len(one.seen) == 200, what="all records")
    assert len(one.told(Resumed)) == 1
    assert set(Counter(one.seen).values()) == {1}


def test_one_partition_is_paused_and_the_others_go_on(settings: ConsumerSettings, join: Join) -> None:
    def take(consumer: CoordinatedConsumer) -> None:
        consumer.pause(settings.topics[0], 2)

    one = join(heartbeat_interval_s=5.0)  # a claim that is lost to a busy machine would bring records again
    one.do(take)
    eventually(lambda: held(one) == [4], what="all claims")
    fill(settings, 200)
    rest = 200 - ends(settings)[2]
    assert 0 < rest < 200
    eventually(lambda: len(one.seen) == rest, what="three partitions")
    assert 2 not in {partition for _, partition, _ in one.handed}
    one.do(lambda consumer: consumer.resume(settings.topics[0], 2))
    eventually(lambda: sorted(one.seen) == list(range(200)), what="the fourth")


def test_what_is_in_a_lot_when_it_is_paused_stays_there(settings: ConsumerSettings) -> None:
    fill(settings, 400)
    with CoordinatedConsumer(settings) as consumer:
        first = next(iter(consumer))
        consumer.pause()
        assert consumer.poll(0.2) is None
        consumer.commit(first)
        consumer.resume()
        seen = [first]
        for _, record in zip(range(399), consumer, strict=False):
            seen.append(record)
            consumer.commit(record)
    assert len({(record.partition(), record.offset()) for record in seen}) == 400


# -- letting go


def test_a_partition_that_is_released_is_left_to_others_for_a_while(settings: ConsumerSettings, join: Join) -> None:
    # The other has an interval to take it; a busy machine may need more than the second of the other tests.
    one, two = join(heartbeat_interval_s=3.0), join(heartbeat_interval_s=3.0)
    eventually(lambda: held(one, two) == [2, 2], what="a fair share")
    place = next(iter(one.consumer.claims()))
    one.do(lambda consumer: consumer.release(*place))
    eventually(lambda: any(each.reason == "on request" for each in one.told(Released)), what="a release")
    assert place not in one.consumer.claims()
    eventually(lambda: place in two.consumer.claims(), what="a claim of the other")
    eventually(lambda: held(one, two) == [2, 2], what="a fair share")


def test_who_falls_behind_gives_up_a_partition_if_somebody_has_fewer(
    settings: ConsumerSettings, join: Join, make_topic: MakeTopic
) -> None:
    three = make_topic(3)
    numbers = count(step=30)
    events: list[Event] = []
    with CoordinatedConsumer(replace(settings, topics=(three,)), on_event=events.append) as slow:
        eventually(lambda: slow.poll(0.05) or len(slow.claims()) == 3, what="all claims")
        quick = join(topics=(three,))
        eventually(lambda: slow.poll(0.05) or (len(slow.claims()), held(quick)) == (2, [1]), what="a fair share")

        def fell_behind() -> list[Event]:
            fill(settings, 30, first=next(numbers), topic=three)
            record = slow.poll(0)
            if record is not None:
                slow.commit(record)
            return [event for event in events if isinstance(event, Released) and event.reason == "it falls behind"]

        eventually(fell_behind, what="a release")
        eventually(lambda: (slow.poll(0), held(quick) == [2])[1], what="a claim of the other")


def test_who_falls_behind_with_whole_topics_gives_up_the_topic(
    settings: ConsumerSettings, join: Join, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition of it alone could be claimed by nobody but us."""
    monkeypatch.setattr(PartitionBuffer, "falls_behind", lambda buffer, _lag: buffer.place.partition == 1)
    topics = tuple(make_topic(2) for _ in range(3))
    for topic in topics:
        fill(settings, 30, topic=topic)
    events: list[Event] = []
    with CoordinatedConsumer(replace(settings, topics=topics, whole_topics=True), on_event=events.append) as slow:
        eventually(lambda: (slow.poll(0.05), len(slow.claims()) == 6)[1], what="all claims")
        quick = join(topics=topics, whole_topics=True)

        def released() -> list[Released]:
            slow.poll(0)
            return [event for event in events if isinstance(event, Released) and event.reason == "it falls behind"]

        first = eventually(released, what="a release")[0]
        assert first.partition == 0, "with it go the others"
        eventually(lambda: (slow.poll(0), (first.topic, 1) in quick.consumer.claims())[1], what="a claim of the other")


# -- what is claimed


def test_partitions_that_are_added_are_claimed(settings: ConsumerSettings, join: Join) -> None:
    one, two = join(), join()
    eventually(lambda: held(one, two) == [2, 2], what="a fair share")
    grow_topic(settings, settings.topics[0], 8)
    eventually(lambda: held(one, two) == [4, 4], what="the new partitions")
    fill(settings, 200)
    eventually(lambda: sorted(one.seen + two.seen) == list(range(200)), what="their records")


def test_a_topic_that_comes_later_is_claimed_then(settings: ConsumerSettings, join: Join) -> None:
    late = f"late-{uuid.uuid4().hex[:8]}"
    one = join(topics=(settings.topics[0], late))
    eventually(lambda: held(one) == [4], what="the topic that there is")
    create_topic(settings, late, 3)
    eventually(lambda: held(one) == [7], what="the other")
    fill(settings, 50, topic=late)
    eventually(lambda: len(one.seen) == 50, what="its records")


def test_whole_topics(settings: ConsumerSettings, join: Join, make_topic: MakeTopic) -> None:
    topics = tuple(make_topic(3) for _ in range(4))
    one, two = join(topics=topics, whole_topics=True), join(topics=topics, whole_topics=True)
    eventually(lambda: held(one, two) == [6, 6], what="two topics each")
    assert all(len({topic for topic, _ in member.consumer.claims()}) == 2 for member in (one, two))
    topic, _ = next(iter(one.consumer.claims()))
    one.do(lambda consumer: consumer.release(topic, 2))
    eventually(
        lambda: {each.partition for each in one.told(Released) if each.topic == topic} == {0, 1, 2},
        what="the release of a whole topic",
    )


def test_no_more_than_the_maximum(settings: ConsumerSettings, join: Join) -> None:
    one, two = join(max_claims=1), join(max_claims=1)
    eventually(lambda: held(one, two) == [1, 1], what="one each")
    three = join()
    eventually(lambda: held(three) == [2], what="the rest")
    assert held(one, two) == [1, 1]


def test_one_claim_at_a_time(settings: ConsumerSettings, join: Join) -> None:
    one = join(greedy=False)
    eventually(lambda: held(one) == [4], what="all claims")
    assert one.consumer.statistics().claims_won == 4


# -- a long log


def test_a_long_log_is_read_from_its_tail_and_silent_positions_are_found_in_the_past(
    settings: ConsumerSettings, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_LONG", 200)
    monkeypatch.setattr(log, "_NEAR", 20)
    fill(settings, 200)
    one = join()
    eventually(lambda: len(one.seen) == 200, what="all records")
    one.stop(release=True)
    _forget_group_offsets(settings)
    _fill_log(settings, 400)
    two = join()
    eventually(lambda: held(two) == [4], what="all claims")
    session = two.consumer._session
    assert session._log.tails >= {log_partition(place, 2) for place in session.buffer}
    assert not any(session._coordinator.worlds[partition].complete for partition in session._log.tails)
    fill(settings, 100, first=200)
    eventually(lambda: len(two.seen) == 100, what="what is new")
    assert sorted(two.seen) == list(range(200, 300))


def _forget_group_offsets(settings: ConsumerSettings) -> None:
    """So that positions are known to the coordination log alone."""
    consumer = Consumer({**settings.kafka, "group.id": settings.group})
    places = [TopicPartition(settings.topics[0], partition, 0) for partition in range(4)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


def _fill_log(settings: ConsumerSettings, records: int) -> None:
    """Another group writes until nothing else stands in the tail."""
    producer = Producer(dict(settings.kafka))

    def write(number: int) -> bool:
        message = Heartbeat(GroupPartition("another", "elsewhere", 0), Client.begin("c", "i"), number, 0, None, None)
        for partition in range(settings.coordination_partitions):
            producer.produce(settings.coordination_topic, encode(message), partition=partition)
        producer.poll(0)
        return clock_s() > until

    until = clock_s() + settings.tail_ms / 1000 + 0.5
    for number in range(records):
        write(number)
    eventually(lambda: write(records), what="a tail without us", interval_s=0.1)
    producer.flush(30)
