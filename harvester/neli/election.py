"""The election: who leads, and until when that may be believed. Pure.

Theory (Fast NELI, with the proofs of rule P11). Kafka's group coordinator gives partition 0 of the leader topic to at
most one member of the group; its owner leads. Owning it is not enough: the owner may be cut off without knowing. So it
proves its place repeatedly, and believes each proof only for a while:

    OUTSIDE ──assigned──▶ CANDIDATE ──both proofs──▶ LEADER ──trust expired, foreign term, dead marker──▶ CANDIDATE
       ▲                      │                        │                                     (FenceNow)
       └──────revoked─────────┴────────────────────────┴──revoke begins──▶ LEAVING ──revoked──▶ OUTSIDE

*Proofs.* A heartbeat of our own, sent to partition 0, has come back; and an offset commit has succeeded under our
member id and generation. A heartbeat alone says little about the group (the coordinator may be unreachable while the
topic is not), a commit alone little about the topic. Each counts from when it was *sent*, and has its own limit (P39).
With H, S, R, D and g for heartbeat, session, rebalance and delivery timeout and the group's own heartbeat interval,

    trust ends at min(heartbeat + H, commit + S − D − 1 s, stable_at + R − D − 1 s)

The commit counts until another member could have been elected. Kafka elects one only after it has removed us, for one
of two reasons (seen in the coordinators of Kafka 3.9 and 4). Either our session expired: an accepted commit restarts
it, so we stay for at least S after sending one. Or we missed a rebalance: a member that has not sent a JoinGroup is
removed R after the rebalance began, and `stable_at`, which comes with the commit, is a moment after which that
rebalance began (`harvester.neli.second_proof` derives it). D + 1 s are subtracted because a record sent just before
trust ends may be on the wire for D, and the client checks for expired records once a second. With H + D + 1 s ≤ S (P12)
and R ≥ S + the time for which a rebalance may go unnoticed, a leader that gets answers is limited by the first term
alone.

*Local time ends trust and never extends it.* The clock is checked before any other part of an event: a proof that
arrives after trust expired does not revive it. The machine fences, and only proofs sent after the fence make it lead
again, under a new leader id and term.

*From the beginning of a revoke*, trust never exceeds that moment + R − g, and every revoke is treated as possibly lost:
the client's own flag is not reliable. A leader's proofs still count while it leaves; a candidate's do not.

*A candidate that the coordinator never answers* may have a client that is stuck (librdkafka issue 3740). It keeps its
membership, so nobody would lead. If its heartbeats come back while no commit is answered, continuously for 3 H, it
rejoins with a new client.

*A dead mark loop must not keep leadership*: `Tick` carries whether the loop is alive. A leader whose loop is not is
fenced, and proves its place again only when it is. If that takes longer than 3 H, it leaves the group and rejoins it:
while it owned partition 0, nobody else could lead.

Times are seconds of a clock that runs through suspend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

# -- events


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group gave us partition 0."""


@dataclass(frozen=True, slots=True)
class RevokeBegan:
    """The rebalance callback that takes partition 0 away has begun; the group waits for us."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """Partition 0 is no longer ours."""


@dataclass(frozen=True, slots=True)
class HeartbeatReturned:
    """Our own heartbeat, sent at `sent_at`, was read from partition 0."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class ForeignHeartbeat:
    """Another member's heartbeat was read; `term` is None if it had none."""

    member: str
    term: int | None


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """An offset commit sent at this time was accepted by the group coordinator.

    `stable_at`: any rebalance that this member has not answered began after this.
    """

    sent_at: float
    stable_at: float


@dataclass(frozen=True, slots=True)
class LeadsUnderTerm:
    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """The relay itself gives up leadership (P8: the term belongs to another holder)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `marker_alive`: the mark loop turned recently, or is within its own bounded retry (P14)."""

    marker_alive: bool


Event = (
    Assigned
    | RevokeBegan
    | Revoked
    | HeartbeatReturned
    | ForeignHeartbeat
    | CommitSucceeded
    | LeadsUnderTerm
    | StepDown
    | Tick
)

