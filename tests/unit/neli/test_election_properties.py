"""Three members, a coordinator and a topic, with any delays, losses and pauses: never two that believe to lead.

The coordinator is the group coordinator of Kafka in its worst mood: it gives partition 0 away as soon as the session
of its owner has run out, counted from the last commit that arrived, or a rebalance that the owner does not answer has
lasted for its timeout, and tells the owner late or never. What a leader sent before it lost its trust is on the wire
for D, and another one is elected only after that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.neli import election
from harvester.neli.election import (
    Acquire,
    Assigned,
    Command,
    CommitOffset,
    CommitSucceeded,
    Election,
    ElectionTiming,
    Event,
    FenceNow,
    ForeignHeartbeat,
    HeartbeatReturned,
    LeadsUnderTerm,
    RevokeBegan,
    Revoked,
    Role,
    SendHeartbeat,
    Tick,
    Trust,
    step,
)
from tests.support.longs import some_of

H, S, R, G = 5.0, 8.0, 12.0, 1.0  # heartbeat timeout, session timeout, rebalance timeout, group heartbeat interval
D = 3.0  # what is sent may arrive that much later: delivery timeout and the second of the client's scan
TIMING = ElectionTiming(
    heartbeat_interval_s=1.0,
    heartbeat_timeout_s=H,
    session_limit_s=S - D,
    rebalance_limit_s=R - D,
    revoke_limit_s=R - G,
)


@dataclass(eq=False)
class Member:
    """A process: its machine, and what it believes."""

    index: int
    state: Election = field(default_factory=Election)
    believes_until: float = 0.0
    leads: bool = False
    fenced_at: float = -1.0
    term: int = 0
    generation: int = 0  # of the group, when it was assigned
    read: int = 0  # position in the topic
    unread: list[tuple[float, float]] = field(default_factory=list)  # commits accepted, not yet heard of
    arrives_until: float = -1.0  # what it has sent so far

    def believes(self, now: float) -> bool:
        return self.leads and now < self.believes_until


class Broken(AssertionError):
    """Two leaders, or a rule of P11 that does not hold."""


class Group:
    """The world; each byte lets something happen."""

    def __init__(self, members: int = 3) -> None:
        self.now = 0.0
        self.members = [Member(index) for index in range(members)]
        self.owner: Member | None = None
        self.generation = 0
        self.session_ends = 0.0
        self.rebalance_began: float | None = None
        self.told = False  # whether the owner's callback has begun
        self.produced: list[tuple[int, float, int]] = []  # member, sent at, term; not yet in the topic
        self.topic: list[tuple[int, float, int]] = []
        self.commits: list[tuple[int, float, int]] = []  # member, sent at, generation; not yet at the coordinator
        self.term = 0
        self.acquisitions = 0

    def run(self, data: bytes) -> Group:
        for first, second in zip(data[::2], data[1::2], strict=False):
            self._act(first, second)
            self._check()
        return self

    def _act(self, what: int, which: int) -> None:
        member = self.members[which % len(self.members)]
        match what % 12:
            case 0 | 1:
                self._pass(1 / (1 + which % 4))
            case 2 | 3:
                self._feed(member, Tick(which % 16 != 15))
            case 4 if self.produced:
                self.topic.append(self.produced.pop(0))
            case 5 | 6 if member.read < len(self.topic):
                self._read(member)
            case 7 if self.commits:
                self._arrive(*self.commits.pop(which % len(self.commits)))
            case 8 if member.unread:
                self._feed(member, CommitSucceeded(*member.unread.pop(which % len(member.unread))))
            case 9 if which % 3 == 0 and (self.produced or self.commits):
                lost = self.produced if self.produced else self.commits
                lost.pop()
            case 10:
                self._coordinate(member, which)
            case 11 if which % 4 == 0:
                self._pass(3.0)
            case _:
                return

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _tell(self) -> None:
        assert self.owner is not None
        self.told = True
        self._feed(self.owner, RevokeBegan())

    def _arrive(self, index: int, sent_at: float, generation: int) -> None:
        """A commit reaches the coordinator."""
        member = self.members[index]
        if self.owner is member and generation == self.generation:
            self.session_ends = self.now + S
            stable_at = sent_at if self.rebalance_began is None else min(sent_at, self.rebalance_began)
            member.unread.append((sent_at, stable_at))

    def _coordinate(self, candidate: Member, which: int) -> None:
        owner = self.owner
        if owner is None:
            self.generation += 1
            self.owner, self.session_ends = candidate, self.now + S
            self.rebalance_began, self.told = None, False
            if candidate.state.role is not Role.OUTSIDE:
                self._feed(candidate, Revoked())
            candidate.generation = self.generation
            self._feed(candidate, Assigned())
        elif self.now >= self.session_ends:
            self.owner = self.rebalance_began = None  # and nobody tells it
        elif self.rebalance_began is None:
            if which % 4 == 0:
                self.rebalance_began, self.told = self.now, False
        elif self.now >= self.rebalance_began + R:
            self.owner = self.rebalance_began = None  # it missed the rebalance, and perhaps never knew of it
        elif not self.told:
            if which % 3 == 0:
                self._tell()
        elif which % 2:
            owner.arrives_until = -1.0  # it has drained
            self._feed(owner, Revoked())
            self.owner = self.rebalance_began = None

    def _read(self, member: Member) -> None:
        author, sent_at, term = self.topic[member.read]
        member.read += 1
        if author == member.index:
            self._feed(member, HeartbeatReturned(sent_at))
        else:
            self._feed(member, ForeignHeartbeat(str(author), term or None))

    def _feed(self, member: Member, event: Event) -> None:
        member.state, commands = step(member.state, event, self.now, TIMING)
        if isinstance(event, Tick) and any(isinstance(command, Trust | Acquire) for command in commands):
            raise Broken("local time extends trust")
        if isinstance(event, Revoked):
            member.leads = False
        for command in commands:
            self._perform(member, command)

    def _perform(self, member: Member, command: Command) -> None:
        state = member.state
        match command:
            case SendHeartbeat():
                self.produced.append((member.index, self.now, member.term if member.leads else 0))
            case CommitOffset():
                self.commits.append((member.index, self.now, member.generation))
            case Trust(until):
                if until <= self.now:
                    raise Broken("trust that is over is announced")
                member.believes_until = until
            case Acquire():
                self.acquisitions += 1
                proofs = (state.heartbeat_sent_at, state.commit_sent_at)
                if any(proof is None or proof < member.fenced_at for proof in proofs):
                    raise Broken("a proof from before the fence counts")
                member.leads = True
                self.term += 1
                member.term = self.term
                self._feed(member, LeadsUnderTerm(self.term))
            case FenceNow():
                member.leads, member.fenced_at = False, self.now

    def _check(self) -> None:
        believers = [member for member in self.members if member.believes(self.now)]
        if len(believers) > 1:
            raise Broken("two members believe to lead")
        for member in believers:
            if member.state.role is Role.LEADER:
                member.arrives_until = self.now + D
        if self.owner is not None and any(
            member.arrives_until > self.now for member in self.members if member is not self.owner
        ):
            raise Broken("another one is elected while something is on the wire")
        if self.owner is not None and any(member is not self.owner for member in believers):
            raise Broken("one believes to lead whose place is another's")


@settings(max_examples=some_of(200), deadline=None)
@given(st.binary(max_size=600), st.integers(2, 3))
def test_never_two_leaders(data: bytes, members: int) -> None:
    Group(members).run(data)


def histories(count: int) -> int:
    return sum(Group().run(random.Random(seed).randbytes(1500)).acquisitions for seed in range(count))


def test_long_histories_with_many_leaders() -> None:
    assert histories(200) > 100


# -- a test that cannot fail is a defect


def _any_time_counts(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from the receipt of a proof."""
    inner = election._apply

    def late(state: Election, event: Event, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
        if isinstance(event, HeartbeatReturned | CommitSucceeded) and event.sent_at >= state.since:
            event = HeartbeatReturned(now) if isinstance(event, HeartbeatReturned) else CommitSucceeded(now, now)
        return inner(state, event, now, timing)

    patch.setattr(election, "_apply", late)


def _heartbeats_suffice(patch: pytest.MonkeyPatch) -> None:
    inner = election._apply

    def easy(state: Election, event: Event, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
        if isinstance(event, HeartbeatReturned) and event.sent_at >= state.since and state.role is not Role.OUTSIDE:
            state = replace(state, commit_sent_at=event.sent_at, stable_at=event.sent_at)
        return inner(state, event, now, timing)

    patch.setattr(election, "_apply", easy)


def _old_proofs_count(patch: pytest.MonkeyPatch) -> None:
    inner = election._apply

    def lenient(
        state: Election, event: Event, now: float, timing: ElectionTiming
    ) -> tuple[Election, tuple[Command, ...]]:
        return inner(replace(state, since=0.0), event, now, timing)

    patch.setattr(election, "_apply", lenient)


def _rebalances_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """As if no commit were accepted during a rebalance."""
    inner = election._apply

    def blind(
        state: Election, event: Event, now: float, timing: ElectionTiming
    ) -> tuple[Election, tuple[Command, ...]]:
        if isinstance(event, CommitSucceeded):
            event = CommitSucceeded(event.sent_at, event.sent_at)
        return inner(state, event, now, timing)

    patch.setattr(election, "_apply", blind)


def _a_commit_counts_for_the_session(patch: pytest.MonkeyPatch) -> None:
    """As if nothing were on the wire when trust ends."""
    inner = Election.trusted_until

    def longer(state: Election, timing: ElectionTiming) -> float | None:
        return inner(state, replace(timing, heartbeat_timeout_s=S, session_limit_s=S))

    patch.setattr(Election, "trusted_until", longer)


@pytest.mark.parametrize(
    "mutation",
    [
        _any_time_counts,
        _heartbeats_suffice,
        _old_proofs_count,
        _rebalances_are_ignored,
        _a_commit_counts_for_the_session,
    ],
)
def test_the_world_notices(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(Broken):
        histories(300)


TIMES = st.floats(0, 100).map(lambda moment: round(moment, 2))
EVENTS = st.one_of(
    st.sampled_from([Assigned(), RevokeBegan(), Revoked(), Tick(True), Tick(False)]),
    st.builds(HeartbeatReturned, TIMES),
    st.builds(CommitSucceeded, TIMES, TIMES),
    st.builds(ForeignHeartbeat, st.just("x"), st.none() | st.integers(0, 9)),
    st.builds(LeadsUnderTerm, st.integers(1, 9)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), EVENTS), max_size=40))
def test_trust_never_outlives_the_proofs_and_is_never_revived(history: list[tuple[float, Event]]) -> None:
    state, now = Election(), 0.0
    newest = {HeartbeatReturned: -1e9, CommitSucceeded: -1e9}
    for waited, drawn in history:
        now += waited
        event = drawn
        if isinstance(event, HeartbeatReturned | CommitSucceeded):
            event = replace(event, sent_at=min(event.sent_at, now))  # nothing is sent in the future
            newest[type(event)] = max(newest[type(event)], event.sent_at)
        before = state.trusted_until(TIMING)
        led = state.role is Role.LEADER
        state, commands = step(state, event, now, TIMING)
        until = state.trusted_until(TIMING)
        assert until is None or until <= min(newest.values()) + H
        if led and before is not None and before <= now:
            assert isinstance(commands[0], FenceNow)
        if isinstance(event, Tick | ForeignHeartbeat | LeadsUnderTerm):
            assert until is None or until == before
        assert all(command.until > now for command in commands if isinstance(command, Trust))
        if state.role is Role.LEADER:
            assert until is not None
            assert until > now or led
