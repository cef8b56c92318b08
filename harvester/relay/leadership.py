"""How a leadership begins and ends in the relay machine: by the group, by the term row, with the database. Pure.

*Another server* (P9). When the database is not the one that the term was taken on, or has gone back in time, nothing
that is known of its rows holds any more, and a purge that is still to be done could hit a new row under an old id: all
shards are killed, whatever they hold, and the term is taken anew. That repeats records rather than lose one.

Every function returns the commands to perform, in order. What happens in between: `harvester.relay.machine`.
"""

from __future__ import annotations

from uuid import UUID

from harvester.events import LeaderFenced
from harvester.relay.commands import Announce, CloseTrust, Command, Kill
from harvester.relay.machine import Phase, Relay


def acquire(relay: Relay, now: float) -> list[Command]:
    """The group made this process its leader and trusts it: drop everything, take the term, lead."""
    if relay.phase is not Phase.IDLE:
        return []
    relay.phase = Phase.TAKING
    relay.tenure.begin(relay.new_id())
    return [CloseTrust(), *relay.broadcast(now), *relay.proceed(now)]


def term_taken(
    relay: Relay,
    holder: UUID,
    term: int,
    server: str | None,
    now: float,
    went_back: bool = False,
    incarnation: UUID | None = None,
    in_doubt: bool = False,
) -> list[Command]:
    """The term row of this server names us under this number. `went_back`: it, or its ids, had gone back (P9).

    `in_doubt`: the term before was not released, so what its leader had on the wire may still arrive.

    The shards are told, and answer once more: while they knew no term, they gave up what failed on the wire, and
    their word of that has to be heard before anything behind it is marked (P5).
    """
    tenure = relay.tenure
    if relay.phase is not Phase.TAKING or holder != tenure.holder or tenure.told is not None:
        return []
    if in_doubt:
        relay.doubt.arise(now)
    changed = tenure.tell(term, server, now) or went_back
    if tenure.is_new(incarnation):
        relay.low_water.forget()
    reason = f"the term was taken on another database than the last one ({server})"
    kills = _kill_all(relay, reason) if changed else []
    return [*kills, *relay.broadcast(now), *relay.proceed(now)]


def term_lost(relay: Relay, trusted: bool, now: float) -> list[Command]:
    """The term row names somebody else (P8): take over again while trusted, else give up."""
    if relay.phase not in (Phase.LEADING, Phase.REMARKING, Phase.SCALING, Phase.TAKING):
        return []
    relay.intake.abandon()
    if not trusted:
        return fence(relay, "the term row names another holder", now)
    relay.tenure.lose(now, relay.settings.expiry_s)
    relay.phase = Phase.IDLE
    return acquire(relay, now)


def fence(relay: Relay, reason: str, now: float) -> list[Command]:
    """Trust has run out: nothing may be produced, nothing queued survives."""
    if relay.phase in (Phase.IDLE, Phase.DRAINING):
        return []
    had_led = relay.tenure.term is not None
    _end(relay)
    relay.phase = Phase.IDLE
    event: list[Command] = [Announce(LeaderFenced(reason))] if had_led else []
    return [CloseTrust(), *relay.broadcast(now), *event]


def drain(relay: Relay, now: float, trusted: bool = False) -> list[Command]:
    """Leadership is to be given up in good order, or the process stops: finish what is on the wire.

    `trusted`: the group's trust stays, only the term is given up (P32), so nothing has to be given up unsent.
    """
    if relay.phase is Phase.DRAINING:
        return []
    relay.doubt.drain(relay.tenure.told, relay.tenure.holder, now)
    saved = relay.save(relay.low_water.last())
    _end(relay)
    relay.phase = Phase.DRAINING
    closing: list[Command] = [] if trusted else [CloseTrust()]
    return [*saved, *closing, *relay.broadcast(now), *relay.proceed(now)]


def server_changed(relay: Relay, reason: str, now: float) -> list[Command]:
    """The database is another one than before (P9): see the module's text."""
    kills = _kill_all(relay, reason)
    if relay.phase in (Phase.IDLE, Phase.DRAINING):
        return kills
    relay.intake.abandon()
    relay.phase = Phase.IDLE
    return [*kills, *acquire(relay, now)]


def _kill_all(relay: Relay, reason: str) -> list[Command]:
    slices = enumerate(relay.intake.slices)
    return [Kill(index, reason, own_fault=False) for index, shard in slices if shard.ready]


def _end(relay: Relay) -> None:
    relay.intake.abandon()
    relay.tenure.end()