# -- commands


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Produce a heartbeat to partition 0."""


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """Commit the position: the second proof."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lead, from now on and while trusted."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Both proofs hold; leadership may be believed until this moment."""

    until: float


@dataclass(frozen=True, slots=True)
class FenceNow:
    """Stop at once: another leader may exist."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Leave the group, and rejoin it with a new client."""

    reason: str


Command = SendHeartbeat | CommitOffset | Acquire | Trust | FenceNow | Rejoin


class Role(Enum):
    OUTSIDE = "outside"
    CANDIDATE = "candidate"
    LEADER = "leader"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    """In seconds: how often heartbeats are sent, how long a proof counts, and how long a revoke may take."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    session_limit_s: float  # S − D − 1 s: how long an accepted commit counts
    rebalance_limit_s: float  # R − D − 1 s, from a moment before an unnoticed rebalance
    revoke_limit_s: float  # rebalance_timeout − group heartbeat interval
    missed_heartbeats_s: float = 0.0  # how long a rebalance may go unnoticed
    rejoin_delay_s: float = 0.0  # and how long, once noticed, unanswered

    @property
    def patience_s(self) -> float:
        """How long a candidate waits for the coordinator's first answer, or for its mark loop."""
        return 3 * self.heartbeat_timeout_s


@dataclass(frozen=True, slots=True)
class Election:
    """The machine's state. `since` limits which proofs count: what was sent earlier proves nothing."""

    role: Role = Role.OUTSIDE
    since: float = 0.0
    heartbeat_sent_at: float | None = None  # of the newest that came back
    heard_since: float | None = None  # since when heartbeats have come back without interruption
    commit_sent_at: float | None = None  # of the newest that succeeded
    stable_at: float = -math.inf  # the latest that came with a commit
    next_heartbeat_at: float = 0.0
    revoke_deadline: float | None = None
    term: int | None = None
    highest_term: int = 0  # seen in the topic, ours included

    def trusted_until(self, timing: ElectionTiming) -> float | None:
        """When trust ends; None without both proofs."""
        if self.heartbeat_sent_at is None or self.commit_sent_at is None:
            return None
        until = min(
            self.heartbeat_sent_at + timing.heartbeat_timeout_s,
            self.commit_sent_at + timing.session_limit_s,
            self.stable_at + timing.rebalance_limit_s,
        )
        return until if self.revoke_deadline is None else min(until, self.revoke_deadline)


