"""One claim, as seen by the client that wants or holds it: events in, commands out. Pure.

Theory (proofs: docs/protocol/coordination.md). The log decides who holds a partition (`world`); this machine decides
what a client writes to the log, and how long it may believe what it has read:

    IDLE ──try──▶ CLAIMING ──read back: won──▶ HELD ──release──▶ LEAVING ──drained──▶ IDLE
     ▲               │             │            ▲  │                │       (ReleasingPartition)
     │               │             └▶ FINDING ──┘  │                │
     └──lost, late───┘     (position not known)    └──taken, expired┴──▶ IDLE (StopHandingOut)

*Winning.* The claim is appended and the log is read up to it; the verdict at its own offset is the answer. A claim that
won but is no longer awaited is released. The winner sends a heartbeat at once, begins after the position known to the
log, and sends a heartbeat every half interval: so a single lost one leaves the claim fresh.

*Belief* (P28). A holder believes in its claim until 2 intervals minus a margin after it *sent* the newest message that
it has read back as accepted: the claim is stale, and another can win, 2 intervals after that message was *appended*.
The clock runs through suspend and is checked before anything else. At least once, new records are handed out for one
interval after that sending, so that a crash repeats at most one interval's work. When belief ends, a last heartbeat
reports what is processed (or ReleasingPartition, if the claim was being given up). The log refuses it if the claim has
already ended there. So a client that hung and claims the partition again repeats what follows from the first record
that was in hand, and nothing before it.

*At most once* (P27), a batch of records up to L is not touched before its fate is in the log:

    fetched ──ClaimingMessages L──▶ read back: accepted ──Heartbeat L──▶ read back: accepted ──▶ ProcessBatch

Whoever wins the claim afterwards begins after L. A send whose outcome is unknown is repeated; only what is read back
counts. Other heartbeats wait in the meantime: they would end the message claim.

*A release returns what was not handed out* (P42). Nothing more is proposed, and a batch whose heartbeat is not sent yet
is dropped. What is ours after the last record that was handed out is returned by ReturningMessages, immediately before
ReleasingPartition. It is never handed out here, so the successor takes it: in order, and once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Heartbeats,
    Message,
    ReleasingPartition,
    ReturningMessages,
)
from harvester.coordination.core.world import NO_GENERATION, SET_TO_START, ClaimVerdict

# -- events


@dataclass(frozen=True, slots=True)
class TryClaim:
    """Claim the partition. `known`: the newest generation that the log certainly has, None if uncertain."""

    known: int | None


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A message of this very instance was read in the log. Position and log time are as known to the log after it."""

    message: Message
    offset: int
    verdict: ClaimVerdict
    last_offset: int | None
    positioned: bool
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class ClaimTaken:
    """According to the log, the claim is no longer ours. `moved`: somebody has set the group's position."""

    reason: str
    moved: bool = False


@dataclass(frozen=True, slots=True)
class PositionFound:
    """The position under which the claim of this generation was won, found in the whole retained log."""

    generation: int
    last_offset: int | None
    positioned: bool = True


@dataclass(frozen=True, slots=True)
class NotSent:
    """A message did not reach the log, or may not have."""

    number: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """At least once: everything up to this offset is processed."""

    last_offset: int


@dataclass(frozen=True, slots=True)
class BatchWaiting:
    """At most once: a batch that ends at this offset waits to be processed."""

    last_offset: int


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    """Give the partition up in an orderly way."""

    reason: str


@dataclass(frozen=True, slots=True)
class PartitionDrained:
    """Nothing of the partition is being handed out any more. At most once, what is ours after `last_offset` never
    was.
    """

    last_offset: int | None


@dataclass(frozen=True, slots=True)
class ClaimTick:
    """Time passes. A heartbeat that is due within `early_s` may be sent now."""

    early_s: float = 0.0


Event = (
    TryClaim
    | ReadBack
    | ClaimTaken
    | PositionFound
    | NotSent
    | Progressed
    | BatchWaiting
    | ReleaseClaim
    | PartitionDrained
    | ClaimTick
)

# -- commands


@dataclass(frozen=True, slots=True)
class Append:
    message: Message | Heartbeats


