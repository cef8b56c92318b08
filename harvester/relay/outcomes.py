"""What is heard of rows, from statements and from shards, and what the relay machine does about it. Pure.

Every piece of news is checked against the phase and the epoch first: what belongs to an older one says nothing about
what is known now. Then intake and ledger are told, and the machine goes on, or remarks what cannot be accounted for.
Every function returns the commands to perform, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harvester.relay.commands import Command, Emptied, Send
from harvester.relay.frames import Closed, Dispatch
from harvester.relay.ledger import Row
from harvester.relay.machine import Phase, Relay
from harvester.relay.scan import Bookmark
from harvester.relay.sorting import Taken

# -- statements


def marked(
    relay: Relay,
    number: int,
    rows: Sequence[Row],
    now: float,
    floor: int | None = None,
    bookmark: Bookmark | None = None,
) -> list[Command]:
    """A mark's result, sorted by id. `floor`: no row can appear below it any more; `bookmark`: how far the scan is."""
    if not relay.intake.knows(number) or relay.phase is not Phase.LEADING:
        return []
    relay.low_water.read(floor, bookmark)
    commands = _dispatch(relay, relay.intake.marked(number, rows, now))
    if not rows and relay.intake.is_empty:
        commands.append(Emptied())
    return [*commands, *relay.next_statements(now)]


def fetched(relay: Relay, number: int, rows: Sequence[Row], now: float) -> list[Command]:
    """A fetch's result."""
    if not relay.intake.knows(number) or relay.phase is not Phase.LEADING:
        return []
    return [*_dispatch(relay, relay.intake.fetched(number, rows, now)), *relay.next_statements(now)]


def looked(relay: Relay, number: int, ids: Iterable[int], now: float) -> tuple[int, list[Command]]:
    """All ids that the scan has passed and the table still has. Returns how many nobody knew of, and commands."""
    if not relay.intake.knows(number) or relay.phase is not Phase.LEADING:
        return 0, []
    return relay.intake.looked(number, ids), relay.next_statements(now)


def statement_failed(relay: Relay, number: int, error: str, now: float) -> list[Command]:
    """A statement that was sent may have taken effect: only a new leader id finds its rows again."""
    if not relay.intake.knows(number):
        return []
    relay.intake.abandon()
    return relay.remark(f"a mark failed: {error}", now)


def _dispatch(relay: Relay, taken: Taken) -> list[Command]:
    return [
        Send(index, Dispatch(relay.epoch, b"".join([row[2] for row in rows]), relay.low_water.known))
        for index, rows in taken.items()
    ]


# -- shards


def settled(relay: Relay, shard: int, ids: Sequence[int], now: float) -> tuple[int, list[Command]]:
    """The purge of these ids has committed. Returns how many were new, and the commands."""
    relay.heard(shard, now)
    return relay.ledger.settle(ids), relay.proceed(now)


def parked(
    relay: Relay,
    shard: int,
    epoch: int,
    record_id: int,
    given_back: Sequence[int],
    wait_s: float,
    held: bool,
    now: float,
) -> list[Command]:
    """A record failed and is to be tried again after `wait_s`: it and what stood behind it wait here (P18)."""
    relay.heard(shard, now)
    relay.doubt.arise(now)
    if epoch != relay.epoch or record_id not in relay.ledger:
        return []
    key = relay.ledger.key_of(record_id)
    name = record_id if key is None else key
    relay.intake.park(name, shard, [record_id, *given_back], now + wait_s, held)
    return [Send(shard, Closed(epoch, record_id)), *relay.proceed(now)]


def in_doubt(relay: Relay, shard: int, record_id: int, now: float) -> None:
    """A record failed that may still arrive: its key stays with this shard's producer until it is settled (P36)."""
    relay.heard(shard, now)
    relay.ledger.pin(record_id, shard)


def refused(relay: Relay, shard: int, epoch: int, ids: Sequence[int], now: float) -> list[Command]:
    """Rows of a parked key that reached the shard too late."""
    relay.heard(shard, now)
    if epoch != relay.epoch:
        return []
    for record_id in ids:
        key = relay.ledger.key_of(record_id)
        if record_id not in relay.ledger:
            continue
        if key is None or not relay.intake.is_parked(key):
            # Not parked: the shard gave up a record of this key, and takes nothing more of it before a remark.
            relay.ledger.give_back(ids)
            return relay.remark(f"shard {shard} gave up a record", now)
        relay.intake.give_back(key, (record_id,))
    return relay.proceed(now)


def dropped(relay: Relay, shard: int, ids: Sequence[int], now: float) -> list[Command]:
    """A shard did not send these, for lack of trust or of a leader; while we lead, that calls for a remark.

    The remark goes on when a tick has seen trust: rows that are marked sooner would be dropped again.
    """
    relay.heard(shard, now)
    forgotten = relay.ledger.give_back(ids)
    if forgotten:
        relay.doubt.arise(now)
    if forgotten and relay.phase is Phase.LEADING:
        relay.untrusted = True
        return relay.remark(f"shard {shard} ran out of trust", now)
    if forgotten:
        relay.doubt.keep_term()
    return relay.proceed(now)


def fate_unknown(relay: Relay, shard: int, epoch: int, ids: Sequence[int], reason: str, now: float) -> list[Command]:
    """Nobody can tell whether these were published. The shard ends itself; until then the ledger keeps them."""
    relay.heard(shard, now)
    relay.doubt.arise(now)
    if epoch != relay.epoch:
        return []
    return relay.remark(reason, now)


def queue_timed_out(relay: Relay, shard: int, epoch: int, record_id: int, waited_s: float, now: float) -> list[Command]:
    """A shard has had a record queued for longer than queue_timeout, without any progress of its key."""
    relay.heard(shard, now)
    if epoch != relay.epoch:
        return []
    return relay.remark(f"queue timeout: record {record_id} waited {waited_s:.1f} s in shard {shard}", now)
