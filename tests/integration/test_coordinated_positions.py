"""Where a coordinated consumer begins, on a real broker: never further back, and never past records in silence."""

from __future__ import annotations

from typing import Literal

import pytest

from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.errors import OffsetOutOfRange
from harvester.coordination.events import OutOfRange
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
    from confluent_kafka import Consumer, TopicPartition

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
