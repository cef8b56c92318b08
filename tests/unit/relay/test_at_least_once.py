"""What a shard sends, and what it no longer sends (P12, P13, P15); the interplay is in tests/simulated."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from harvester.delivery.retries import Policy
from harvester.failpoints import load
from harvester.outbox.purge_session import PoisonRow, QuarantineOutcome
from harvester.record import ReadRow
from harvester.relay.at_least_once import Sender
from harvester.relay.core import frames as f
from tests.support.relay_shard import Delivered, row_bytes

POLICY = Policy(2, retry_backoff_s=1.0, retry_backoff_max_s=4.0, queue_timeout_s=30.0)
LATER = float("inf")
LEADING = f.Remark(1, 7, "holder", "server")
DRAINING = f.Remark(2, None, None, None)


class Shard:
    """A sender, and everything that came out of it."""

    def __init__(self, trusted: Callable[[], bool] = lambda: True) -> None:
        self.produced: list[int] = []
        self.said: list[f.Frame] = []
        self.fatal: list[str] = []
        self.purged: list[int] = []
        self.poison: list[PoisonRow] = []
        self.reports: dict[int, Callable[[KafkaError | None, Any], None]] = {}
        self.send, self.quarantine = self.said.append, self.poison.append
        self.die, self.trusted, self.failpoints = self.fatal.append, trusted, load()
        self.index, self.is_crowded = 0, False
        self.records = self.sender = Sender(self, POLICY, self)
        self.sender.remark(LEADING)
        self.said.clear()

    def purge(self, rows: Sequence[ReadRow]) -> None:
        self.purged += [row.id for row in rows]

    def wake(self) -> None:
        """A retry was scheduled."""

    def produce(
        self, _topic: str, value: bytes, _key: bytes | None, _partition: int, on_delivery: Any, *_: Any
    ) -> None:
        """As the producer does it; a value is the record's id."""
        self.produced.append(int(value))
        self.reports[int(value)] = on_delivery

    def dispatch(self, *rows: tuple[int, bytes | None], epoch: int = 1) -> None:
        data = b"".join(row_bytes(number, key, "topic", number) for number, key in rows)
        self.sender.dispatch(f.Dispatch(epoch, data))

    def fail(self, record_id: int, code: int) -> None:
        self.reports[record_id](KafkaError(code), None)

    def refuse(self, record_id: int, partition: int) -> None:
        """As too large, in a batch of this partition."""
        message = SimpleNamespace(topic=lambda: "topic", partition=lambda: partition)
        self.reports[record_id](KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), message)

    def dropped(self) -> list[int]:
        """Ids that it has given back so far."""
        return sorted(number for frame in self.said if isinstance(frame, f.Dropped) for number in frame.ids)


def test_trust_is_asked_for_before_every_record() -> None:
    asked = itertools.count(1)
    shard = Shard(lambda: next(asked) <= 2)
    shard.dispatch((1, b"a"), (2, b"b"), (3, b"c"), (4, None), (5, b"a"))
    assert shard.produced == [1, 2]
    assert shard.dropped() == [3, 4, 5]
    shard.dispatch((6, b"d"))
    assert shard.dropped() == [3, 4, 5, 6]
    shard.sender.purged([1])
    shard.sender.due(LATER)
    assert shard.produced == [1, 2]


