"""Which record is handled next, and what becomes of one that failed: examples, and all orders of events."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.coordination.core.record_queues import FailureAction, FailurePolicy, PendingRecord, RecordQueues
from harvester.coordination.settings import ConsumerSettings
from tests.support.longs import some_of

Queues = RecordQueues[str]


def anything(_: str) -> bool:
    return True


def queued(*records: str) -> Queues:
    """Records of one claim, whose lane is their first letter."""
    queues = Queues()
    for record in records:
        queues.add("claim", record[0], record)
    return queues


def take(queues: Queues, now: float = 0.0) -> PendingRecord[str]:
    taken = queues.take(now, anything)
    assert taken is not None
    return taken


def test_records_of_a_lane_are_handled_one_after_the_other_and_lanes_at_once() -> None:
    queues = queued("a1", "a2", "b1")
    first, other = take(queues), take(queues)
    assert (first.record, other.record, queues.take(0.0, anything)) == ("a1", "b1", None)
    queues.settle(first)
    assert take(queues).record == "a2"


def test_of_the_lanes_the_one_whose_record_came_first_is_next_and_what_failed_comes_behind() -> None:
    queues = queued("a1", "a2", "b1", "a3", "c1")
    handled = []
    queues.retry(take(queues), 1.0)
    for now in (0.0, 1.0, 1.0, 1.0, 1.0):
        taken = take(queues, now)
        handled.append(taken.record)
        queues.settle(taken)
    assert handled == ["b1", "c1", "a1", "a2", "a3"]
    queues = queued("a1", "a2", "b1", "a3", "c1")
    for expected in ("a1", "a2", "b1", "a3", "c1"):
        taken = take(queues)
        assert taken.record == expected
        queues.settle(taken)


def test_a_record_that_waits_for_a_retry_holds_its_lane_and_no_other() -> None:
    queues = queued("a1", "a2", "b1", "b2")
    failed = take(queues)
    queues.retry(failed, 5.0)
    for expected in ("b1", "b2"):
        taken = take(queues, 4.0)
        assert taken.record == expected
        queues.settle(taken)
    assert queues.take(4.9, anything) is None
    assert (queues.parked, queues.wait_s(4.0, 10.0), queues.wait_s(4.0, 0.1)) == (1, 1.0, 0.1)
    again = take(queues, 5.0)
    assert (again.record, again.attempts, queues.parked) == ("a1", 1, 0)
    queues.settle(again)
    assert take(queues, 5.0).record == "a2"


def test_a_claim_that_may_not_be_handled_now_keeps_its_records() -> None:
    queues = queued("a1")
    assert queues.take(0.0, lambda _: False) is None
    assert take(queues).record == "a1"


def test_a_claim_that_has_ended_is_forgotten_but_for_what_is_in_hand() -> None:
    queues = queued("a1", "a2", "b1", "c1")
    in_hand, parked = take(queues), take(queues)
    queues.retry(parked, 1.0)
    queues.drop("claim")
    assert (queues.ready, queues.parked, queues.holds("claim")) == (0, 0, True)
    queues.add("next claim", "a", "a1 again")
    assert queues.take(9.0, anything) is None  # of that key one is in hand
    queues.settle(in_hand)
    assert take(queues).record == "a1 again"


def test_a_record_that_was_handled_before_it_was_queued_has_its_lane() -> None:
    queues = queued("b1")
    failed = queues.add("claim", "a", "a1", in_hand=True)
    queues.add("claim", "a", "a2")
    assert (queues.waits("a"), queues.waits("c")) == (True, False)
    queues.retry(failed, 1.0)
    assert take(queues).record == "b1"
    assert queues.take(0.0, anything) is None
    assert take(queues, 1.0).record == "a1"


@pytest.mark.parametrize("parked", [False, True])
def test_a_claim_that_is_forgotten_late_makes_room_for_the_next_one(parked: bool) -> None:
    queues = queued("a1")
    if parked:
        queues.retry(take(queues), 100.0)
    queues.add("next claim", "a", "a1 again")
    queues.drop("claim")
    assert take(queues).record == "a1 again"


def test_what_was_in_hand_when_its_claim_ended_is_not_tried_again() -> None:
    queues = queued("a1", "a2")
    failed = take(queues)
    queues.drop("claim")
    queues.retry(failed, 0.0)
    assert queues.take(9.0, anything) is None
    assert queues.is_empty


@pytest.mark.parametrize(
    ("on_error", "attempts", "verdicts"),
    [
        ("stop", None, [FailureAction.STOP]),
        ("stop", 2, [FailureAction.RETRY, FailureAction.STOP]),
        ("skip", 2, [FailureAction.RETRY, FailureAction.SKIP]),
        ("dead-letter", None, [FailureAction.RETRY] * 4 + [FailureAction.DEAD_LETTER]),
        ("retry", None, [FailureAction.RETRY] * 6),
    ],
)
def test_what_a_failure_leads_to(on_error: Any, attempts: int | None, verdicts: list[FailureAction]) -> None:
    made = ConsumerSettings(kafka={}, group="g", topics=("t",), on_error=on_error, attempts=attempts)
    judged = [made.failure_policy.judge(number + 1) for number in range(len(verdicts))]
    assert judged == verdicts


def test_each_wait_is_twice_the_one_before_up_to_the_longest() -> None:
    policy = FailurePolicy("retry", None, 0.5, 3.0)
    assert [policy.wait_s(attempts) for attempts in (1, 2, 3, 4, 5000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 2)),  # of which claim and key
        st.tuples(st.sampled_from(["settle", "retry"]), st.integers(0, 5), st.integers(0, 3)),  # which, how much later
        st.tuples(st.just("take"), st.integers(0, 1), st.integers(0, 2)),  # the claim that may not, if 1
        st.tuples(st.just("drop"), st.integers(0, 1), st.just(0)),
    ),
    max_size=80,
)


class Model:
    """Does what is said, and notices what must not be."""

    def __init__(self) -> None:
        self.queues = RecordQueues[tuple[int, int]]()
        self.lives = [0, 0]  # of each claim: after a drop it is another
        self.left: dict[tuple[int, int], list[int]] = defaultdict(list)  # not settled, in order: of a claim and a key
        self.in_hand: list[Any] = []
        self.parked_until: dict[int, float] = {}
        self.added, self.now = 0, 0.0

    def claim(self, number: int) -> tuple[int, int]:
        return (number, self.lives[number])

    def add(self, number: int, key: int) -> None:
        self.added += 1
        self.left[number, key].append(self.added)
        self.queues.add(self.claim(number), (number, key), self.added)

    def take(self, barred: int, later: int) -> None:
        self.now += later
        taken = self.queues.take(self.now, lambda claim: not (barred and claim[0] == 0))
        busy = {queued.lane for queued in self.in_hand}
        startable = [
            records[0]
            for lane, records in self.left.items()
            if records and lane not in busy and self.parked_until.get(records[0], 0) <= self.now
            and not (barred and lane[0] == 0)
        ]  # fmt: skip
        if taken is None:
            assert not startable
            return
        assert taken.record in startable  # so it is the first of its key, none of which is in hand
        fresh = [record for record in startable if record not in self.parked_until]
        assert taken.record in self.parked_until or taken.record == min(fresh)
        assert taken.claim[1] == self.lives[taken.claim[0]]
        self.in_hand.append(taken)

    def end(self, which: int, later: int | None) -> None:
        if not self.in_hand:
            return
        queued = self.in_hand.pop(which % len(self.in_hand))
        if later is None:
            self.queues.settle(queued)
        else:
            self.queues.retry(queued, self.now + later)
            self.parked_until[queued.record] = self.now + later
        records = self.left[queued.lane]
        if later is None and queued.record in records:
            records.remove(queued.record)

    def drop(self, number: int) -> None:
        self.queues.drop(self.claim(number))
        self.lives[number] += 1
        for (claimed, _), records in self.left.items():
            if claimed == number:
                records.clear()


@settings(max_examples=some_of(400))
@given(EVENTS)
def test_in_all_orders_of_events_a_key_keeps_its_order_and_nothing_waits_without_a_reason(
    events: list[tuple[str, int, int]],
) -> None:
    model = Model()
    for kind, first, second in events:
        match kind:
            case "add":
                model.add(first, second)
            case "take":
                model.take(first, second)
            case "settle":
                model.end(first, None)
            case "retry":
                model.end(first, second)
            case _:
                model.drop(first)
    while model.in_hand:
        model.end(0, None)
    while any(model.left.values()):
        model.take(0, 100)
        model.end(0, None)
    assert model.queues.is_empty
