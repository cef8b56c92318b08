"""The world according to one partition of the coordination log: who holds what, how fresh, up to where. Pure.

Theory (with rules P28 to P31). Only `World.read`, the rationalizer of the original design, changes a world, so two
readers of the same records have the same world. A message is judged by the records before it and by its own place and
time, never by a reader's clock:

    message                by                                the claim               verdict     and then
    ClaimingPartition      anybody                           free, or stale          WON         held by its sender
                           the holder's client id, if it     held                    WON         held by the new
                           knows the claim's generation                                          instance
                           anybody else                      fresh or unknown        LOST        its sender is present
                           one that knows an older           any                     LOST
                           generation than there is
    Heartbeat,             the holder, under the claim's     held                    ACCEPTED    alive; position; the
    ClaimingMessages       generation                                                            message claim
    ReturningMessages      the same                          held                    ACCEPTED    alive; position, back
    ReleasingPartition     the same                          held                    ACCEPTED    free; position
    these four             anybody else, or under            any                     REFUSED     nothing
                           another generation
    SettingPosition        an administrator                  any                     ACCEPTED    free; position

A claim that wins, and a position that is set, begin a generation: the record's own offset. Generations of a partition
grow with the log, and each message names its own, so late messages of a frozen client or a slow network change nothing.
Positions only grow, unless one is set, or the holder returns what it claimed at most once and has not handed out. At
most once, an accepted Heartbeat is the commit point (P27): whoever wins the claim later begins after its position,
because that heartbeat precedes the claim in the log. It ends the message claim, fulfilled or not.

*Freshness* is the age of the holder's last accepted message in log time, the running maximum of the brokers' append
times (P28), which stands still while nobody writes:

    age < interval               fresh      the holder lives
    interval … 2 × interval      unknown    it may
    age > 2 × interval           stale      the next claim wins; until then the holder keeps its claim

*Exact.* A reader from offset 0 knows everything. One that begins in the tail, or meets a hole in the offsets, does not
know which claims won (P30): its verdict is UNDECIDED, and what it follows, the highest generation carried by messages,
may be shown but not acted upon. `exact` says for each claim whether what is known equals what a reader from offset 0
knows; `positioned` says the same of `last_offset`, which a winning claim does not carry. There are three ways to
certainty:

1. *Silence.* After 2 intervals of log time without a message about the partition, any holder is stale, so a claim that
   follows wins for every reader; unless its sender names a generation that may be out of date.
2. *Confirmation.* A message carries the offset at which its sender's last message was accepted. If that offset was read
   here, and neither a claim of the partition nor a set position is between it and the message, nothing can have ended
   the claim: the message is accepted, and everything relevant is known.
3. *A set position* decides everything by itself.

All three require the timestamps that a reader from offset 0 has. Append times may go back by at most `clock_step_ms`
when another broker leads the partition, so timestamps count once log time has advanced that far past the start
(`settled_ms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Message,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
    Unreadable,
    decode,
    position,
)

NO_GENERATION = -1
SET_TO_START = -1  # the last offset of a partition that certainly continues at offset 0


class Freshness(Enum):
    """How long ago the holder was heard from; FREE: the claim has no holder."""

    FREE = "free"
    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


class ClaimVerdict(Enum):
    """The verdict on a record of the log."""

    WON = "won"
    LOST = "lost"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    UNREADABLE = "unreadable"
    REPEATED = "repeated"  # already read


@dataclass(frozen=True, slots=True)
class LogTiming:
    """`interval_ms`: HeartbeatInterval. `clock_step_ms`: the largest difference between the clocks of two brokers."""

    interval_ms: int
    clock_step_ms: int

    def freshness(self, age_ms: int) -> Freshness:
        if age_ms < self.interval_ms:
            return Freshness.FRESH
        return Freshness.UNKNOWN if age_ms <= 2 * self.interval_ms else Freshness.STALE


class Claim(NamedTuple):
    """What is known of one partition. Times are log times. A tuple, since every heartbeat changes one.

    `generation`: offset of the last winning claim, kept when it is released. `last_offset`: the last processed offset,
    None before the first (then Kafka's group offset counts), SET_TO_START if an administrator or a holder has reset it
    to the start. `proposed`: a message claim not yet followed by a heartbeat. `heard_ms`: of the last message about the
    partition, whoever sent it. `contested`: offset of the last record that may have changed the generation; only kept
    while the claim is not exact.
    """

    holder: Client | None = None
    generation: int = NO_GENERATION
    beat_ms: int = 0
    last_offset: int | None = None
    proposed: int | None = None
    exact: bool = True
    positioned: bool = True
    heard_ms: int = 0
    contested: int = NO_GENERATION

    def freshness(self, now_ms: int, timing: LogTiming) -> Freshness:
        return Freshness.FREE if self.holder is None else timing.freshness(now_ms - self.beat_ms)


@dataclass(frozen=True, slots=True)
class Reading:
    """A record as read; `before` is what was known of its partition, `message` is None for a repeated record."""

    message: Message | Unreadable | None
    verdict: ClaimVerdict
    before: Claim | None = None


@dataclass(slots=True)
class World:
    """`start_offset`: where this reader's unbroken view begins, at log time `start_ms`; `next_offset`: the next to
    read.

    `presence` records, by group and client id, when a claim was last lost, oldest first: a client that loses one is
    present and wants a share (P31). This expires after 2 intervals. `older_ms`: when a client of any group was last
    heard from that does not read combined heartbeats.
    """

    timing: LogTiming
    start_offset: int = 0
    next_offset: int = 0
    now_ms: int = 0
    start_ms: int | None = None
    claims: dict[GroupPartition, Claim] = field(default_factory=dict)
    presence: dict[tuple[str, str], int] = field(default_factory=dict)
    older_ms: int | None = None

    @classmethod
    def begin(cls, timing: LogTiming, offset: int = 0) -> World:
        return cls(timing, offset, offset)

    # -- changes

    def read(self, offset: int, timestamp_ms: int, value: bytes | None) -> tuple[Reading, ...]:
        """Process the next record of the log, with its append time: returns one reading per message."""
        if offset < self.next_offset:
            return (Reading(None, ClaimVerdict.REPEATED),)
        if offset > self.next_offset:
            self.miss(offset)
        self.next_offset = offset + 1
        self.now_ms = max(self.now_ms, timestamp_ms)
        if self.start_ms is None:
            self.start_ms = self.now_ms
        message = decode(value)
        if isinstance(message, Unreadable):
            return (Reading(message, ClaimVerdict.UNREADABLE),)
        return tuple(map(self._take, message.parts))

    def _take(self, message: Message) -> Reading:
        before = self.claim(message.place)
        after, verdict = _judge(before, message, self)
        self.claims[message.place] = after._replace(heard_ms=self.now_ms)
        self._note_presence(message, verdict)
        if not message.client.reads_together and not isinstance(message, SettingPosition):
            self.older_ms = self.now_ms
        return Reading(message, verdict, before)

    def miss(self, offset: int) -> None:
        """Records before this one are missing (retention, compaction): from here on, this is a late reader's view."""
        self.start_offset = self.next_offset = offset
        self.start_ms = None
        for place, claim in self.claims.items():
            self.claims[place] = claim._replace(exact=False, positioned=False, contested=NO_GENERATION)

    def _note_presence(self, message: Message, verdict: ClaimVerdict) -> None:
        who = (message.place.group, message.client.id)
        if isinstance(message, ClaimingPartition) and verdict in (ClaimVerdict.LOST, ClaimVerdict.UNDECIDED):
            self.presence.pop(who, None)  # keeps the newest last
            self.presence[who] = self.now_ms
            for known, lost_ms in tuple(self.presence.items()):
                if self.now_ms - lost_ms <= 2 * self.timing.interval_ms:
                    break
                del self.presence[known]
        elif isinstance(message, ReleasingPartition) and verdict is ClaimVerdict.ACCEPTED:
            self.presence.pop(who, None)

    # -- queries

    @property
    def offset(self) -> int:
        """The offset of the last record read."""
        return self.next_offset - 1

    @property
    def complete(self) -> bool:
        """Whether nothing precedes this view."""
        return self.start_offset == 0

    @property
    def settled_ms(self) -> int | None:
        """From this log time on, timestamps equal those of a reader from offset 0; None before the first record."""
        if self.complete:
            return 0
        return None if self.start_ms is None else self.start_ms + self.timing.clock_step_ms

    @property
    def settled(self) -> bool:
        """Whether timestamps equal those of a reader from offset 0 by now."""
        return self.now_ms >= (self.settled_ms or 0)

    def claim(self, place: GroupPartition) -> Claim:
        known = self.claims.get(place)
        if known is None:
            return Claim(exact=self.complete, positioned=self.complete, heard_ms=self.start_ms or 0)
        return known

    def knows_position(self, place: GroupPartition) -> bool:
        """Whether the position is certain: an earlier reader knows the same one."""
        claim = self.claim(place)
        return claim.exact and claim.positioned

    def freshness(self, place: GroupPartition, now_ms: int = 0) -> Freshness:
        return self.claim(place).freshness(max(self.now_ms, now_ms), self.timing)

    def claimable(self, place: GroupPartition, now_ms: int = 0) -> bool:
        """Whether a claim appended now (as of the last record, or at a later log time) is certain to win unless another
        is faster: P30 for a late reader's view.
        """
        claim, settled_ms = self.claim(place), self.settled_ms
        if claim.exact:
            return self.freshness(place, now_ms) in (Freshness.FREE, Freshness.STALE)
        if settled_ms is None:
            return False
        return self.timing.freshness(max(self.now_ms, now_ms) - max(claim.heard_ms, settled_ms)) is Freshness.STALE

    def held(self, group: str) -> Iterator[tuple[GroupPartition, Client]]:
        """The partitions of a group that have a holder who is not stale."""
        for place, claim in self.claims.items():
            if place.group != group or claim.holder is None:
                continue
            if claim.freshness(self.now_ms, self.timing) is not Freshness.STALE:
                yield place, claim.holder

    def read_together(self, now_ms: int) -> bool:
        """Whether all clients heard from here within 2 intervals read combined heartbeats."""
        return self.older_ms is None or now_ms - self.older_ms > 2 * self.timing.interval_ms

    def waiting(self, group: str, now_ms: int = 0) -> Iterator[str]:
        """The ids of a group's clients that lost a claim within 2 intervals before the last record, or a later time."""
        at_ms = max(self.now_ms, now_ms)
        for (of, client_id), lost_ms in self.presence.items():
            if of == group and at_ms - lost_ms <= 2 * self.timing.interval_ms:
                yield client_id


def _judge(claim: Claim, message: Message, at: World) -> tuple[Claim, ClaimVerdict]:
    """The table above, for the last record read."""
    match message:
        case ClaimingPartition():
            return _claiming(claim, message, at)
        case SettingPosition(last_offset=last_offset):
            last_offset = SET_TO_START if last_offset is None else last_offset
            free = Claim(generation=at.offset, last_offset=last_offset, contested=at.offset)
            return free._replace(exact=claim.exact or at.settled), ClaimVerdict.ACCEPTED
        case _ if claim.exact:
            return _under_claim(claim, message, at)
        case _:
            return _adopting(claim, message, at)


def _claiming(claim: Claim, message: ClaimingPartition, at: World) -> tuple[Claim, ClaimVerdict]:
    won = Claim(
        message.client, at.offset, at.now_ms, claim.last_offset, positioned=claim.positioned, contested=at.offset
    )
    if not claim.exact:
        silent_since_ms = max(claim.heard_ms, at.settled_ms or 0)
        newest = max(claim.contested, at.start_offset - 1)  # that the generation can have
        knows = message.generation is None or message.generation >= newest
        if knows and at.timing.freshness(at.now_ms - silent_since_ms) is Freshness.STALE:
            return won, ClaimVerdict.WON
        return claim._replace(contested=at.offset), ClaimVerdict.UNDECIDED
    if message.generation is not None and message.generation < claim.generation:
        return claim, ClaimVerdict.LOST
    takes_over = claim.holder is not None and claim.holder.id == message.client.id
    if takes_over and message.generation == claim.generation:
        return won, ClaimVerdict.WON
    if claim.freshness(at.now_ms, at.timing) in (Freshness.FREE, Freshness.STALE):
        return won, ClaimVerdict.WON
    return claim, ClaimVerdict.LOST


def _under_claim(claim: Claim, message: Message, at: World) -> tuple[Claim, ClaimVerdict]:
    if claim.holder != message.client or claim.generation != message.generation:
        return claim, ClaimVerdict.REFUSED
    return _reported(claim, message, at), ClaimVerdict.ACCEPTED


def _reported(claim: Claim, message: Message, at: World) -> Claim:
    """The effects of an accepted message of the holder."""
    if isinstance(message, ClaimingMessages):
        return claim._replace(beat_ms=at.now_ms, proposed=message.proposed_last_offset)
    last_offset = position(message)
    positioned = claim.positioned or last_offset is not None
    if isinstance(message, ReturningMessages):
        last_offset, positioned = SET_TO_START if last_offset is None else last_offset, True
    else:
        last_offset = _highest(claim.last_offset, last_offset)
    holder = None if isinstance(message, ReleasingPartition) else claim.holder
    return claim._replace(
        holder=holder, beat_ms=at.now_ms, last_offset=last_offset, proposed=None, positioned=positioned
    )


def _adopting(claim: Claim, message: Message, at: World) -> tuple[Claim, ClaimVerdict]:
    """A message under a claim whose winning was not seen, or not understood."""
    generation = NO_GENERATION if message.generation is None else message.generation
    ended = generation == claim.generation and claim.holder is None  # released: the same claim does not return
    if generation < claim.generation or ended or generation == NO_GENERATION:
        return claim, ClaimVerdict.REFUSED
    if generation > claim.generation:
        claim = claim._replace(generation=generation, last_offset=None, proposed=None)
    certain = _is_confirmed(claim, message, at)
    # A message claim says nothing about the position, and an uncertain heartbeat may be a zombie's. A message without a
    # position does not show whether there never was one, or it was set to the start.
    adopted = _reported(claim._replace(holder=message.client, positioned=False), message, at)
    positioned = certain and adopted.positioned
    adopted = adopted._replace(exact=certain, positioned=positioned)
    return adopted, ClaimVerdict.ACCEPTED if certain else ClaimVerdict.UNDECIDED


def _is_confirmed(claim: Claim, message: Message, at: World) -> bool:
    confirmed = NO_GENERATION if message.confirmed is None else message.confirmed
    return confirmed >= at.start_offset and confirmed >= claim.contested and at.settled


def _highest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
