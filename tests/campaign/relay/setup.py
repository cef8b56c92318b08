"""How a harvester of a campaign is set up, and what can be changed about it when another takes its place. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"
BOTH = "both"  # of a campaign: some harvesters deliver the one way, some the other
DELIVERIES = (AT_LEAST_ONCE, EXACTLY_ONCE, BOTH)


@dataclass(frozen=True, slots=True)
class Setup:
    """What may differ between harvesters of one group."""

    delivery: str
    shards: int

    @property
    def once(self) -> bool:
        """Whether it delivers exactly once."""
        return self.delivery == EXACTLY_ONCE

    def other_mode(self) -> Setup:
        """It delivers the other way."""
        return replace(self, delivery=AT_LEAST_ONCE if self.once else EXACTLY_ONCE)

    def other_shards(self, usual: int, rng: random.Random) -> Setup:
        """Half of the usual number of shards, the usual one, or twice as many; not what it has."""
        counts = {max(1, usual // 2), usual, 2 * usual} - {self.shards}
        return replace(self, shards=rng.choice(sorted(counts)))

    def __str__(self) -> str:
        return f"{self.delivery}, {self.shards} shards"


def first_setup(delivery: str, shards: int, slot: int) -> Setup:
    """What a place begins with: where both ways occur they take turns."""
    if delivery == BOTH:
        delivery = AT_LEAST_ONCE if slot % 2 else EXACTLY_ONCE
    return Setup(delivery, shards)
