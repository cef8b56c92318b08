"""One claim, rule by rule (protocol P27 and P28)."""

from __future__ import annotations

import pytest

from harvester.coordination.core.claim import (
    Append,
    BatchStep,
    BatchWaiting,
    Begin,
    ClaimPhase,
    ClaimState,
    ClaimTaken,
    ClaimTick,
    ClaimTiming,
    Command,
    Event,
    LookBack,
    Missed,
    NotSent,
    PartitionDrained,
    PositionFound,
    ProcessBatch,
    Progressed,
    ReadBack,
    ReleaseClaim,
    StopHandingOut,
    TryClaim,
    step,
)
from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    ReturningMessages,
)
from harvester.coordination.core.world import ClaimVerdict

PLACE, CLIENT = GroupPartition("billing", "orders", 0), Client("a", "1")
PACE = ClaimTiming(interval_s=2.0, margin_s=1.0)  # heartbeats every second, belief for three


class Claimer:
    """A machine and what it said."""

    def __init__(self) -> None:
        self.state = ClaimState(PLACE, CLIENT)
        self.last: Message = Heartbeat(PLACE, CLIENT, 0, None, None, None)

    def feed(self, now: float, *events: Event) -> list[Command]:
        said: list[Command] = []
        for event in events:
            self.state, commands = step(self.state, event, now, PACE)
            said += commands
            for command in commands:
                if isinstance(command, Append):
                    (self.last,) = command.message.parts
        return said

    def read(
        self, now: float, offset: int, verdict: ClaimVerdict, last_offset: int | None = None, positioned: bool = True
    ) -> list[Command]:
        """Read back what was said last."""
        return self.feed(now, ReadBack(self.last, offset, verdict, last_offset, positioned))


def holder(now: float = 100.0, last_offset: int | None = 40) -> Claimer:
    """One that won at offset 7; all its messages so far are sent at `now`, and read back."""
    claimer = Claimer()
    claimer.feed(now, TryClaim(3))
    claimer.read(now, 7, ClaimVerdict.WON, last_offset)
    claimer.read(now, 8, ClaimVerdict.ACCEPTED, last_offset)
    assert claimer.state.phase is ClaimPhase.HELD
    return claimer


def test_a_claim_says_what_its_sender_knows() -> None:
    claimer = Claimer()
    assert claimer.feed(100, TryClaim(3)) == [Append(ClaimingPartition(PLACE, CLIENT, 1, 3, None, 2000))]
    assert claimer.feed(100, TryClaim(3)) == []


def test_the_winner_says_so_at_once_and_begins_behind_what_was_processed() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3))
    beat = Heartbeat(PLACE, CLIENT, 2, 7, 7, 40, 2000)
    assert claimer.read(100.1, 7, ClaimVerdict.WON, 40) == [Append(beat), Begin(PLACE, 7, 40)]


@pytest.mark.parametrize("verdict", [ClaimVerdict.LOST, ClaimVerdict.UNDECIDED])
def test_whoever_does_not_win_goes_away(verdict: ClaimVerdict) -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3))
    assert claimer.read(100.1, 7, verdict) == [Missed(PLACE)]
    assert claimer.state.phase is ClaimPhase.IDLE


def test_a_win_that_is_read_too_late_is_released() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3))
    release = ReleasingPartition(PLACE, CLIENT, 2, 7, 7, 40)
    assert claimer.read(103, 7, ClaimVerdict.WON, 40) == [Missed(PLACE), Append(release)]


def test_a_claim_given_up_that_wins_after_all_is_released() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3))
    assert claimer.feed(100, NotSent(1)) == [Missed(PLACE)]
    assert claimer.read(100.1, 7, ClaimVerdict.WON, 40) == [Append(ReleasingPartition(PLACE, CLIENT, 2, 7, 7, 40))]


def test_without_the_position_nothing_is_released_that_would_report_one() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3), NotSent(1))
    assert claimer.read(100.1, 7, ClaimVerdict.WON, None, positioned=False) == []


def test_a_winner_that_does_not_know_the_position_looks_for_it_first() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(None))
    assert claimer.read(100, 7, ClaimVerdict.WON, None, positioned=False) == [LookBack(PLACE, 7)]
    assert claimer.feed(100, PositionFound(6, 1)) == []
    assert claimer.feed(100, PositionFound(7, 40)) == [
        Append(Heartbeat(PLACE, CLIENT, 2, 7, 7, 40, 2000)),
        Begin(PLACE, 7, 40),
    ]


def test_a_claim_nobody_answers_is_given_up() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(3))
    assert claimer.feed(102.9, ClaimTick()) == []
    assert claimer.feed(103, ClaimTick()) == [Missed(PLACE)]


