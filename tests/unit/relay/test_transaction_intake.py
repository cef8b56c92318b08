"""Who is at fault when a transaction fails, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from harvester.delivery.lane import Lane
from harvester.delivery.retries import Policy
from harvester.outbox.purge_session import PoisonRow
from harvester.record import KafkaRecord
from harvester.relay.core.frames import Dropped, Frame, Parked, Poisoned, Remark
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.transaction_intake import Refusals, TransactionIntake

UNDER = Remark(3, 7, "holder")
REFUSED, AWAY, TIMED_OUT = (
    KafkaError(code)
    for code in (KafkaError.INVALID_RECORD, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._MSG_TIMED_OUT)
)


class Shard:
    """Batches whose transaction has failed, and what was said of it."""

    def __init__(self, policy: str = "quarantine", max_attempts: int = 2) -> None:
        self.sent: list[Frame] = []
        self.quarantined: list[PoisonRow] = []
        self.batches = TransactionQueue(100, 100)
        host: Any = SimpleNamespace(send=self.sent.append, quarantine=self.quarantined.append)
        self.refusals = Refusals(self.batches, Policy(max_attempts, 0.1, 10.0, 30.0, policy), host)

    def attempt(self, *keys: str) -> list[QueuedRecord]:
        """A transaction of these records, or of all that is queued, that is undone."""
        for number, key in enumerate(keys, 1):
            record = KafkaRecord(number, key.encode(), "topic", b"", [], -1, 0)
            assert self.batches.offer(QueuedRecord(number, key.encode(), record, 0.0))
        taken = self.batches.take(100)
        self.batches.aborted()
        return taken

    def judge(self, entries: Sequence[QueuedRecord], error: KafkaError | str) -> None:
        self.refusals.judge([(entry, error) for entry in entries], UNDER)

    def queued(self) -> list[int]:
        found = [entry.id for entry in self.batches.take(100)]
        self.batches.aborted()
        return found


def test_one_that_is_refused_alone_is_at_fault() -> None:
    shard = Shard()
    entries = shard.attempt("a", "b", "a")
    shard.judge(entries[:1], REFUSED)
    (poison,) = shard.quarantined
    assert (poison.id, poison.term, poison.holder) == (1, 7, "holder")
    assert "INVALID_RECORD" in poison.error
    assert shard.queued() == [2], "its key is held while it is on its way"
    assert shard.batches.leaving() == [1]
    shard.batches.settle([1])
    assert shard.queued() == [3, 2]


def test_of_several_that_are_refused_together_nobody_is_blamed_yet() -> None:
    shard = Shard()
    entries = shard.attempt("a", "b", "c", "d")
    shard.judge(entries, REFUSED)
    assert (shard.quarantined, shard.sent) == ([], [])
    taken = shard.batches.take(100)
    assert [entry.id for entry in taken] == [1, 2]
    shard.batches.aborted()
    shard.judge(taken, REFUSED)
    taken = shard.batches.take(100)
    assert [entry.id for entry in taken] == [1]
    shard.batches.aborted()
    shard.judge(taken, REFUSED)
    assert [poison.id for poison in shard.quarantined] == [1]


@pytest.mark.parametrize("policy", ["hold", "stop"])
def test_a_policy_that_holds_gives_the_record_and_what_is_behind_it_back(policy: str) -> None:
    shard = Shard(policy)
    entries = shard.attempt("a", "b", "a")
    shard.judge(entries[:1], REFUSED)
    parked = shard.sent[0]
    assert isinstance(parked, Parked)
    assert (parked.record_id, list(parked.given_back), parked.held) == (1, [3], True)
    assert [type(frame) for frame in shard.sent[1:]] == ([Poisoned] if policy == "stop" else [])
    assert shard.queued() == [2]
    assert not shard.batches.offer(QueuedRecord(4, b"a", entries[0].record, 0.0))


def test_a_topic_that_is_missing_is_tried_again_and_then_given_up() -> None:
    shard = Shard(max_attempts=2)
    entries = shard.attempt("a", "b")
    shard.judge(entries[:1], AWAY)
    assert isinstance(shard.sent[0], Parked)
    shard.batches.reopen(1)
    assert shard.batches.offer(entries[0])
    shard.attempt()
    shard.judge(entries[:1], AWAY)
    assert [poison.id for poison in shard.quarantined] == [1]


def test_a_partition_that_is_away_costs_its_own_keys() -> None:
    shard = Shard()
    entries = shard.attempt("a", "b", "c")
    shard.judge(entries[:2], TIMED_OUT)
    assert [frame.record_id for frame in shard.sent if isinstance(frame, Parked)] == [1, 2]
    assert shard.queued() == [3]
    assert shard.refusals.attempts.has_timed_out(1)
    assert not shard.refusals.attempts.has_timed_out(3)


def test_while_nothing_gets_through_every_record_keeps_its_place() -> None:
    shard = Shard()
    entries = shard.attempt("a", "b")
    shard.judge(entries, TIMED_OUT)
    assert shard.sent == []
    assert shard.queued() == [1, 2]


def test_a_record_of_a_key_that_was_parked_with_it_is_not_judged_again() -> None:
    shard = Shard()
    entries = shard.attempt("a", "a", "b")
    shard.judge(entries[:2], AWAY)
    (parked,) = shard.sent
    assert isinstance(parked, Parked)
    assert (parked.record_id, list(parked.given_back)) == (1, [2])


def test_what_the_client_will_not_have_goes_to_quarantine_at_once() -> None:
    shard = Shard()
    entries = shard.attempt("a", "a")
    shard.judge(entries[:1], "invalid partition -7")
    assert [(poison.id, poison.error) for poison in shard.quarantined] == [(1, "invalid partition -7")]
    shard.batches.settle([1])
    assert shard.queued() == [2]


def test_a_quarantine_that_was_fenced_gives_the_record_up() -> None:
    shard = Shard()
    entries = shard.attempt("a")
    shard.judge(entries, "broken")
    shard.refusals.give_up(1)
    assert shard.sent == [Dropped([1], in_doubt=True)]
    assert shard.batches.in_flight == 0


def test_a_shard_that_has_something_queued_gives_a_sign_of_life() -> None:
    """It may pause for longer than one may be silent: after an abort, or while a large value is put away (P18)."""
    host: Any = SimpleNamespace(index=0, send=lambda _: None, purge=lambda _: None, quarantine=lambda _: None)
    intake = TransactionIntake(2000, Policy(5, 0.1, 10.0, 30.0), host)
    intake.under, intake.lane = UNDER, cast(Lane, object())
    record = KafkaRecord(1, b"a", "topic", b"", [], -1, 0)
    assert intake.batches.offer(QueuedRecord(1, b"a", record, 0.0))
    assert intake.stats() is not None
    assert intake.stats() is not None, "nothing has changed, and it is awaited"
    intake.batches.drop_queue()
    assert intake.stats() is not None
    assert intake.stats() is None
