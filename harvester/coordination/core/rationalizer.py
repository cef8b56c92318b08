"""The rationalizer: what a record of the log makes of the world. Pure, and the only way in which a world changes.

Theory (seed 003, with rules P28 to P31). Every reader comes to the same conclusion from the same log. So a message is
judged by the records before it and by its own place and time alone, never by a reader's clock:

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

A claim that wins, and a position that is set, begin a generation: the record's own offset. Generations of a place grow
with the log, and each message names the one it belongs to. So what a frozen client, or a network, delivers late changes
nothing: its generation is over. Positions only grow, unless one is set, or the holder returns what it claimed
at most once and has not handed out.

An accepted Heartbeat is the commit point at most once (P27): whoever wins the claim later begins behind its position,
because that heartbeat stands before the claim in the log. It ends the message claim, fulfilled or not.

*Without the beginning of the log* (P30) a reader does not know which claims won, and its verdict is UNDECIDED. It
follows the generations that the messages carry; the highest counts. There are three ways to certainty:

1. *Silence.* 2 intervals of log time without a message about the place, after the start: whoever held it is stale. So a
   claim that comes then wins, for every reader; unless its sender names a generation that may be out of date.
2. *Confirmation.* A message carries the offset at which its sender's last message was accepted, and that sender was
   certain. If that offset lies within what was read, and no claim of the place and no set position between it and the
   message, then nothing can have ended the claim: the message is accepted, and all that matters is known.
3. *A position that is set* decides everything by itself.

All three need stamps that a reader from offset 0 would have, too. Append times may go back when another broker
leads the partition, by `clock_step_ms` at most. So no record before the start has a time above the start's by more than
that, and stamps count from that moment on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Message,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
    Unreadable,
    decode,
    position,
)
from harvester.coordination.core.world import NO_GENERATION, SET_TO_START, Claim, Freshness, LogTiming, World


class ClaimVerdict(Enum):
    """What became of a record; see the module's text."""

    WON = "won"
    LOST = "lost"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    UNREADABLE = "unreadable"
    REPEATED = "repeated"  # read before


@dataclass(frozen=True, slots=True)
class Reading:
    """A record as it was read; `before` is what was known of its place. `message` is None if it was read before."""

    message: Message | Unreadable | None
    verdict: ClaimVerdict
    before: Claim | None = None


@dataclass(frozen=True, slots=True)
class At:
    """Where a message stands. `settled_ms`: from this log time on, stamps are those of a reader from offset 0."""

    offset: int
    now_ms: int
    start_offset: int
    settled_ms: int
    timing: LogTiming


def read(world: World, offset: int, timestamp_ms: int, value: bytes | None) -> Reading:
    """The next record of the log, with the time that the broker appended it."""
    if offset < world.next_offset:
        return Reading(None, ClaimVerdict.REPEATED)
    if offset > world.next_offset:
        miss(world, offset)
    world.next_offset = offset + 1
    world.now_ms = max(world.now_ms, timestamp_ms)
    if world.start_ms is None:
        world.start_ms = world.now_ms
    message = decode(value)
    if isinstance(message, Unreadable):
        return Reading(message, ClaimVerdict.UNREADABLE)
    at = At(offset, world.now_ms, world.start_offset, world.settled_ms or 0, world.timing)
    before = world.claim(message.place)
    after, verdict = judge(before, message, at)
    world.claims[message.place] = replace(after, heard_ms=world.now_ms)
    _note_presence(world, message, verdict)
    return Reading(message, verdict, before)


def miss(world: World, offset: int) -> None:
    """Records before this one are not to be had (retention, compaction): from here on it is a late reader's view."""
    world.start_offset = world.next_offset = offset
    world.start_ms = None
    for place, claim in world.claims.items():
        world.claims[place] = replace(claim, exact=False, positioned=False, contested=NO_GENERATION)


def judge(claim: Claim, message: Message, at: At) -> tuple[Claim, ClaimVerdict]:
    """The table of the module's text."""
    match message:
        case ClaimingPartition():
            return _claiming(claim, message, at)
        case SettingPosition(last_offset=last_offset):
            last_offset = SET_TO_START if last_offset is None else last_offset
            free = Claim(generation=at.offset, last_offset=last_offset, contested=at.offset)
            return replace(free, exact=claim.exact or at.now_ms >= at.settled_ms), ClaimVerdict.ACCEPTED
        case _ if claim.exact:
            return _under_claim(claim, message, at)
        case _:
            return _adopting(claim, message, at)


