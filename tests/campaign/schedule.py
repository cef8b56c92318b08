"""Draws faults from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: how often it strikes in relation to others, and for how long, in the schedule's unit of time.

    `broker`: it strikes all at once, since it strikes the broker.
    """

    weight: float
    holds: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    broker: bool = False


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: for how long it is held, its own seed for choosing whom it strikes, and when, if that is planned."""

    kind: str
    hold_s: float
    seed: int
    at_s: float = 0.0  # after the beginning


def draw(rng: random.Random, kinds: Mapping[str, Kind], names: Sequence[str], count: int = 1) -> list[str]:
    """So many kinds, among these names."""
    return rng.choices(names, [kinds[name].weight for name in names], k=count)


def strike(
    rng: random.Random, kinds: Mapping[str, Kind], name: str, *, unit_s: float = 1.0, at_s: float = 0.0
) -> Strike:
    """A fault of this kind."""
    hold_s = rng.uniform(*rng.choice(kinds[name].holds)) * unit_s
    return Strike(name, round(hold_s, 2), rng.randrange(2**31), round(at_s, 2))