def test_a_record_that_fails_during_a_drain_is_not_sent_again() -> None:
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"), (3, b"b"))
    shard.sender.remark(DRAINING)
    assert shard.said == [f.Remarked(2, [1, 3])]
    shard.fail(1, KafkaError._MSG_TIMED_OUT)
    shard.fail(3, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert shard.dropped() == [1, 3]
    assert shard.sender.unsettled == 0  # the drain need not wait for a retry
    assert shard.sender.due(LATER) is None
    assert shard.produced == [1, 3]


def test_a_retry_that_is_due_during_a_drain_is_not_made() -> None:
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"))
    shard.fail(1, KafkaError._MSG_TIMED_OUT)
    assert shard.sender.due(0.0) is not None
    shard.sender.remark(DRAINING)
    assert shard.said == [f.InDoubt(1), f.Remarked(2, [], in_doubt=True)]
    assert shard.sender.due(LATER) is None
    assert shard.produced == [1]


@pytest.mark.parametrize("before", [None, KafkaError._MSG_TIMED_OUT])
def test_what_runs_out_of_trust_is_in_doubt_if_it_had_been_sent(before: int | None) -> None:
    """A record is about to be sent behind a purged one when a drain begins: nothing of it is on its way (P24)."""
    trusted = True
    shard = Shard(lambda: trusted)
    shard.dispatch((1, b"a"), (2, b"a"), (3, b"b"))
    if before is not None:
        shard.fail(3, before)
    trusted = False
    shard.sender.purged([1])
    (frame,) = (frame for frame in shard.said if isinstance(frame, f.Dropped))
    assert frame == f.Dropped([2, 3] if before is not None else [2], in_doubt=before is not None)


def test_what_arrives_during_a_drain_is_given_back() -> None:
    shard = Shard()
    shard.sender.remark(DRAINING)
    shard.dispatch((1, b"a"))
    shard.dispatch((2, b"b"), epoch=2)
    assert shard.dropped() == [1, 2]
    assert shard.produced == []


def test_a_record_that_timed_out_leaves_doubt_and_one_that_was_refused_none() -> None:
    """What a shard that ends says it owes (P51): settled or not, bytes of that record may be under way."""
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"b"))
    shard.fail(2, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert shard.sender.doubted_at == -math.inf
    before = time.monotonic()
    shard.fail(1, KafkaError._MSG_TIMED_OUT)
    shard.sender.stop()
    assert shard.sender.unsettled == 0
    assert shard.sender.doubted_at >= before


def test_a_stopped_shard_finishes_what_is_on_the_wire_and_sends_nothing_more() -> None:
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"), (3, b"b"), (4, b"c"))
    shard.fail(4, KafkaError._MSG_TIMED_OUT)
    shard.sender.stop()
    shard.reports[1](None, Delivered())
    shard.sender.purged([1])
    shard.fail(3, KafkaError._MSG_TIMED_OUT)
    shard.dispatch((5, b"d"))
    assert shard.sender.due(LATER) is None
    assert shard.sender.unsettled == 0
    assert shard.produced == [1, 3, 4]


def test_a_record_that_timed_out_is_sent_again_by_the_same_producer() -> None:
    """P15: the bytes of another producer's connection could arrive after those of its successor."""
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"))
    shard.fail(1, KafkaError._MSG_TIMED_OUT)
    assert (shard.said, shard.fatal) == ([f.InDoubt(1)], [])  # its key stays with this producer (P36)
    shard.sender.due(LATER)
    assert shard.produced == [1, 1]


def test_a_delivery_without_an_offset_is_none() -> None:
    """P45: the broker refused the request and took a later one; the client takes both for appended."""
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"), (3, b"b"))
    shard.reports[3](None, Delivered())
    shard.reports[1](None, Delivered(None))
    shard.sender.collect()
    assert shard.purged == [3]
    [parked] = [frame for frame in shard.said if isinstance(frame, f.Parked)]
    assert (parked.record_id, parked.given_back, parked.attempts) == (1, [2], 0)


def test_a_delivery_without_an_offset_is_retried_while_nothing_gets_through() -> None:
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"))
    shard.reports[1](None, Delivered(None))
    shard.sender.collect()
    shard.sender.due(LATER)
    assert (shard.produced, shard.purged) == ([1, 1], [])


def test_whatever_produce_raises_breaks_that_record_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """P33."""
    shard = Shard()
    produce = shard.produce

    def picky(topic: str, value: bytes, *rest: Any) -> None:
        if value == b"2":
            raise OverflowError("too large")
        produce(topic, value, *rest)

    monkeypatch.setattr(shard, "produce", picky)
    shard.dispatch((1, b"a"), (2, b"b"), (3, b"c"))
    assert shard.produced == [1, 3]
    assert [(poison.id, poison.error) for poison in shard.poison] == [(2, "the client refused it: too large")]


def test_whatever_a_report_raises_breaks_that_record_only() -> None:
    """P33."""

    class Odd(KafkaError):
        def str(self) -> str:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "odd")

    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"b"))
    shard.reports[1](Odd(KafkaError._MSG_TIMED_OUT), None)
    shard.reports[2](None, Delivered())
    shard.sender.collect()
    assert [poison.id for poison in shard.poison] == [1]
    assert shard.purged == [2]