@dataclass(frozen=True, slots=True)
class LookBack:
    """Find the position in the log before this offset; the reply is PositionFound."""

    place: GroupPartition
    generation: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The partition is held: consume after `last_offset`, or later if that is uncertain (`positioned`)."""

    place: GroupPartition
    generation: int
    last_offset: int | None
    positioned: bool = True


@dataclass(frozen=True, slots=True)
class ProcessBatch:
    """At most once: the batch up to this offset is permanently ours."""

    place: GroupPartition
    generation: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class StopHandingOut:
    """Hand out nothing more. `lost`: it may already belong to another; otherwise reply with PartitionDrained.

    At most once, what is ours stays ours, unless it is `moved`: the next claim begins elsewhere.
    """

    place: GroupPartition
    generation: int
    reason: str
    lost: bool
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Missed:
    place: GroupPartition


Command = Append | LookBack | Begin | ProcessBatch | StopHandingOut | Missed


class ClaimPhase(Enum):
    IDLE = "idle"
    CLAIMING = "claiming"
    FINDING = "finding"
    HELD = "held"
    LEAVING = "leaving"


_OFFSET_BITS = 20  # the other bits of 64 suffice for times until 2248
HOLDING = (ClaimPhase.FINDING, ClaimPhase.HELD, ClaimPhase.LEAVING)


@dataclass(frozen=True, slots=True)
class ClaimTiming:
    """In seconds of the local clock. `margin_s`: allows for a slow clock, and for finishing what is in hand."""

    interval_s: float
    margin_s: float

    @property
    def interval_ms(self) -> int:
        return round(self.interval_s * 1000)

    @property
    def beat_every_s(self) -> float:
        """The bound is one interval between two heartbeats in the log."""
        return self.interval_s / 2

    @property
    def trust_s(self) -> float:
        """For how long sending an accepted message proves that the claim is ours."""
        return 2 * self.interval_s - self.margin_s


class BatchStep(Enum):
    """What a batch is waiting for."""

    CLAIMED = "its ClaimingMessages read back"
    COMMITTED = "its Heartbeat read back"


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """At most once: records up to `last_offset`, and the number of the awaited message."""

    last_offset: int
    step: BatchStep
    number: int


class ClaimState(NamedTuple):
    """The machine's state. `proof_at`: when the newest message read back as accepted was sent.

    A tuple, since each heartbeat of each claim changes it, which takes four times as long with a dataclass.
    """

    place: GroupPartition
    client: Client
    phase: ClaimPhase = ClaimPhase.IDLE
    number: int = 0  # of the last message
    claim_number: int = 0  # of the awaited claim
    generation: int = NO_GENERATION
    won_ms: int = 0  # in log time
    confirmed: int = NO_GENERATION
    last_offset: int | None = None
    proof_at: float = -math.inf
    sent: tuple[tuple[int, float], ...] = ()  # messages not read back yet, and when they were sent
    next_beat_at: float = math.inf
    batch: ClaimedBatch | None = None
    at_most_once: bool = False

    @property
    def token(self) -> int:
        """The fencing token of the claim: log time in ms, and the low bits of the generation for when log time stands
        still. Offsets start over in a new or recreated coordination topic. Time does not, so a later claim has the
        greater token, even while some consumers use the old topic and others the new one.
        """
        return (self.won_ms << _OFFSET_BITS) | (self.generation & ((1 << _OFFSET_BITS) - 1))

    def awaits(self, number: int) -> bool:
        """Whether this message was sent, and neither it nor a later one has been read back since."""
        return any(known == number for known, _ in self.sent)

    def beats(self, now: float) -> bool:
        """Whether a heartbeat is due."""
        return self.phase in (ClaimPhase.HELD, ClaimPhase.LEAVING) and self.batch is None and now >= self.next_beat_at

    def due_at(self, pace: ClaimTiming) -> float:
        """When time alone will next change something."""
        if self.phase is ClaimPhase.CLAIMING:
            return _sent_at(self, self.claim_number) + pace.trust_s
        return min(self.trusted_until(pace), self.next_beat_at) if self.phase in HOLDING else math.inf

    def trusted_until(self, pace: ClaimTiming) -> float:
        """When another client may hold the partition."""
        return self.proof_at + pace.trust_s if self.phase in HOLDING else -math.inf

    def hand_out_until(self, pace: ClaimTiming) -> float:
        """At least once: from when on no record may be given to the application."""
        return self.proof_at + min(pace.interval_s, pace.trust_s) if self.phase is ClaimPhase.HELD else -math.inf

    def may_fetch(self, now: float, pace: ClaimTiming) -> bool:
        """At most once: whether another batch may be proposed."""
        return self.phase is ClaimPhase.HELD and self.batch is None and now < self.trusted_until(pace)


_MOST_SENT = 64  # older ones would prove nothing
Next = tuple[ClaimState, tuple[Command, ...]]


def step(state: ClaimState, event: Event, now: float, pace: ClaimTiming) -> Next:
    """Process one event at one moment; returns the next state and the commands, in order."""
    if state.phase in HOLDING and now >= state.trusted_until(pace):
        state, said = _last_word(state, event, now, pace)
        state, stopped = _stop(state, "none of its messages came back in time")
        state, commands = _apply(state, event, now, pace)
        return state, (*said, *stopped, *commands)
    return _apply(state, event, now, pace)


def _last_word(state: ClaimState, event: Event, now: float, pace: ClaimTiming) -> Next:
    """At least once: report what is processed before belief ends; a client that is leaving reports its release."""
    if state.at_most_once or state.phase is ClaimPhase.FINDING or isinstance(event, ClaimTaken):
        return state, ()
    if isinstance(event, Progressed):
        state, _ = _apply(state, event, now, pace)
    if state.phase is ClaimPhase.LEAVING or isinstance(event, ReleaseClaim):
        return _append(state, ReleasingPartition(*_under_claim(state), state.last_offset), now, pace)
    if state.last_offset is None:
        return state, ()
    return _append(state, _heartbeat(state, state.last_offset, pace), now, pace)


def _apply(state: ClaimState, event: Event, now: float, pace: ClaimTiming) -> Next:
    match event:
        case TryClaim(known) if state.phase is ClaimPhase.IDLE:
            message = ClaimingPartition(
                state.place, state.client, state.number + 1, known, None, pace.interval_ms, state.at_most_once
            )
            state = state._replace(phase=ClaimPhase.CLAIMING, claim_number=message.number)
            return _append(state, message, now, pace)
        case ReadBack():
            return _read_back(state, event, now, pace)
        case ClaimTaken(reason, moved) if state.phase in HOLDING:
            return _stop(state, reason, moved=moved)
        case PositionFound(generation, last_offset, positioned) if state.phase is ClaimPhase.FINDING:
            if generation != state.generation:
                return state, ()
            return _begin(state._replace(last_offset=last_offset), now, pace, positioned=positioned)
        case NotSent(number):
            return _not_sent(state, number, now, pace)
        case Progressed(last_offset) if state.phase in (ClaimPhase.HELD, ClaimPhase.LEAVING):
            known = last_offset if state.last_offset is None else max(last_offset, state.last_offset)
            return state._replace(last_offset=known), ()
        case BatchWaiting(last_offset) if state.may_fetch(now, pace):
            if state.last_offset is not None and last_offset <= state.last_offset:
                return state, ()
            return _claim_messages(state, last_offset, now, pace)
        case ReleaseClaim(reason):
            return _leave(state, reason)
        case PartitionDrained(last_offset) if state.phase is ClaimPhase.LEAVING and state.batch is None:
            return _left(state, last_offset, now, pace)
        case ClaimTick(early_s):
            return _tick(state, now + early_s, now, pace)
        case _:
            return state, ()


def _tick(state: ClaimState, until: float, now: float, pace: ClaimTiming) -> Next:
    if state.phase is ClaimPhase.CLAIMING and now >= _sent_at(state, state.claim_number) + pace.trust_s:
        return _missed(state)
    if state.beats(until):
        return _append(state, _heartbeat(state, state.last_offset, pace), now, pace)
    return state, ()


def _read_back(state: ClaimState, event: ReadBack, now: float, pace: ClaimTiming) -> Next:
    message, number = event.message, event.message.number
    sent_at = _sent_at(state, number)
    state = state._replace(sent=tuple(entry for entry in state.sent if entry[0] > number))
    if isinstance(message, ClaimingPartition):
        return _claim_read(state, event, sent_at, now, pace)
    if state.phase not in HOLDING or message.generation != state.generation:
        return state, ()  # of a claim that has ended
    if event.verdict is not ClaimVerdict.ACCEPTED:
        return _stop(state, "another client holds it")
    state = state._replace(proof_at=max(state.proof_at, sent_at), confirmed=event.offset)
    return _advance_batch(state, message, now, pace)


def _claim_read(state: ClaimState, event: ReadBack, sent_at: float, now: float, pace: ClaimTiming) -> Next:
    awaited = state.phase is ClaimPhase.CLAIMING and event.message.number == state.claim_number
    if event.verdict is not ClaimVerdict.WON:
        return _missed(state) if awaited else (state, ())
    if awaited and now < sent_at + pace.trust_s:
        won = state._replace(
            generation=event.offset, won_ms=event.at_ms, confirmed=event.offset, proof_at=sent_at,
            last_offset=event.last_offset, batch=None,
        )  # fmt: skip
        if event.positioned:
            return _begin(won, now, pace)
        return won._replace(phase=ClaimPhase.FINDING), (LookBack(state.place, event.offset),)
    state, missed = _missed(state) if awaited else (state, ())
    if not event.positioned:
        return state, missed  # a release would report a position; the claim becomes stale by itself
    number, offset = state.number + 1, event.offset
    release = ReleasingPartition(state.place, state.client, number, offset, offset, event.last_offset)
    state, appended = _append(state, release, now, pace)
    return state, (*missed, *appended)


def _begin(state: ClaimState, now: float, pace: ClaimTiming, *, positioned: bool = True) -> Next:
    state = state._replace(phase=ClaimPhase.HELD)
    state, beat = _append(state, _heartbeat(state, state.last_offset, pace), now, pace)
    return state, (*beat, Begin(state.place, state.generation, state.last_offset, positioned))


def _claim_messages(state: ClaimState, last_offset: int, now: float, pace: ClaimTiming) -> Next:
    message = ClaimingMessages(*_under_claim(state), last_offset)
    state = state._replace(batch=ClaimedBatch(last_offset, BatchStep.CLAIMED, message.number))
    return _append(state, message, now, pace)


def _commit(state: ClaimState, batch: ClaimedBatch, now: float, pace: ClaimTiming) -> Next:
    message = _heartbeat(state, batch.last_offset, pace)
    state = state._replace(batch=ClaimedBatch(batch.last_offset, BatchStep.COMMITTED, message.number))
    return _append(state, message, now, pace)


def _advance_batch(state: ClaimState, message: Message, now: float, pace: ClaimTiming) -> Next:
    batch = state.batch
    match message:
        case ClaimingMessages() if batch is not None and batch.step is BatchStep.CLAIMED:
            if message.proposed_last_offset == batch.last_offset:
                return _commit(state, batch, now, pace)
        case Heartbeat() if batch is not None and batch.step is BatchStep.COMMITTED:
            if message.last_offset == batch.last_offset:
                process = ProcessBatch(state.place, state.generation, batch.last_offset)
                return state._replace(batch=None, last_offset=batch.last_offset), (process,)
    return state, ()


def _not_sent(state: ClaimState, number: int, now: float, pace: ClaimTiming) -> Next:
    if state.phase is ClaimPhase.CLAIMING and number == state.claim_number:
        return _missed(state)
    batch = state.batch
    if state.phase not in HOLDING or batch is None or number != batch.number:
        return state, ()
    if batch.step is BatchStep.CLAIMED:
        return _claim_messages(state, batch.last_offset, now, pace)
    return _commit(state, batch, now, pace)


def _leave(state: ClaimState, reason: str) -> Next:
    if state.phase is ClaimPhase.HELD:
        claimed = state.batch is not None and state.batch.step is BatchStep.CLAIMED
        state = state._replace(phase=ClaimPhase.LEAVING, batch=None if claimed else state.batch)
        return state, (StopHandingOut(state.place, state.generation, reason, lost=False),)
    if state.phase is ClaimPhase.CLAIMING:
        return _missed(state)
    if state.phase is ClaimPhase.FINDING:
        return state._replace(phase=ClaimPhase.IDLE), (Missed(state.place),)
    return state, ()


def _left(state: ClaimState, last_offset: int | None, now: float, pace: ClaimTiming) -> Next:
    """Return what is ours after this offset, and release."""
    returned: tuple[Command, ...] = ()
    if state.last_offset is not None and state.last_offset > (SET_TO_START if last_offset is None else last_offset):
        message = ReturningMessages(*_under_claim(state), last_offset)
        state, returned = _append(state._replace(last_offset=last_offset), message, now, pace)
    release = ReleasingPartition(*_under_claim(state), state.last_offset)
    state, released = _append(state._replace(phase=ClaimPhase.IDLE), release, now, pace)
    return state, (*returned, *released)


def _stop(state: ClaimState, reason: str, *, moved: bool = False) -> Next:
    phase = state.phase
    state = state._replace(phase=ClaimPhase.IDLE, batch=None)
    if phase is ClaimPhase.FINDING:
        return state, (Missed(state.place),)
    return state, (StopHandingOut(state.place, state.generation, reason, lost=True, moved=moved),)


def _missed(state: ClaimState) -> Next:
    return state._replace(phase=ClaimPhase.IDLE), (Missed(state.place),)


def _heartbeat(state: ClaimState, last_offset: int | None, pace: ClaimTiming) -> Heartbeat:
    return Heartbeat(*_under_claim(state), last_offset, pace.interval_ms, state.at_most_once)


def _under_claim(state: ClaimState) -> tuple[GroupPartition, Client, int, int, int]:
    """The leading fields of the claim's next message."""
    return state.place, state.client, state.number + 1, state.generation, state.confirmed


def _append(state: ClaimState, message: Message, now: float, pace: ClaimTiming) -> Next:
    state = state._replace(
        number=message.number,
        sent=(*state.sent, (message.number, now))[-_MOST_SENT:],
        next_beat_at=now + pace.beat_every_s,
    )
    return state, (Append(message),)


def _sent_at(state: ClaimState, number: int) -> float:
    """When a message was sent; long ago if forgotten."""
    return next((at for known, at in state.sent if known == number), -math.inf)
