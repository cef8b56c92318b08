"""Which faults strike when: a plan that follows from its seed alone. Pure.

What a fault finds when its time comes (who leads, which shards there are) is not planned; each fault has a seed of
its own for choosing among it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from tests.campaign.schedule import Kind, Strike, draw, strike

from .setup import AT_LEAST_ONCE, EXACTLY_ONCE

# Spans of time against the limits of a campaign (heartbeat_timeout 2 s, session_timeout 6 s, delivery timeout 2 s).
BLINK = (0.2, 0.8)  # nobody may notice
PAUSE = (1.5, 4.0)  # trust ends, the session does not
LONG = (8.0, 11.0)  # longer than every timeout

REPLACED = "replace standby"

KINDS: Mapping[str, Kind] = {
    # processes
    "kill shard": Kind(3),
    "kill several shards": Kind(2),
    "kill supervisor": Kind(3),
    "kill process group": Kind(3),
    "freeze shard": Kind(2, (BLINK, PAUSE, LONG)),
    "freeze supervisor": Kind(3, (BLINK, PAUSE, LONG)),
    "freeze leader": Kind(3, (BLINK, PAUSE, LONG)),
    "leave": Kind(2),
    "join": Kind(1.5, ((4.0, 8.0),)),
    "rolling restart": Kind(1),
    REPLACED: Kind(2),
    # an operator's words to a harvester
    "scale": Kind(3),
    "pause": Kind(2, (BLINK, PAUSE)),
    "remark": Kind(2),
    # servers
    "stop kafka": Kind(1, ((0.5, 3.0),)),
    "kill kafka": Kind(1, ((0.5, 3.0),)),
    "freeze kafka": Kind(1, (BLINK, PAUSE, LONG)),
    "restart postgres": Kind(1, ((0.0, 2.0), PAUSE)),
    "kill postgres": Kind(1, ((0.0, 2.0), PAUSE)),
    "freeze postgres": Kind(1, (BLINK, PAUSE, LONG)),
    "terminate sessions": Kind(3),
    "lock rows": Kind(1.5, (BLINK, PAUSE)),
    "deadlock": Kind(1.5, ((1.5, 2.5),)),
    "truncate": Kind(1),
    "truncate and restart ids": Kind(1.5),
    # links of one harvester
    "cut kafka link": Kind(2, (BLINK, PAUSE, LONG)),
    "cut postgres link": Kind(2, (BLINK, PAUSE, LONG)),
    "half-open kafka link": Kind(2, (PAUSE, LONG)),
    "half-open postgres link": Kind(2, (PAUSE, LONG)),
    "freeze postgres link": Kind(1, (BLINK, PAUSE, LONG)),
    "slow kafka link": Kind(1, ((3.0, 6.0),)),
    "slow postgres link": Kind(1, ((3.0, 6.0),)),
    "reset links": Kind(2),
    "nameless kafka link": Kind(2, (BLINK, PAUSE, LONG)),
    # bytes of one harvester that the network keeps, and delivers later
    "hold back produce requests": Kind(2, (BLINK, PAUSE)),
    "hold back offset commits": Kind(2, (BLINK, PAUSE, LONG)),
    "hold back ends of transactions": Kind(3, (BLINK, PAUSE)),
    # records
    "failed deliveries": Kind(1.5, ((2.0, 4.0),)),
    "acknowledgements turned into failures": Kind(1.5, ((2.0, 4.0),)),
    "poison record": Kind(2, ((3.0, 5.0),)),
    "stuck key": Kind(1.5, ((4.0, 14.0),)),
    "refused for a while": Kind(1.5, ((3.0, 5.0),)),
    # aimed
    "kill leader with a full wire": Kind(2),
    "kill shard at a commit": Kind(1),
    "kill shard after a commit": Kind(1),
    "kill shard at a fenced lane": Kind(1),
    "kill leader at a commit": Kind(1),
    "kill leader after a commit": Kind(1),
    "kill leader at a fenced lane": Kind(1),
    "freeze leader at a commit": Kind(1, (BLINK, PAUSE, LONG)),
    "freeze leader after a commit": Kind(1, (BLINK, PAUSE, LONG)),
    "freeze leader at a fenced lane": Kind(1, (PAUSE, LONG)),
    "unknown outcomes": Kind(1.5, ((2.0, 4.0),)),
    # another takes the place
    "switch shards": Kind(2),
    "switch mode": Kind(3),
    "kill and switch mode": Kind(2),
}

# The Kafka API whose requests are held back.
HELD_BACK: Mapping[str, int] = {
    "hold back produce requests": 0,
    "hold back offset commits": 8,
    "hold back ends of transactions": 26,
}

# What strikes transactions only.
_OF_TRANSACTIONS = frozenset(
    {kind for kind in KINDS if kind.endswith((" a commit", " a fenced lane", " ends of transactions"))}
    | {"unknown outcomes"}
)
_OF_MODES = frozenset({"switch mode", "kill and switch mode", "kill leader with a full wire"})
_ORDINARY = frozenset(KINDS) - _OF_TRANSACTIONS - _OF_MODES - {"switch shards", "refused for a while"}


def kinds_of(delivery: str) -> frozenset[str]:
    """What makes up a campaign in this mode, unless kinds are chosen: at least once, exactly once, or both."""
    if delivery == AT_LEAST_ONCE:
        return _ORDINARY
    # A transaction's records are not acknowledged one by one.
    once = (_ORDINARY - {"acknowledgements turned into failures"}) | _OF_TRANSACTIONS
    once |= {"switch shards", "refused for a while"}
    return once if delivery == EXACTLY_ONCE else once | _OF_MODES


# What may make records come twice (I8) that a leader sent at least once: processes that die or stand still, and a way
# to Kafka that is closed for longer than the delivery timeout. Nothing that befalls the database may, nor what is
# planned, nor what a record fails of.
REPEATING = frozenset(
    {
        "kill shard",
        "kill several shards",
        "kill supervisor",
        "kill process group",
        "freeze shard",
        "freeze supervisor",
        "freeze leader",
        "stop kafka",
        "kill kafka",
        "freeze kafka",
        "cut kafka link",
        "half-open kafka link",
        "nameless kafka link",
        "hold back produce requests",
        "acknowledgements turned into failures",
        "kill leader with a full wire",
        "kill and switch mode",
    }
)


def repeats(struck: Strike) -> bool:
    """Whether invariant I8 lets records be repeated because of it: of these kinds, and more than a blink."""
    lasting = struck.kind.startswith(("freeze", "cut", "nameless", "hold"))
    return struck.kind in REPEATING and not (lasting and struck.hold_s <= BLINK[1])


def plan(seed: int, seconds: float, kinds: Collection[str] | None = None, *, gap_s: float = 4.0) -> list[Strike]:
    """Faults for so many seconds, in the order of their times.

    One in four strikes while the one before is still under way; before the others there is time to recover.
    """
    rng = random.Random(seed)
    names = sorted(KINDS if kinds is None else kinds)
    found: list[Strike] = []
    at_s = rng.uniform(0.5, 1.0) * gap_s
    while at_s < seconds and names:
        (name,) = draw(rng, KINDS, names)
        found.append(strike(rng, KINDS, name, at_s=at_s))
        at_s += rng.uniform(0.1, 1.0) if rng.random() < 0.25 else found[-1].hold_s + rng.uniform(0.5, 2.0) * gap_s
    return found
