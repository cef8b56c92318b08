"""Forged histories for the judge's own tests: legal ones from chance, and mutations each of which breaks one rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from .history import Committed, Delivered, Fault, History, Led, Limits, Marked, Quarantined, Removed, Stuck
from .setup import AT_LEAST_ONCE, BOTH, EXACTLY_ONCE

T = TypeVar("T")

LIMITS = Limits(heartbeat_timeout_s=2.0, cap=5, recovery_s=5.0, flow_s=3.0)
_TOPICS = ("orders", "bills")


class _Forge:
    """What a harvester would do, step by step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.delivered: list[Delivered] = []
        self.removed: list[Removed] = []
        self.quarantined: list[Quarantined] = []
        self.marked: list[Marked] = []
        self._offsets: dict[tuple[str, int], int] = {}

    def publish(self, row: Committed, led: Led, at: float, *, purge: bool = True) -> None:
        """Mark, deliver, purge."""
        self.marked.append(Marked(led.name, led.leader_id, at, 1, led.term, led.name))
        number = int(row.key[1:])
        place = (_TOPICS[number % 2], number // 2 % 2)
        offset = self._offsets.get(place, 0)
        self._offsets[place] = offset + self.rng.randint(1, 2)
        self.delivered.append(Delivered(row.key, row.seq, *place, offset, at + 0.001, row.stamp))
        if purge:
            self.removed.append(Removed(row.key, row.seq, at + 0.002))

    def purge(self, row: Committed, at: float) -> None:
        """What the leader before had committed."""
        self.removed.append(Removed(row.key, row.seq, at))

    def quarantine(self, row: Committed, led: Led, at: float) -> None:
        """Mark, fail, give up."""
        self.marked.append(Marked(led.name, led.leader_id, at, 1, led.term, led.name))
        self.quarantined.append(Quarantined(row.key, row.seq, at + 0.5, "refused"))
        self.removed.append(Removed(row.key, row.seq, at + 0.5))


def legal(rng: random.Random, keys: int = 4, records: int = 60, delivery: str = AT_LEAST_ONCE) -> History:
    """A leader is killed half-way, with acknowledged records that it had not purged; its successor repeats those.

    Where both lead exactly once, it purges them. In a campaign of both modes the first leads at least once, the second
    exactly once. There are at least two records of some key in each half, and a poison record among them.
    """
    rows: list[Committed] = []
    counts = dict.fromkeys(range(keys), 0)
    for index in range(records):
        key = rng.randrange(keys)
        counts[key] += 1
        at = 1000.0 + index / 10
        rows.append(Committed(f"k{key}", counts[key], at, round(at * 1e6)))
    half = records // 2
    killed_at = rows[half].at
    modes = (AT_LEAST_ONCE, EXACTLY_ONCE) if delivery == BOTH else (delivery, delivery)
    first = Led("h1", "id-1", 1, 999.0, killed_at, delivery=modes[0])
    frozen = ((rows[-1].at + 1, rows[-1].at + 2),)
    second = Led("h2", "id-2", 2, killed_at + 1.0, rows[-1].at + 60.0, frozen, delivery=modes[1])
    before, after = rows[:half], rows[half:]
    unpurged = [row for row in {row.key: row for row in before}.values() if rng.random() < 0.7][: LIMITS.cap]
    poison = rng.choice(after)

    forge = _Forge(rng)
    for row in before:
        forge.publish(row, first, row.at + 0.01, purge=row not in unpurged)
    for index, row in enumerate([*unpurged, *after]):
        at = max(row.at, second.began) + index / 1000
        if row is poison:
            forge.quarantine(row, second, at)
        elif index < len(unpurged) and first.delivery == EXACTLY_ONCE:
            forge.purge(row, at)
        else:
            forge.publish(row, second, at)
    return History(
        committed=rows,
        delivered=forge.delivered,
        quarantined=forge.quarantined,
        removed=forge.removed,
        marked=forge.marked,
        led=(first, second),
        faults=(Fault("kill supervisor", "h1", killed_at, killed_at, repeats=True),),
        stuck=(Stuck("k0", rows[-1].at + 20.0, rows[-1].at + 40.0),),
        limits=LIMITS,
        delivery=delivery,
    )


# -- mutations: each breaks the invariant under whose name it stands


def lose(history: History, rng: random.Random) -> History:
    """A record is in no topic."""
    gone = rng.choice(history.delivered)
    rest = [each for each in history.delivered if (each.key, each.seq) != (gone.key, gone.seq)]
    return replace(history, delivered=rest)


def invent(history: History, rng: random.Random) -> History:
    """A record that was never committed."""
    like = rng.choice(history.delivered)
    return replace(history, delivered=[*history.delivered, replace(like, seq=10_000, offset=10_000)])


def publish_failed_transaction(history: History, rng: random.Random) -> History:
    """The row of another transaction, which had the same number and failed."""
    return replace(
        history, delivered=_changed(history.delivered, rng, lambda each: replace(each, stamp=each.stamp + 1))
    )


def leave(history: History, rng: random.Random) -> History:
    """A row stays in the outbox for ever."""
    row = rng.choice(history.committed)
    return replace(history, waiting=[(row.key, row.seq)])


def swap(history: History, rng: random.Random) -> History:
    """Two successive records of a key change places."""
    pairs = []
    latest: dict[str, int] = {}
    for index, each in enumerate(history.delivered):
        before = latest.get(each.key)
        if before is not None and history.delivered[before].seq < each.seq:
            pairs.append((before, index))
        latest[each.key] = index
    one, other = rng.choice(pairs)
    delivered = list(history.delivered)
    delivered[one], delivered[other] = delivered[other], delivered[one]
    return replace(history, delivered=delivered)


def repeat_late(history: History, rng: random.Random) -> History:
    """A record comes again after its successor; a fault would explain the repeat, but not its place."""
    final = {each.key: each.seq for each in history.delivered}
    early = [each for each in history.delivered if each.seq < final[each.key]]
    late = replace(rng.choice(early), offset=10_000, at=history.faults[0].ended + 1.0)
    return replace(history, delivered=[*history.delivered, late])


def repeat_without_reason(history: History, rng: random.Random) -> History:
    """A record comes again at once, and nothing has happened."""
    delivered = list(history.delivered)
    long_after = [
        index for index, each in enumerate(delivered) if each.at > history.faults[0].ended + LIMITS.recovery_s
    ]
    index = rng.choice(long_after or [len(delivered) - 1])
    again = replace(delivered[index], at=delivered[index].at + 0.01)
    return replace(history, delivered=[*delivered[: index + 1], again, *delivered[index + 1 :]], faults=())


def repeat_committed(history: History, rng: random.Random) -> History:
    """A record of the second leader comes again at once. A fault would explain that, were it not sent exactly once."""
    delivered = list(history.delivered)
    own = [index for index, each in enumerate(delivered) if each.at > history.led[1].began]
    index = rng.choice(own)
    again = replace(delivered[index], at=delivered[index].at + 0.01)
    crash = Fault("kill shard", "1 of h2", again.at, again.at, repeats=True)
    return replace(
        history,
        delivered=[*delivered[: index + 1], again, *delivered[index + 1 :]],
        faults=[*history.faults, crash],
        limits=replace(LIMITS, cap=1000),
    )


def scatter(history: History, rng: random.Random) -> History:
    """A key goes to another partition."""
    counts: dict[str, int] = {}
    for each in history.delivered:
        counts[each.key] = counts.get(each.key, 0) + 1
    several = [index for index, each in enumerate(history.delivered) if counts[each.key] > 1]
    delivered = list(history.delivered)
    index = rng.choice(several)
    delivered[index] = replace(delivered[index], partition=7)
    return replace(history, delivered=delivered)


def lead_twice(history: History, rng: random.Random) -> History:
    """The first leader goes on while the second one leads."""
    first, second = history.led
    return replace(history, led=[replace(first, ended=second.began + rng.uniform(0.5, 5.0)), second])


def mark_deposed(history: History, rng: random.Random) -> History:
    """A mark of a leader whose term is over has taken rows."""
    late = [mark for mark in history.marked if mark.holder == "h2"]
    mark = replace(rng.choice(late), by="h1", leader_id="id-1")
    return replace(history, marked=[*history.marked, mark])


def fall_back(history: History, _rng: random.Random) -> History:
    """A later leader has an earlier term."""
    first, second = history.led
    return replace(history, led=[replace(first, term=3), second])


def purge_early(history: History, rng: random.Random) -> History:
    """A row was deleted before its record was in the log."""
    aside = {(each.key, each.seq) for each in history.quarantined}
    removed = list(history.removed)
    index = rng.choice([index for index, each in enumerate(removed) if (each.key, each.seq) not in aside])
    record = (removed[index].key, removed[index].seq)
    first = min(each.at for each in history.delivered if (each.key, each.seq) == record)
    removed[index] = replace(removed[index], at=first - rng.uniform(0.01, 5.0))
    return replace(history, removed=removed)


def stop_flow(history: History, rng: random.Random) -> History:
    """While one key was stuck, a record of another waited."""
    aside = {(each.key, each.seq) for each in history.quarantined}
    row = rng.choice([row for row in history.committed if row.key != "k0" and (row.key, row.seq) not in aside])
    waited = LIMITS.flow_s + 1.0
    delivered = [
        replace(each, at=each.at + 100.0) if (each.key, each.seq) == (row.key, row.seq) else each
        for each in history.delivered
    ]
    purged = [
        replace(each, at=each.at + 200.0) if (each.key, each.seq) == (row.key, row.seq) else each
        for each in history.removed
    ]
    stuck = (Stuck("k0", row.at - 1.0, row.at + waited),)
    return replace(history, delivered=delivered, removed=purged, stuck=stuck, faults=_explaining(history, row))


def _explaining(history: History, row: Committed) -> Sequence[Fault]:
    """The faults, if they cannot be the reason why this row waited; repeats are then explained by one far away."""
    fault = history.faults[0]
    if fault.began > row.at + LIMITS.flow_s or row.at > fault.ended + LIMITS.recovery_s:
        return history.faults
    return ()


def _changed(items: Sequence[T], rng: random.Random, change: Callable[[T], T]) -> list[T]:
    changed = list(items)
    index = rng.randrange(len(changed))
    changed[index] = change(changed[index])
    return changed


# Of each: the invariant that it breaks. (Removing a record also makes its purge an early one, and so on.)
MUTATIONS: Mapping[Callable[[History, random.Random], History], str] = {
    lose: "I1",
    invent: "I1",
    publish_failed_transaction: "I1",
    leave: "I1",
    swap: "I2",
    repeat_late: "I2",
    scatter: "I2",
    lead_twice: "I4",
    mark_deposed: "I4",
    fall_back: "I4",
    purge_early: "I5",
    stop_flow: "I7",
    repeat_without_reason: "I8",
}
# The same of campaigns in which some leader delivers exactly once: a repeat of what it sent has no excuse.
ONCE_MUTATIONS: Mapping[Callable[[History, random.Random], History], str] = {
    **MUTATIONS,
    repeat_without_reason: "I6",
    repeat_committed: "I6",
}
