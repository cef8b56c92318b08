"""Where a coordinated consumer begins, on a real broker: never further back, and never past records in silence."""

from __future__ import annotations

from typing import Literal

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from harvester.coordination.admin import Observer, rows
from harvester.coordination.errors import OffsetOutOfRange
from harvester.coordination.events import OutOfRange
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import Join, ends, failure, fill, held, join, remove_records, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_what_retention_removed_is_said_to_be_left_out(
    settings: ConsumerSettings, join: Join, policy: Literal["earliest", "latest"]
) -> None:
    fill(settings, 100)
    one = join()
    eventually(lambda: len(one.seen) == 100, what="all records")
    one.stop(release=True)
    fill(settings, 400, first=100)
    after = ends(settings)
    first = {partition: end - 10 for partition, end in after.items()}
    remove_records(settings, first)
    two = join(out_of_range=policy)
    eventually(lambda: len(two.told(OutOfRange)) == 4, what="news of all four partitions")
    fill(settings, 50, first=500)
    expected = 50 + (40 if policy == "earliest" else 0)
    eventually(lambda: len(two.seen) == expected, what="what was not removed")
    for event in two.told(OutOfRange):
        assert event.first == first[event.partition]
        assert event.end == after[event.partition]
        assert event.offset < event.first
        assert event.resumed_at == (event.first if policy == "earliest" else event.end)


def test_by_default_the_consumer_ends_and_says_what_to_do(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 100)
    one = join()
    eventually(lambda: len(one.seen) == 100, what="all records")
    one.stop(release=True)
    fill(settings, 400, first=100)
    remove_records(settings, ends(settings))
    two = join()
    error = failure(two, OffsetOutOfRange)
    assert isinstance(error, OffsetOutOfRange)
    assert error.offset < error.first == error.end
    assert "set-position" in str(error.hint)
    event = two.told(OutOfRange)[0]  # others may have been told by then
    assert event.resumed_at is None
    assert two.seen == []


def test_a_position_beyond_the_end_is_an_error_under_any_policy(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 10)
    consumer = Consumer({**settings.kafka, "group.id": settings.group})
    consumer.commit(offsets=[TopicPartition(settings.topics[0], 0, 1000)], asynchronous=False)
    consumer.close()
    one = join(out_of_range="earliest")
    error = failure(one, OffsetOutOfRange)
    assert isinstance(error, OffsetOutOfRange)
    assert error.offset == 1000 > error.end


def test_a_group_without_positions_begins_with_the_first_record_that_there_is(
    settings: ConsumerSettings, join: Join
) -> None:
    fill(settings, 100)
    first = {partition: end // 2 for partition, end in ends(settings).items()}
    remove_records(settings, first)
    one = join()
    eventually(lambda: held(one) == [4], what="all claims")
    eventually(lambda: len(one.seen) == 100 - sum(first.values()), what="what is left")
    assert not one.told(OutOfRange)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_rewind_that_was_confirmed_outlasts_what_a_frozen_holder_writes_late(
    settings: ConsumerSettings, join: Join, first: int, at_most_once: bool
) -> None:
    fill(settings, 100)
    one = join(at_most_once=at_most_once)
    eventually(lambda: len(one.seen) == 100, what="all records")
    one.stop(release=False)
    with Observer(settings) as observer:
        observer.set_positions(settings.group, {(settings.topics[0], each): first for each in range(4)})
    late = Consumer({**settings.kafka, "group.id": settings.group})  # the commit that it had under way
    late.commit(
        offsets=[TopicPartition(settings.topics[0], each, end) for each, end in ends(settings).items()],
        asynchronous=False,
    )
    late.close()
    two = join(at_most_once=at_most_once)
    eventually(lambda: len(two.seen) >= 100 - 4 * first, what="all records again")
    assert {(partition, offset) for _, partition, offset in two.handed} == {
        (partition, offset) for _, partition, offset in one.handed if offset >= first
    }


@pytest.mark.parametrize("at_most_once", [False, True])
def test_nothing_lags_behind_in_a_transactional_topic_that_is_consumed(
    settings: ConsumerSettings, join: Join, at_most_once: bool
) -> None:
    """The markers of transactions have offsets, too, and nobody ever reads them."""
    producer = Producer({**settings.kafka, "transactional.id": settings.group})
    producer.init_transactions(30)
    one = join(at_most_once=at_most_once)
    for number in range(40):
        if number % 10 == 0:
            producer.begin_transaction()
        producer.produce(settings.topics[0], value=str(number).encode(), partition=number % 4)
        if number % 10 == 9:
            (producer.abort_transaction if number == 29 else producer.commit_transaction)(30)
    eventually(lambda: len(one.seen) == 30, what="what was committed")
    behind = dict.fromkeys([(settings.topics[0], each) for each in range(4)], 0)
    eventually(lambda: one.consumer.lag() == behind, what="no lag")
    with Observer(settings) as observer:

        def lags() -> list[int | None]:
            observer.follow(0)
            bounds = observer.bounds(settings.topics)
            return [row.lag for row in rows(observer.worlds.values(), bounds, 0, settings.group)]

        eventually(lambda: lags() == [0, 0, 0, 0], what="no lag seen from outside")
    one.stop(release=True)
    reader = Consumer({**settings.kafka, "group.id": settings.group})
    places = [TopicPartition(settings.topics[0], each) for each in range(4)]
    committed = [place.offset for place in reader.committed(places, timeout=10)]
    assert committed == [reader.get_watermark_offsets(place, 10)[1] for place in places]
    reader.close()
    two = join(at_most_once=at_most_once)
    fill(settings, 20, first=100)
    eventually(lambda: len(two.seen) == 20, what="what comes later")
