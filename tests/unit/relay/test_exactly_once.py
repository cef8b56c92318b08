"""What goes into one transaction, and under which numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import KafkaError

from harvester import origin
from harvester.delivery.decode import Broken
from harvester.delivery.lane import TransactionOutcome
from harvester.origin import Stamps
from harvester.record import KafkaRecord
from harvester.relay import exactly_once
from harvester.relay.at_least_once import RESERVED
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.exactly_once import TransactionWriter
from tests.support.relay_shard import Delivered

INCARNATION = str(UUID(int=5))


class Producing:
    """A lane that takes everything, and what it took."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # id, number
        self.reported: list[Callable[..., None]] = []
        self.then: Callable[[], None] = lambda: None

    def produce(self, _topic: str, _value: Any, _key: Any, _partition: int, on_delivery: Any, *rest: Any) -> None:
        found = origin.decode(rest[-1][-1][1])
        assert found is not None
        self.taken.append((found.id, found.sequence))
        self.reported.append(on_delivery)
        self.then()

    def poll(self, _timeout_s: float) -> TransactionOutcome:
        return TransactionOutcome.DONE


class Shard:
    def __init__(self) -> None:
        self.batches, self.changed, self.over = TransactionQueue(100, 100), threading.Condition(), False
        self.low_water = None
        intake: Any = self
        self.filler = TransactionWriter(intake, Stamps("harvester", 0), frozenset({"own"}))
        self.filler.begin(1, INCARNATION)
        self.lane: Any = Producing()

    def is_over(self) -> bool:
        return self.over

    def has_more(self) -> bool:
        return self.over or self.batches.is_ready

    def add(self, *ids: int, topic: str = "t") -> None:
        with self.changed:
            for number in ids:
                self.batches.offer(QueuedRecord(number, None, KafkaRecord(number, None, topic, b"", [], -1, 0), 0.0))
            self.changed.notify()


@pytest.fixture
def shard() -> Shard:
    return Shard()


def test_what_comes_while_partitions_are_registered_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once, "_LONGEST_S", 120.0)
    shard, handed_over = Shard(), threading.Event()

    def come_later() -> None:
        handed_over.wait()
        shard.lane.then = end
        shard.add(2)

    def end() -> None:
        shard.over = True  # so that nothing else is waited for

    shard.lane.then = handed_over.set
    shard.add(1)
    late = threading.Thread(target=come_later)
    late.start()
    assert shard.filler.fill(shard.lane, 60.0)
    late.join()
    assert shard.lane.taken == [(1, 1), (2, 2)]


def test_numbers_of_a_transaction_that_is_not_committed_are_used_again(shard: Shard) -> None:
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    shard.filler.committed()
    shard.batches.committed()
    shard.add(3)
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken == [(1, 1), (2, 2), (1, 1), (2, 2), (3, 3)]
    shard.filler.begin(2, INCARNATION)
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken[-1] == (3, 1)


def test_a_transaction_that_nobody_wants_takes_nothing(shard: Shard) -> None:
    shard.add(1)
    shard.over = True
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken == []
    assert shard.batches.queued == 1


def test_a_record_that_cannot_be_sent_ends_it(shard: Shard) -> None:
    shard.batches.offer(QueuedRecord(1, None, Broken(1, None, "no headers"), 0.0))
    assert not shard.filler.fill(shard.lane, 0.0)
    shard.batches.aborted()
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(1, "no headers")]
    shard.batches.drop_queue()
    shard.add(2, topic="own")
    assert not shard.filler.fill(shard.lane, 0.0)
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(2, RESERVED)]


def test_what_failed_only_because_the_transaction_did_is_not_at_fault(shard: Shard) -> None:
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    first, second = shard.lane.reported
    first(KafkaError(KafkaError._PURGE_QUEUE), None)
    second(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    assert [entry.id for entry, _ in shard.filler.failed] == [2]
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.filler.failed == []


def test_whatever_produce_raises_breaks_that_record_only(shard: Shard) -> None:
    """P33."""

    def overflow() -> None:
        if shard.lane.taken[-1][0] == 2:
            raise OverflowError("too large")

    shard.lane.then = overflow
    shard.add(1, 2, 3)
    assert not shard.filler.fill(shard.lane, 0.0)
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(2, "the client refused it: too large")]


def test_a_delivery_without_an_offset_is_none(shard: Shard) -> None:
    """P45."""
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    for report, offset in zip(shard.lane.reported, (0, None), strict=True):
        report(None, Delivered(offset))
    assert [entry.id for entry, _ in shard.filler.failed] == [2]