def test_heartbeats_go_out_every_half_interval_with_what_is_processed() -> None:
    claimer = holder(100)
    assert claimer.feed(100.9, ClaimTick()) == []
    claimer.feed(100.95, Progressed(44))
    assert claimer.feed(101, ClaimTick()) == [Append(Heartbeat(PLACE, CLIENT, 3, 7, 8, 44, 2000))]
    assert claimer.feed(101.9, ClaimTick()) == []


def test_a_position_never_goes_back() -> None:
    claimer = holder(100)
    claimer.feed(100, Progressed(44), Progressed(43))
    assert claimer.state.last_offset == 44


def test_belief_counts_from_the_sending_of_what_came_back() -> None:
    claimer = holder(100)
    claimer.feed(101, ClaimTick())
    claimer.read(102.5, 9, ClaimVerdict.ACCEPTED)
    assert claimer.state.trusted_until(PACE) == 104


def test_time_ends_belief() -> None:
    claimer = holder(100)
    said = claimer.feed(103, ClaimTick())
    assert said == [
        Append(Heartbeat(PLACE, CLIENT, 3, 7, 8, 40, 2000)),
        StopHandingOut(PLACE, 7, "none of its messages came back in time", lost=True),
    ]
    assert claimer.state.phase is ClaimPhase.IDLE


def test_the_last_word_says_all_that_is_processed() -> None:
    claimer = holder(100)
    said, stopped = claimer.feed(103, Progressed(44))
    assert said == Append(Heartbeat(PLACE, CLIENT, 3, 7, 8, 44, 2000))
    assert isinstance(stopped, StopHandingOut)
    (claim,) = claimer.feed(103, TryClaim(7))
    assert isinstance(claim, Append)
    assert claim.message.parts[0].number == 4, "behind what was said"


def test_the_last_word_of_a_claim_that_is_given_up_is_a_release() -> None:
    """A heartbeat would keep the partition from others, and nobody would claim it."""
    leaving = holder(100)
    leaving.feed(100.1, ReleaseClaim("closed"), Progressed(44))
    asked = holder(100)
    asked.feed(100.1, Progressed(44))
    for claimer, event in ((leaving, ClaimTick()), (asked, ReleaseClaim("closed"))):
        said, stopped = claimer.feed(103, event)
        assert said == Append(ReleasingPartition(PLACE, CLIENT, 3, 7, 8, 44))
        assert isinstance(stopped, StopHandingOut)
        assert stopped.lost


def test_whose_claim_another_has_says_nothing_more() -> None:
    assert [type(command) for command in holder(100).feed(103, ClaimTaken("b holds it"))] == [StopHandingOut]


def test_whose_batch_is_under_way_at_most_once_has_no_last_word() -> None:
    claimer = holder(100)
    claimer.state = claimer.state._replace(at_most_once=True)
    claimer.feed(100.1, BatchWaiting(49))
    assert [type(command) for command in claimer.feed(103, ClaimTick())] == [StopHandingOut]


def test_a_message_that_comes_back_too_late_does_not_revive_it() -> None:
    claimer = holder(100)
    claimer.feed(101, ClaimTick())
    _, stopped = claimer.read(103, 9, ClaimVerdict.ACCEPTED)
    assert isinstance(stopped, StopHandingOut)
    assert claimer.state.phase is ClaimPhase.IDLE


def test_records_are_handed_out_for_one_interval() -> None:
    claimer = holder(100)
    assert claimer.state.hand_out_until(PACE) == 102


@pytest.mark.parametrize("event", [ClaimTaken("b holds it"), None])
def test_whose_claim_is_over_stops_at_once(event: Event | None) -> None:
    claimer = holder(100)
    said = claimer.feed(100.5, event) if event else claimer.read(100.5, 9, ClaimVerdict.REFUSED)
    assert [type(command) for command in said] == [StopHandingOut]
    assert claimer.state.hand_out_until(PACE) < 0


def test_what_an_older_claim_said_ends_nothing() -> None:
    claimer = holder(100)
    old = Heartbeat(PLACE, CLIENT, 9, 3, 3, 40, 2000)
    assert claimer.feed(100.5, ReadBack(old, 9, ClaimVerdict.REFUSED, 40, True)) == []


def test_a_release_waits_until_the_application_is_done() -> None:
    claimer = holder(100)
    assert claimer.feed(100.1, ReleaseClaim("closed")) == [StopHandingOut(PLACE, 7, "closed", lost=False)]
    assert claimer.state.hand_out_until(PACE) < 0
    assert claimer.feed(101, ClaimTick()) == [Append(Heartbeat(PLACE, CLIENT, 3, 7, 8, 40, 2000))]
    claimer.feed(101.1, Progressed(44))
    assert claimer.feed(101.2, PartitionDrained(44)) == [Append(ReleasingPartition(PLACE, CLIENT, 4, 7, 8, 44))]
    assert claimer.state.phase is ClaimPhase.IDLE


