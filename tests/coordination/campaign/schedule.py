"""Which faults strike, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_SHORT, _LONG = (0.2, 0.9), (2.5, 4.0)
_BETWEEN = (1.2, 2.2)  # in which claims run out, or nearly
_PAIRS = 0.25


@dataclass(frozen=True, slots=True)
class Kind:
    """How often it strikes beside others, and for how many intervals; `broker`: it strikes all at once."""

    weight: float
    holds: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    broker: bool = False


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


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault, for how long it is held, and its own seed."""

    kind: str
    hold_s: float
    seed: int

    @property
    def broker(self) -> bool:
        """Whether it strikes the broker."""
        return KINDS[self.kind].broker


def strikes(seed: int, kinds: Collection[str], interval_s: float) -> Iterator[tuple[Strike, ...]]:
    """One fault after the other, for ever; one in four times two at once."""
    rng = random.Random(seed)
    names = sorted(kinds)
    weights = [KINDS[name].weight for name in names]
    while True:
        count = 2 if rng.random() < _PAIRS else 1
        yield tuple(_strike(rng, name, interval_s) for name in rng.choices(names, weights, k=count))


def _strike(rng: random.Random, name: str, interval_s: float) -> Strike:
    hold_s = rng.uniform(*rng.choice(KINDS[name].holds)) * interval_s
    return Strike(name, round(hold_s, 2), rng.randrange(2**31))
