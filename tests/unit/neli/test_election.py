"""The rules of the election, one by one (protocol P11 and P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harvester.neli import election as e
from harvester.neli.election import Election, ElectionTiming, Role, step

TIMING = ElectionTiming(
    heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, session_limit_s=5.0, rebalance_limit_s=9.0, revoke_limit_s=8.0
)


def committed(sent_at: float, stable_at: float | None = None) -> e.CommitSucceeded:
    return e.CommitSucceeded(sent_at, sent_at if stable_at is None else stable_at)


class Member:
    """A machine and what it said."""

    def __init__(self) -> None:
        self.state = Election()

    def feed(self, now: float, *events: e.Event) -> list[e.Command]:
        said: list[e.Command] = []
        for event in events:
            self.state, commands = step(self.state, event, now, TIMING)
            said += commands
        return said

    @property
    def until(self) -> float | None:
        return self.state.trusted_until(TIMING)


def leader(now: float = 100.0) -> Member:
    """A leader under term 7 whose proofs were both sent at `now`."""
    member = Member()
    member.feed(now, e.Assigned(), e.HeartbeatReturned(now), committed(now), e.LeadsUnderTerm(7))
    assert member.state.role is Role.LEADER
    return member


def fences(said: list[e.Command]) -> bool:
    return any(isinstance(command, e.FenceNow) for command in said)


def test_an_owner_proposes_itself_at_once_and_then_every_interval() -> None:
    member = Member()
    assert member.feed(0, e.Assigned()) == [e.SendHeartbeat()]
    assert member.feed(0.9, e.Tick(True)) == []
    assert member.feed(1.0, e.Tick(True)) == [e.SendHeartbeat()]


def test_nobody_else_sends_heartbeats() -> None:
    member = Member()
    assert member.feed(5, e.Tick(True)) == []
    leaving = leader()
    assert leaving.feed(101, e.RevokeBegan(), e.Tick(True)) == []


def test_a_returned_heartbeat_asks_for_a_commit() -> None:
    member = Member()
    member.feed(0, e.Assigned())
    assert member.feed(1, e.HeartbeatReturned(0.5)) == [e.CommitOffset()]
    assert member.state.role is Role.CANDIDATE


def test_a_heartbeat_alone_proves_nothing() -> None:
    member = Member()
    member.feed(0, e.Assigned(), e.HeartbeatReturned(0))
    assert member.until is None


def test_a_commit_alone_proves_nothing() -> None:
    member = Member()
    assert member.feed(0, e.Assigned(), committed(0)) == [e.SendHeartbeat()]
    assert member.until is None


def test_both_make_a_leader_until_the_older_ones_sending_and_the_timeout() -> None:
    member = Member()
    member.feed(0, e.Assigned(), e.HeartbeatReturned(1))
    assert member.feed(3, committed(2)) == [e.Trust(6), e.Acquire()]


@pytest.mark.parametrize("order", [(1, 4), (4, 1)])
def test_trust_counts_from_the_sending_of_each_proof(order: tuple[float, float]) -> None:
    member = Member()
    heartbeat, commit = order
    member.feed(0, e.Assigned())
    member.feed(4, e.HeartbeatReturned(heartbeat), committed(commit))
    assert member.until == 6


def test_each_proof_has_its_own_bound() -> None:
    member = Member()
    member.feed(0, e.Assigned())
    timing = replace(TIMING, session_limit_s=20.0, rebalance_limit_s=30.0)
    member.feed(1, e.HeartbeatReturned(1), committed(1, stable_at=-10))
    assert member.state.trusted_until(timing) == 6  # heartbeat_timeout after the heartbeat
    member.feed(5, e.HeartbeatReturned(5))
    assert member.state.trusted_until(replace(timing, heartbeat_timeout_s=50)) == 20  # of the rebalance
    assert member.state.trusted_until(replace(timing, heartbeat_timeout_s=50, rebalance_limit_s=40)) == 21


def test_commits_of_a_rebalance_that_is_missed_extend_nothing() -> None:
    member = leader(100)
    for now in range(101, 109):
        member.feed(now, e.HeartbeatReturned(now), committed(now, stable_at=100))
    assert member.until == 109  # rebalance_limit after the group was last known to be stable


def test_a_fence_names_the_proof_that_is_missing() -> None:
    unheard, uncounted = leader(100), leader(100)
    assert unheard.feed(105, e.Tick(True))[0] == e.FenceNow("no heartbeat within heartbeat_timeout")
    uncounted.feed(104, e.HeartbeatReturned(104))
    assert uncounted.feed(105, e.Tick(True))[0] == e.FenceNow("the group coordinator accepted no commit in time")


def test_an_older_proof_never_takes_trust_back() -> None:
    member = leader(100)
    member.feed(101, committed(101), e.HeartbeatReturned(101))
    member.feed(102, committed(100.5), e.HeartbeatReturned(100.5))
    assert member.until == 106


def test_proofs_that_arrive_too_late_make_no_leader() -> None:
    member = Member()
    member.feed(0, e.Assigned())
    assert not any(isinstance(c, e.Acquire) for c in member.feed(6, e.HeartbeatReturned(0), committed(0)))
    assert member.state.role is Role.CANDIDATE


def test_what_was_sent_before_the_assignment_proves_nothing() -> None:
    member = Member()
    member.feed(10, e.Assigned(), e.HeartbeatReturned(9.9), committed(9.9))
    assert (member.until, member.state.role) == (None, Role.CANDIDATE)


def test_time_ends_trust() -> None:
    member = leader(100)
    assert member.feed(104.999, e.Tick(True)) == [e.SendHeartbeat()]
    said = member.feed(105, e.Tick(True))
    assert fences(said)
    assert member.state.role is Role.CANDIDATE


def test_a_proof_that_arrives_after_trust_has_ended_does_not_revive_it() -> None:
    member = leader(100)
    said = member.feed(105, e.HeartbeatReturned(104), committed(104))
    assert [type(command) for command in said] == [e.FenceNow]
    assert member.until is None


def test_a_fenced_owner_leads_again_with_proofs_sent_after_the_fence() -> None:
    member = leader(100)
    member.feed(106, e.Tick(True))
    assert not any(isinstance(c, e.Acquire) for c in member.feed(107, e.HeartbeatReturned(105), committed(105)))
    said = member.feed(108, e.HeartbeatReturned(106), committed(107))
    assert said == [e.CommitOffset(), e.Trust(111), e.Acquire()]


def test_a_foreign_heartbeat_of_a_higher_term_ends_trust_at_once() -> None:
    member = leader()
    said = member.feed(101, e.ForeignHeartbeat("other", 8))
    assert fences(said)
    assert "other" in next(c.reason for c in said if isinstance(c, e.FenceNow))


@pytest.mark.parametrize("term", [None, 0, 6, 7])
def test_other_foreign_heartbeats_do_not(term: int | None) -> None:
    assert leader().feed(101, e.ForeignHeartbeat("other", term)) == []


def test_before_the_term_is_taken_a_foreign_one_is_only_remembered() -> None:
    member = Member()
    member.feed(0, e.Assigned(), e.HeartbeatReturned(0), committed(0))
    assert member.feed(1, e.ForeignHeartbeat("other", 8)) == []
    assert member.state.highest_term == 8


def test_the_highest_term_is_kept_over_everything() -> None:
    member = leader()
    member.feed(101, e.ForeignHeartbeat("other", 9), e.RevokeBegan(), e.Revoked(), e.Assigned())
    assert member.state.highest_term == 9


def test_from_the_revoke_on_trust_has_a_limit() -> None:
    member = leader(100)
    assert member.feed(101, e.RevokeBegan()) == []
    assert member.feed(104, e.HeartbeatReturned(104), committed(103.5))[-1] == e.Trust(108.5)
    assert member.feed(106, e.HeartbeatReturned(106), committed(106))[-1] == e.Trust(109)  # 101 + 8


def test_a_revoke_says_so_when_it_shortens_trust() -> None:
    timing = replace(TIMING, revoke_limit_s=2.0)
    state, commands = step(leader(100).state, e.RevokeBegan(), 101, timing)
    assert commands == (e.Trust(103),)
    assert state.trusted_until(timing) == 103


def test_a_second_revoke_does_not_move_the_limit() -> None:
    member = leader(100)
    member.feed(101, e.RevokeBegan())
    member.feed(104, e.RevokeBegan())
    assert member.state.revoke_deadline == 109


def test_while_leaving_trust_that_has_ended_is_not_revived() -> None:
    member = leader(100)
    member.feed(101, e.RevokeBegan())
    assert fences(member.feed(105, committed(104)))
    assert member.feed(105.5, e.HeartbeatReturned(105.1), committed(105.2)) == []
    assert (member.until, member.state.role) == (None, Role.LEAVING)


def test_a_candidate_that_leaves_is_never_trusted() -> None:
    member = Member()
    member.feed(0, e.Assigned(), e.HeartbeatReturned(0), e.RevokeBegan())
    assert member.feed(1, committed(0.5), e.HeartbeatReturned(0.5)) == []
    assert member.until is None


def test_a_higher_term_ends_the_trust_of_one_that_leaves() -> None:
    member = leader()
    member.feed(101, e.RevokeBegan())
    assert fences(member.feed(102, e.ForeignHeartbeat("other", 8)))
    assert member.state.role is Role.LEAVING


def test_after_the_revoke_nothing_counts_and_nothing_is_said() -> None:
    member = leader(100)
    member.feed(101, e.RevokeBegan(), e.Revoked())
    assert member.feed(102, e.HeartbeatReturned(101.5), committed(101.5), e.Tick(True)) == []
    assert member.state == Election(highest_term=7)


def test_a_revoke_of_nothing_is_nothing() -> None:
    assert Member().feed(0, e.RevokeBegan()) == []


def test_a_second_assignment_changes_nothing() -> None:
    member = leader()
    before = member.state
    assert member.feed(101, e.Assigned()) == []
    assert member.state == before


def test_a_dead_mark_loop_ends_leadership_and_keeps_from_proposing() -> None:
    member = leader(100)
    assert fences(member.feed(101, e.Tick(False)))
    assert member.feed(102, e.Tick(False)) == []
    assert member.feed(103, e.Tick(True)) == [e.SendHeartbeat()]


def test_a_mark_loop_that_stays_dead_costs_the_place() -> None:
    member = leader(100)
    assert fences(member.feed(101, e.Tick(False)))
    patience_s = TIMING.patience_s
    assert member.feed(101 + patience_s - 0.1, e.Tick(False)) == []
    assert member.feed(101 + patience_s, e.Tick(False)) == [e.Rejoin("the mark loop has stalled")]
    assert member.feed(102 + patience_s, e.Tick(False)) == []


def test_stepping_down_fences_a_leader_only() -> None:
    assert leader().feed(101, e.StepDown("the term is another's"))[0] == e.FenceNow("the term is another's")
    assert Member().feed(0, e.Assigned(), e.StepDown("x")) == [e.SendHeartbeat()]


def test_a_term_counts_for_a_leader_only() -> None:
    member = Member()
    member.feed(0, e.LeadsUnderTerm(3))
    assert (member.state.term, member.state.highest_term) == (None, 3)
    assert leader().state.term == 7


def candidate(heard: range) -> Member:
    """Assigned at 0; its heartbeats came back at these moments, half a second after they were sent."""
    member = Member()
    member.feed(0, e.Assigned())
    for now in heard:
        member.feed(now, e.HeartbeatReturned(now - 0.5), e.Tick(True))
    return member


def rejoins(said: list[e.Command]) -> bool:
    return any(isinstance(command, e.Rejoin) for command in said)


def test_a_candidate_that_the_coordinator_never_answers_joins_anew() -> None:
    member = candidate(range(1, 16))
    assert not rejoins(member.feed(15.9, e.Tick(True)))
    assert rejoins(member.feed(16.0, e.Tick(True)))
    assert not rejoins(member.feed(16.9, e.HeartbeatReturned(16.5), e.Tick(True)))  # from here on it is new


def test_nobody_joins_anew_while_kafka_is_away_nor_at_the_moment_in_which_it_is_back() -> None:
    member = candidate(range(1, 4))
    for now in range(4, 40):
        assert not rejoins(member.feed(now, e.Tick(True)))
    assert not rejoins(member.feed(40, e.HeartbeatReturned(39.5), e.Tick(True)))
    said = member.feed(41, e.HeartbeatReturned(40.5), committed(40.5))
    assert e.Acquire() in said


def test_one_that_was_answered_does_not() -> None:
    member = candidate(range(1, 15))
    member.feed(15, committed(14.5))
    assert member.state.role is Role.LEADER


def test_a_leader_that_was_fenced_gets_its_time_before_it_joins_anew() -> None:
    member = leader(100)
    assert fences(member.feed(105, e.Tick(True)))
    assert not rejoins(member.feed(130, e.HeartbeatReturned(129.9), e.Tick(True)))
    assert e.Acquire() in member.feed(130.1, committed(130))