def test_at_most_once_step_by_step() -> None:
    claimer = holder(100)
    assert claimer.feed(100.1, BatchWaiting(49)) == [Append(ClaimingMessages(PLACE, CLIENT, 3, 7, 8, 49))]
    assert not claimer.state.may_fetch(100.1, PACE)
    assert claimer.read(100.2, 9, ClaimVerdict.ACCEPTED) == [Append(Heartbeat(PLACE, CLIENT, 4, 7, 9, 49, 2000))]
    assert claimer.read(100.3, 10, ClaimVerdict.ACCEPTED) == [ProcessBatch(PLACE, 7, 49)]
    assert claimer.state.last_offset == 49
    assert claimer.state.may_fetch(100.3, PACE)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_batch_whose_messages_are_refused_is_not_processed(steps: int) -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    for offset in range(steps):
        claimer.read(100.2, 9 + offset, ClaimVerdict.ACCEPTED)
    said = claimer.read(100.3, 12, ClaimVerdict.REFUSED)
    assert [type(command) for command in said] == [StopHandingOut]


@pytest.mark.parametrize("steps", [0, 1])
def test_an_unknown_outcome_is_no_success(steps: int) -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    for offset in range(steps):
        claimer.read(100.2, 9 + offset, ClaimVerdict.ACCEPTED)
    before = claimer.last
    (again,) = claimer.feed(100.3, NotSent(before.number))
    assert isinstance(again, Append)
    (message,) = again.message.parts
    assert (type(message), message.number) == (type(before), before.number + 1)


def test_both_of_two_commits_of_a_batch_are_one() -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    claimer.read(100.2, 9, ClaimVerdict.ACCEPTED)
    first = claimer.last
    claimer.feed(100.3, NotSent(first.number))
    second = claimer.last
    said = claimer.feed(100.4, ReadBack(first, 10, ClaimVerdict.ACCEPTED, 49, True))
    said += claimer.feed(100.4, ReadBack(second, 11, ClaimVerdict.ACCEPTED, 49, True))
    assert said == [ProcessBatch(PLACE, 7, 49)]


def test_other_heartbeats_wait_for_the_batch() -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    assert claimer.feed(102, ClaimTick()) == []


@pytest.mark.parametrize("last_offset", [39, 40])
def test_a_batch_that_is_behind_the_position_is_none(last_offset: int) -> None:
    claimer = holder(100)
    assert claimer.feed(100.1, BatchWaiting(last_offset)) == []


def test_a_batch_under_way_is_seen_through_before_the_release() -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    claimer.read(100.2, 9, ClaimVerdict.ACCEPTED)
    claimer.feed(100.2, ReleaseClaim("closed"))
    assert claimer.state.batch is not None
    assert claimer.state.batch.step is BatchStep.COMMITTED
    assert claimer.feed(100.2, PartitionDrained(40)) == []
    assert claimer.read(100.3, 10, ClaimVerdict.ACCEPTED) == [ProcessBatch(PLACE, 7, 49)]
    release = ReleasingPartition(PLACE, CLIENT, 5, 7, 10, 49)
    assert claimer.feed(100.4, PartitionDrained(49)) == [Append(release)]


def test_a_batch_that_is_only_claimed_is_dropped_by_a_release() -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49), ReleaseClaim("closed"))
    assert claimer.read(100.2, 9, ClaimVerdict.ACCEPTED) == []
    assert claimer.feed(100.3, PartitionDrained(40)) == [Append(ReleasingPartition(PLACE, CLIENT, 4, 7, 9, 40))]


@pytest.mark.parametrize("last_offset", [None, 40, 44])
def test_what_was_not_handed_out_is_returned_before_the_release(last_offset: int | None) -> None:
    claimer = holder(100)
    claimer.feed(100.1, BatchWaiting(49))
    claimer.read(100.2, 9, ClaimVerdict.ACCEPTED)
    claimer.read(100.3, 10, ClaimVerdict.ACCEPTED)
    claimer.feed(100.4, ReleaseClaim("closed"))
    assert claimer.feed(100.5, PartitionDrained(last_offset)) == [
        Append(ReturningMessages(PLACE, CLIENT, 5, 7, 10, last_offset)),
        Append(ReleasingPartition(PLACE, CLIENT, 6, 7, 10, last_offset)),
    ]


def test_the_token_grows_with_log_time_and_where_that_stands_still_with_the_offset() -> None:
    tokens = [
        holder(100).state._replace(won_ms=won_ms, generation=generation).token
        for won_ms, generation in [(1000, 7), (1000, 8), (1001, 0), (1_800_000_000_000, 5_000_000)]
    ]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] < 2**63


def test_the_token_is_of_the_moment_at_which_the_claim_stands_in_the_log() -> None:
    claimer = Claimer()
    claimer.feed(100, TryClaim(None))
    claimer.feed(100, ReadBack(claimer.last, 7, ClaimVerdict.WON, None, False, at_ms=5000))
    before = claimer.state.token
    claimer.feed(101, PositionFound(7, 40))
    assert claimer.state.token == before == claimer.state._replace(won_ms=5000).token
