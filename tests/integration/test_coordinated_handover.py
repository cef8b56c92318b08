"""A routine hand-over at most once, on a real broker: order is kept over both holders, and nothing is lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest

from harvester.clock import clock_s
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import Handed, Join, fill, held, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]

RECORDS = 800
# Each question takes a record: until there are batches in hand, and once the successor has begun, not slowly.
HURRIES: dict[str, float] = {"interval_s": 0.001, "longest_interval_s": 0.002}


@pytest.fixture
def at_most_once(settings: ConsumerSettings) -> ConsumerSettings:
    """Batches that a slow consumer has in hand for a while; claims that a busy machine does not lose."""
    return replace(settings, at_most_once=True, batch_records=100, heartbeat_interval_s=3.0)


def test_what_a_slow_consumer_owned_is_not_handed_out_after_its_successor_began(
    at_most_once: ConsumerSettings, join: Join
) -> None:
    fill(at_most_once, RECORDS)
    handed: list[Handed] = []
    with CoordinatedConsumer(at_most_once) as slow:

        def take() -> None:
            record = slow.poll(0)
            if record is not None:
                handed.append((clock_s(), record.partition(), record.offset()))
                slow.commit(record)

        def owns_all() -> bool:
            take()
            return len(slow.claims()) == 4 and slow.statistics().batches >= 8

        eventually(owns_all, what="batches of all partitions", **HURRIES)
        quick = join(**{name: getattr(at_most_once, name) for name in ("at_most_once", "heartbeat_interval_s")})

        def shared() -> bool:
            take()
            begun = {partition for _, partition, _ in list(quick.handed)}
            return (len(slow.claims()), held(quick), len(begun)) == (2, [2], 2)

        eventually(shared, 60, what="a fair share, and records of it")

        def done() -> bool:
            take()
            return len(handed) + len(quick.handed) >= RECORDS

        eventually(done, 60, what="all records", **HURRIES)
    assert quick.handed
    _assert_in_order([*handed, *quick.handed])


def test_what_a_consumer_owned_and_did_not_hand_out_when_it_was_closed_is_not_lost(
    at_most_once: ConsumerSettings, join: Join
) -> None:
    fill(at_most_once, RECORDS)
    handed: list[Handed] = []
    with CoordinatedConsumer(at_most_once) as first:

        def has_taken_some() -> bool:
            record = first.poll(0)
            if record is not None:
                handed.append((clock_s(), record.partition(), record.offset()))
            return len(handed) >= 10 and first.statistics().batches >= 8

        eventually(has_taken_some, what="batches of all partitions", **HURRIES)
    second = join(at_most_once=True, heartbeat_interval_s=at_most_once.heartbeat_interval_s)
    eventually(lambda: len(handed) + len(second.handed) >= RECORDS, 60, what="all records")
    _assert_in_order([*handed, *second.handed])


def test_a_list_is_in_hand_until_the_next_one_is_asked_for(at_most_once: ConsumerSettings) -> None:
    """Its partition is not released before, for an interval: another client would be handed what follows."""
    fill(at_most_once, 40)
    with CoordinatedConsumer(at_most_once) as consumer:
        records = eventually(lambda: consumer.consume(500, 0.5), what="a list")
        in_hand = {place.partition: buffer.open_records for place, buffer in consumer._session.buffer.items()}
        given = Counter(record.partition() for record in records)
        assert {partition: count for partition, count in in_hand.items() if count} == given


def _assert_in_order(handed: Iterable[Handed]) -> None:
    """Of each partition, in the order of time, and each once."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for _, partition, offset in sorted(handed):
        offsets[partition].append(offset)
    assert offsets == {partition: list(range(len(found))) for partition, found in offsets.items()}
    assert sum(map(len, offsets.values())) == RECORDS