def test_a_producer_that_cannot_go_on_goes_with_its_process() -> None:
    """P15."""
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"))
    shard.fail(1, KafkaError._FATAL)
    assert [type(frame) for frame in shard.said] == [f.FateUnknown]
    assert len(shard.fatal) == 1
    assert shard.sender.due(LATER) is None
    assert shard.produced == [1]


def test_a_key_whose_record_was_given_up_takes_nothing_before_a_remark() -> None:
    """P5: what is on its way must not overtake the record, which is marked again under the next leader."""
    shard = Shard()
    shard.sender.dispatch(f.Dispatch(1, row_bytes(1, b"a", "no topic", 1) + row_bytes(2, b"a", "topic", 2)))
    [poison] = shard.poison
    shard.sender.quarantined(poison, QuarantineOutcome.FENCED)
    assert shard.dropped() == [1, 2]
    shard.said.clear()
    shard.dispatch((3, b"a"), (4, b"b"))
    assert shard.said == [f.Refused(1, [3])]
    assert shard.produced == [4]


def test_of_a_batch_that_is_too_large_only_the_largest_record_is_at_fault() -> None:
    """The broker refuses all that was sent together; a small record must not go to quarantine for it (I7)."""
    shard = Shard()
    small, large, elsewhere = 1, 10_000, 2
    shard.dispatch((small, b"a"), (elsewhere, b"c"), (large, b"b"))
    for partition, record_id in ((0, small), (0, large), (1, elsewhere)):
        shard.refuse(record_id, partition)
    shard.sender.collect()
    assert [frame.record_id for frame in shard.said if isinstance(frame, f.Parked)] == [large, elsewhere]
    shard.sender.due(LATER)
    assert shard.produced[3:] == [small]
    shard.sender.closed(1, large)
    shard.dispatch((large, b"b"))
    for record_id in (small, large):
        shard.refuse(record_id, 0)
    shard.sender.collect()
    assert [poison.id for poison in shard.poison] == [large]


def settled(shard: Shard) -> list[list[int]]:
    return [list(frame.ids) for frame in shard.said if isinstance(frame, f.Settled)]


def test_while_a_keys_next_record_follows_the_supervisor_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    shard = Shard()
    shard.dispatch(*((number, b"a") for number in range(1, 201)))
    shard.sender.purged([1])
    assert settled(shard) == [[1]]  # the first for a long time
    for number in range(2, 66):
        shard.sender.purged([number])
    assert settled(shard) == [[1], list(range(2, 66))]
    shard.sender.purged([66])
    clock += 0.1
    shard.sender.purged([67])
    assert settled(shard)[2:] == [[66, 67]]
    shard.sender.purged([68])
    shard.sender.stats()
    assert settled(shard)[3:] == [[68]]
    assert shard.produced == list(range(1, 70))


def test_where_nothing_follows_the_supervisor_is_told_at_once() -> None:
    shard = Shard()
    shard.dispatch((1, b"a"), (2, b"a"), (3, b"b"))
    for number in (1, 3, 2):
        shard.sender.purged([number])
    assert settled(shard) == [[1], [3], [2]]


def test_where_nothing_more_may_be_in_flight_the_supervisor_is_told_at_once() -> None:
    """It has records of other keys for the room, which may come long before the next report of this one."""
    shard = Shard()
    shard.is_crowded = True
    shard.dispatch(*((number, b"a") for number in range(1, 5)))
    for number in (1, 2, 3):
        shard.sender.purged([number])
    assert settled(shard) == [[1], [2], [3]]


@pytest.mark.parametrize("end", ["remark", "stop"])
def test_what_is_settled_is_told_before_a_reply_to_a_remark_and_before_the_end(end: str) -> None:
    """Otherwise the supervisor would count a settled record among those that were given up."""
    shard = Shard()
    shard.dispatch(*((number, b"a") for number in range(1, 5)))
    shard.sender.purged([1])
    shard.sender.purged([2])
    assert settled(shard) == [[1]]
    if end == "remark":
        shard.sender.remark(DRAINING)
        assert shard.said[1:] == [f.Settled([2]), f.Remarked(2, [3])]
    else:
        shard.sender.stop()
        assert settled(shard) == [[1], [2]]