def _claiming(claim: Claim, message: ClaimingPartition, at: At) -> tuple[Claim, ClaimVerdict]:
    won = Claim(
        message.client, at.offset, at.now_ms, claim.last_offset, positioned=claim.positioned, contested=at.offset
    )
    if not claim.exact:
        silent_since_ms = max(claim.heard_ms, at.settled_ms)
        newest = max(claim.contested, at.start_offset - 1)  # that the generation can be
        knows = message.generation is None or message.generation >= newest
        if knows and at.timing.freshness(at.now_ms - silent_since_ms) is Freshness.STALE:
            return won, ClaimVerdict.WON
        return replace(claim, contested=at.offset), ClaimVerdict.UNDECIDED
    if message.generation is not None and message.generation < claim.generation:
        return claim, ClaimVerdict.LOST
    takes_over = claim.holder is not None and claim.holder.id == message.client.id
    if takes_over and message.generation == claim.generation:
        return won, ClaimVerdict.WON
    if claim.freshness(at.now_ms, at.timing) in (Freshness.FREE, Freshness.STALE):
        return won, ClaimVerdict.WON
    return claim, ClaimVerdict.LOST


def _under_claim(claim: Claim, message: Message, at: At) -> tuple[Claim, ClaimVerdict]:
    if claim.holder != message.client or claim.generation != message.generation:
        return claim, ClaimVerdict.REFUSED
    return _reported(claim, message, at), ClaimVerdict.ACCEPTED


def _reported(claim: Claim, message: Message, at: At) -> Claim:
    """What an accepted message of the holder changes."""
    if isinstance(message, ClaimingMessages):
        return replace(claim, beat_ms=at.now_ms, proposed=message.proposed_last_offset)
    last_offset = position(message)
    positioned = claim.positioned or last_offset is not None
    if isinstance(message, ReturningMessages):
        last_offset, positioned = SET_TO_START if last_offset is None else last_offset, True
    else:
        last_offset = _highest(claim.last_offset, last_offset)
    holder = None if isinstance(message, ReleasingPartition) else claim.holder
    return replace(
        claim, holder=holder, beat_ms=at.now_ms, last_offset=last_offset, proposed=None, positioned=positioned
    )


def _adopting(claim: Claim, message: Message, at: At) -> tuple[Claim, ClaimVerdict]:
    """A message under a claim whose winning was not seen, or not understood."""
    generation = NO_GENERATION if message.generation is None else message.generation
    ended = generation == claim.generation and claim.holder is None  # released: the same claim does not come back
    if generation < claim.generation or ended or generation == NO_GENERATION:
        return claim, ClaimVerdict.REFUSED
    if generation > claim.generation:
        claim = replace(claim, generation=generation, last_offset=None, proposed=None)
    certain = _is_confirmed(claim, message, at)
    # A message claim says nothing of the position, and a heartbeat that is not certain may be a zombie's. One without
    # a position leaves open whether there never was one, or one was set to the start.
    adopted = _reported(replace(claim, holder=message.client, positioned=False), message, at)
    positioned = certain and adopted.positioned
    return replace(
        adopted, exact=certain, positioned=positioned
    ), ClaimVerdict.ACCEPTED if certain else ClaimVerdict.UNDECIDED


def _is_confirmed(claim: Claim, message: Message, at: At) -> bool:
    confirmed = NO_GENERATION if message.confirmed is None else message.confirmed
    return confirmed >= at.start_offset and confirmed >= claim.contested and at.now_ms >= at.settled_ms


def _note_presence(world: World, message: Message, verdict: ClaimVerdict) -> None:
    who = (message.place.group, message.client.id)
    if isinstance(message, ClaimingPartition) and verdict in (ClaimVerdict.LOST, ClaimVerdict.UNDECIDED):
        world.presence.pop(who, None)  # the newest is the last
        world.presence[who] = world.now_ms
        for known, lost_ms in tuple(world.presence.items()):
            if world.now_ms - lost_ms <= 2 * world.timing.interval_ms:
                break
            del world.presence[known]
    elif isinstance(message, ReleasingPartition) and verdict is ClaimVerdict.ACCEPTED:
        world.presence.pop(who, None)


def _highest(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
