"""Which faults strike, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping

from tests.campaign.schedule import Kind, Strike, draw, strike

_SHORT, _LONG = (0.2, 0.9), (2.5, 4.0)
_BETWEEN = (1.2, 2.2)  # in which claims run out, or nearly
_PAIRS = 0.25


KINDS: Mapping[str, Kind] = {
    "kill": Kind(3),
    "kill several": Kind(1.5),
    "kill and come back": Kind(2),
    "freeze": Kind(3, (_SHORT, _BETWEEN, _LONG)),
    "freeze several": Kind(1, (_BETWEEN, _LONG)),
    "cut": Kind(2, (_SHORT, _BETWEEN, _LONG)),
    "freeze link": Kind(2, (_SHORT, _BETWEEN, _LONG)),
    "half-open link": Kind(1, (_LONG,)),
    "reset connections": Kind(1),
    "join": Kind(1.5),
    "leave": Kind(1.5),
    "leave and come back": Kind(1),
    "stop kafka": Kind(0.7, (_SHORT, _LONG), broker=True),
    "kill kafka": Kind(0.7, (_SHORT, _LONG), broker=True),
}


def strikes(seed: int, kinds: Collection[str], interval_s: float) -> Iterator[tuple[Strike, ...]]:
    """One fault after the other, for ever; one in four times two at once."""
    rng = random.Random(seed)
    names = sorted(kinds)
    while True:
        count = 2 if rng.random() < _PAIRS else 1
        yield tuple(strike(rng, KINDS, name, unit_s=interval_s) for name in draw(rng, KINDS, names, count))
