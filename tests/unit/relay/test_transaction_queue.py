"""Single decisions about transactions; everything in any order is in test_transaction_queue_properties.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import pytest

from harvester.delivery.decode import Broken
from harvester.delivery.progress import name
from harvester.record import KafkaRecord, RowVersions
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from tests.support.rows import ids_of

LIMIT = 1000


def entry(record_id: int, key: bytes | None = None, *, alone: bool = False) -> QueuedRecord:
    return QueuedRecord(record_id, key, Broken(record_id, key, ""), since=float(record_id), alone=alone)


def queue(*entries: QueuedRecord, most: int = 4, named: int = LIMIT) -> TransactionQueue:
    batches = TransactionQueue(most, named)
    assert all(batches.offer(one) for one in entries)
    return batches


def records(*ids: int, key: bytes | None = None) -> list[QueuedRecord]:
    return [entry(record_id, key) for record_id in ids]


def taken(batches: TransactionQueue, most: int = LIMIT) -> list[int]:
    return [one.id for one in batches.take(most)]


def is_ready(batches: TransactionQueue) -> bool:
    return batches.is_ready


def alone(batches: TransactionQueue) -> QueuedRecord | None:
    return batches.alone


def all_queued(batches: TransactionQueue) -> list[int]:
    """Their ids in order; what is open has been taken already."""
    return [one.id for one in batches._queue]


# -- in order


def test_a_transaction_takes_what_is_queued_in_its_order_up_to_its_limit() -> None:
    batches = queue(*records(5, 3, 4, 1, 2))
    assert taken(batches, 3) == [5, 3, 4]
    assert taken(batches, 3) == [1]
    assert taken(batches, 3) == []
    assert (batches.queued, batches.in_flight, ids_of(batches.progress())) == (1, 4, [1, 3, 4, 5])


def test_records_that_arrive_meanwhile_are_taken_too() -> None:
    batches = queue(*records(1))
    assert taken(batches) == [1]
    batches.offer(entry(2))
    assert taken(batches) == [2]


def test_an_abort_puts_everything_back_ahead_of_what_has_arrived() -> None:
    batches = queue(*records(1, 2, 3))
    batches.take(2)
    batches.offer(entry(4))
    batches.aborted()
    assert all_queued(batches) == [1, 2, 3, 4]
    assert (batches.in_flight, ids_of(batches.progress()), batches.leaving()) == (0, [], [])


def test_what_is_committed_is_named_until_it_is_purged() -> None:
    """P22: a progress record is cumulative."""
    batches = queue(*records(1, 2, 3))
    batches.take(2)
    assert [one.id for one in batches.committed(0)] == [1, 2]
    assert batches.leaving() == [1, 2]
    batches.take(1)
    assert ids_of(batches.progress()) == [1, 2, 3]
    batches.settle([1, 99])
    assert ids_of(batches.progress()) == [2, 3]
    assert batches.in_flight == 2


@pytest.mark.parametrize("committed", [True, False])
def test_after_an_unclear_outcome_what_progress_names_is_gone_and_the_rest_is_sent_again(committed: bool) -> None:
    batches = queue(*records(1, 2, 3, 4))
    batches.take(2)
    before = ids_of(batches.progress())
    batches.committed(0)
    batches.take(1)
    batches.aborted(ids_of(batches.progress()) if committed else before)
    assert all_queued(batches) == ([4] if committed else [3, 4])
    assert batches.leaving() == []


def test_the_oldest_is_in_the_open_transaction_or_heads_the_queue() -> None:
    batches = queue(*records(7, 8))
    oldest = batches.oldest()
    assert oldest is not None
    assert oldest.id == 7
    batches.take(1)
    assert batches.oldest() is oldest
    batches.committed(0)
    following = batches.oldest()
    assert following is not None
    assert following.id == 8
    assert TransactionQueue(1, 1).oldest() is None


# -- the bound on what a progress record names


def test_no_transaction_begins_whose_progress_would_name_too_many() -> None:
    batches = queue(*records(1, 2, 3, 4), named=3)
    assert taken(batches) == [1, 2, 3]
    batches.committed(0)
    assert not is_ready(batches)
    assert taken(batches) == []
    batches.settle([2])
    assert is_ready(batches)
    assert taken(batches) == [4]
    assert len(ids_of(batches.progress())) == 3


def test_what_goes_to_quarantine_is_not_named() -> None:
    """Nobody has published it; but it has not left the outbox either."""
    one, other = records(1, 2)
    batches = queue(one, other, named=1)
    batches.remove(one)
    assert (batches.leaving(), batches.in_flight) == ([1], 1)
    assert taken(batches) == [2]
    assert ids_of(batches.progress()) == [2]
    batches.settle([1])
    assert batches.leaving() == []


# -- alone


def test_a_record_that_timed_out_before_goes_alone() -> None:
    late = entry(2, alone=True)
    batches = queue(entry(1), late, entry(3))
    assert taken(batches) == [1]
    assert alone(batches) is None
    batches.committed(0)
    assert taken(batches) == [2]
    assert alone(batches) is late
    assert taken(batches) == []
    batches.committed(0)
    assert (taken(batches), alone(batches)) == ([3], None)


def test_one_that_goes_alone_at_the_head_is_taken_alone() -> None:
    batches = queue(entry(1, alone=True), entry(2))
    assert taken(batches) == [1]


# -- who is at fault


def refuse(batches: TransactionQueue, failed: Sequence[QueuedRecord]) -> QueuedRecord | None:
    """The open transaction is aborted since a broker refused these."""
    batches.aborted()
    return batches.suspect(failed)


def test_a_record_that_fails_by_itself_is_at_fault() -> None:
    one = entry(1)
    batches = queue(one, entry(2))
    batches.take(1)
    assert refuse(batches, [one]) is one
    assert not one.suspect


def test_suspects_go_by_halves() -> None:
    six = records(1, 2, 3, 4, 5, 6)
    batches = queue(*six, entry(7), most=LIMIT)
    assert len(batches.take(6)) == 6
    assert refuse(batches, six) is None
    assert taken(batches) == [1, 2, 3]
    assert refuse(batches, six[:3]) is None
    assert taken(batches) == [1]
    batches.committed(0)
    assert taken(batches) == [2]
    assert refuse(batches, [six[1]]) is six[1]


def test_others_go_with_a_suspect_once_nobody_is_searched_for() -> None:
    bad, good = records(1, 2), records(3, 4)
    batches = queue(*bad, *good, most=LIMIT)
    batches.take(4)
    refuse(batches, bad)
    assert taken(batches) == [1]
    assert refuse(batches, bad[:1]) is bad[0]
    batches.remove(bad[0])
    assert taken(batches) == [2, 3, 4]


def test_few_others_go_with_suspects_while_one_is_searched_for() -> None:
    """They may fail together with these, and the search would start again with all of them."""
    first, *suspects = records(*range(1, 8))
    batches = queue(first, *suspects, *records(*range(8, 20)), most=LIMIT)
    batches.take(LIMIT)
    refuse(batches, suspects)
    assert taken(batches) == [1, 2, 3]
    batches.committed(0)
    assert taken(batches) == [4, 5, 6]
    batches.committed(0)
    assert taken(batches) == [7, 8, 9]
    assert refuse(batches, batches._open) is None
    assert taken(batches) == [7]
    assert refuse(batches, suspects[-1:]) is suspects[-1]


def test_suspects_among_others_go_with_as_many_as_failed_together_may() -> None:
    """A batch is of one partition, so suspects need not be neighbours."""
    eight = records(*range(1, 9))
    batches = queue(*eight, most=LIMIT)
    batches.take(8)
    refuse(batches, eight[1::2])
    assert taken(batches) == [1, 2]
    batches.committed(0)
    assert taken(batches) == [3, 4]


@pytest.mark.parametrize("at", [0, 1, 31, 62, 63])
def test_a_culprit_is_found_by_few_aborts(at: int) -> None:
    sixty_four = records(*range(64))
    batches = queue(*sixty_four, most=LIMIT)
    aborts = 0
    culprit: QueuedRecord | None = None
    while culprit is None:
        batch = batches.take(LIMIT)
        if sixty_four[at] in batch:
            aborts += 1
            culprit = refuse(batches, batch)
        else:
            batches.committed(0)
    assert culprit is sixty_four[at]
    assert aborts <= ceil(log2(64)) + 1


@pytest.mark.parametrize("at", [0, 31, 63])
def test_those_who_were_suspected_in_vain_are_not_sent_one_by_one(at: int) -> None:
    """I7: a poison record costs others a moment, not one transaction each."""
    sixty_four = records(*range(64))
    batches = queue(*sixty_four, most=LIMIT)
    transactions = 0
    while batches.queued:
        batch = batches.take(LIMIT)
        transactions += 1
        if sixty_four[at] in batch:
            culprit = refuse(batches, batch)
            if culprit is not None:
                batches.remove(culprit)
        else:
            batches.committed(0)
    assert transactions <= 4 * log2(64)


# -- parked


def test_a_parked_record_takes_what_is_behind_it_along_and_its_key_is_refused() -> None:
    """P5, P18."""
    first = entry(1, b"a")
    batches = queue(first, entry(2, b"b"), entry(3, b"a"), entry(4), entry(5, b"a"))
    assert batches.park(first) == [3, 5]
    assert all_queued(batches) == [2, 4]
    assert not batches.offer(entry(6, b"a"))
    assert batches.offer(entry(7, b"b"))
    assert batches.offer(entry(8))
    batches.reopen(2)
    assert not batches.offer(entry(6, b"a"))
    batches.reopen(1)
    assert batches.offer(entry(1, b"a"))


def test_a_parked_record_without_a_key_refuses_nobody() -> None:
    first = entry(1)
    batches = queue(first, entry(2), entry(3, b"a"))
    assert batches.park(first) == []
    assert all_queued(batches) == [2, 3]
    assert batches.offer(entry(4))


def test_whatever_of_a_key_is_queued_is_given_back_though_it_stands_before() -> None:
    """The supervisor sorts them."""
    second = entry(2, b"a")
    batches = queue(entry(1, b"a"), second, entry(3, b"a"))
    assert batches.park(second) == [1, 3]
    assert batches.queued == 0


def test_a_remark_forgets_the_queue_and_whom_to_refuse() -> None:
    first = entry(1, b"a")
    batches = queue(first, entry(2, b"b"), entry(3), entry(4))
    batches.park(first)
    batches.take(1)
    assert batches.drop_queue() == [3, 4]
    assert ids_of(batches.progress()) == [2]
    assert batches.offer(entry(1, b"a"))
    batches.reopen(1)
    assert batches.offer(entry(5, b"a"))


def test_what_is_queued_can_be_told() -> None:
    one, other = records(1, 2)
    batches = queue(one, other)
    batches.take(1)
    assert (one in batches, other in batches) == (False, True)


def test_progress_names_rows_as_they_were_read() -> None:
    """P49, P50: by their ids alone, a successor could delete others."""
    batches = TransactionQueue(10, 10)
    for number in (2, 1):
        record = KafkaRecord(number, None, "t", b"", [], -1, 1_000 + number, 800 + number)
        batches.offer(QueuedRecord(number, None, record, 0.0, 70 + number))
    batches.take(1)
    batches.committed(0)
    assert batches.unpurged(0) == [name(RowVersions([2], [802], [1_002], [72]))]
    batches.take(1)
    assert batches.progress() == [name(RowVersions([1, 2], [801, 802], [1_001, 1_002], [71, 72]))]