def step(state: Election, event: Event, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
    """Process one event at one moment; returns the next state and the commands, in order."""
    if _is_trusted(state) and _expired(state, now, timing):
        state, fence = _fence(state, now, _expiry(state, now, timing))
        state, commands = _apply(state, event, now, timing)
        return state, (fence, *commands)
    return _apply(state, event, now, timing)


def _apply(state: Election, event: Event, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
    match event:
        case Assigned():
            if state.role in (Role.CANDIDATE, Role.LEADER):
                return state, ()
            started = Election(Role.CANDIDATE, since=now, next_heartbeat_at=now, highest_term=state.highest_term)
            return _beat(started, now, timing)
        case RevokeBegan():
            if state.role in (Role.OUTSIDE, Role.LEAVING):
                return state, ()
            leaving = replace(state, role=Role.LEAVING, revoke_deadline=now + timing.revoke_limit_s)
            if state.role is Role.CANDIDATE:
                return _distrusted(leaving), ()
            until, bounded = state.trusted_until(timing), leaving.trusted_until(timing)
            return leaving, (Trust(bounded),) if bounded is not None and bounded != until else ()
        case Revoked():
            return Election(highest_term=state.highest_term), ()
        case HeartbeatReturned(sent_at):
            if state.role is Role.OUTSIDE or sent_at < state.since:
                return state, ()
            last = state.heartbeat_sent_at
            breaks = last is None or sent_at - last >= timing.heartbeat_timeout_s
            state = replace(
                state, heartbeat_sent_at=max(sent_at, last or sent_at), heard_since=now if breaks else state.heard_since
            )
            state, commands = _proved(state, now, timing)
            return state, (CommitOffset(), *commands)
        case CommitSucceeded(sent_at, stable_at):
            if state.role is Role.OUTSIDE or sent_at < state.since:
                return state, ()
            state = replace(
                state,
                commit_sent_at=max(sent_at, state.commit_sent_at or sent_at),
                stable_at=max(stable_at, state.stable_at),
            )
            return _proved(state, now, timing)
        case ForeignHeartbeat(member, term):
            state = replace(state, highest_term=max(state.highest_term, term or 0))
            if _is_trusted(state) and term is not None and state.term is not None and term > state.term:
                state, fence = _fence(state, now, f"{member} leads under the higher term {term}")
                return state, (fence,)
            return state, ()
        case LeadsUnderTerm(term):
            state = replace(state, highest_term=max(state.highest_term, term))
            return (replace(state, term=term), ()) if state.role is Role.LEADER else (state, ())
        case StepDown(reason):
            if state.role is not Role.LEADER:
                return state, ()
            state, fence = _fence(state, now, reason)
            return state, (fence,)
        case Tick(marker_alive):
            if state.role is Role.LEADER and not marker_alive:
                state, fence = _fence(state, now, "the mark loop has stalled")
                return state, (fence,)
            if state.role is Role.CANDIDATE and not marker_alive:
                if now - state.since < timing.patience_s:
                    return state, ()
                return replace(state, since=now), (Rejoin("the mark loop has stalled"),)
            if _is_unanswered(state, now, timing):
                anew = replace(state, since=now, heartbeat_sent_at=None, heard_since=None)
                return anew, (Rejoin("the group coordinator answers no commits"),)
            return _beat(state, now, timing)


def _is_unanswered(state: Election, now: float, timing: ElectionTiming) -> bool:
    """Whether the topic has long returned a candidate's heartbeats, but the coordinator has never answered."""
    if state.role is not Role.CANDIDATE or state.commit_sent_at is not None:
        return False
    if state.heard_since is None or state.heartbeat_sent_at is None:
        return False
    is_heard = now - state.heartbeat_sent_at < timing.heartbeat_timeout_s
    return is_heard and now - state.heard_since >= timing.patience_s


def _beat(state: Election, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
    if state.role not in (Role.CANDIDATE, Role.LEADER) or now < state.next_heartbeat_at:
        return state, ()
    return replace(state, next_heartbeat_at=now + timing.heartbeat_interval_s), (SendHeartbeat(),)


def _proved(state: Election, now: float, timing: ElectionTiming) -> tuple[Election, tuple[Command, ...]]:
    until = state.trusted_until(timing)
    if until is None or until <= now:
        return state, ()
    if state.role is Role.CANDIDATE:
        return replace(state, role=Role.LEADER), (Trust(until), Acquire())
    return state, (Trust(until),)


def _is_trusted(state: Election) -> bool:
    """Whether this member leads, or led when the revoke began and has not been fenced since."""
    return state.role is Role.LEADER or (state.role is Role.LEAVING and state.since < math.inf)


def _expired(state: Election, now: float, timing: ElectionTiming) -> bool:
    until = state.trusted_until(timing)
    return until is None or now >= until


def _expiry(state: Election, now: float, timing: ElectionTiming) -> str:
    heard = state.heartbeat_sent_at
    if heard is None or now >= heard + timing.heartbeat_timeout_s:
        return "no heartbeat within heartbeat_timeout"
    return "the group coordinator accepted no commit in time"


def _fence(state: Election, now: float, reason: str) -> tuple[Election, Command]:
    """Only proofs sent from now on count again; none while leaving."""
    if state.role is Role.LEAVING:
        return _distrusted(state), FenceNow(reason)
    fenced = Election(Role.CANDIDATE, since=now, next_heartbeat_at=now, highest_term=state.highest_term)
    return fenced, FenceNow(reason)


def _distrusted(state: Election) -> Election:
    """Leaving, and no proof counts any more."""
    return replace(state, since=math.inf, heartbeat_sent_at=None, commit_sent_at=None, stable_at=-math.inf)
