"""Who is present, what a fair share is, which place is next. Pure.

Nobody assigns anything. Each client looks at the same log and does its own part of what follows from it (P31):

*Present* is who holds a place, and who lost a claim within 2 intervals. A client that has less than others and finds
nothing free claims a held place all the same, once an interval. It loses, and is heard by that: it *asks*.

*Fair* is when those who ask have at most one place less than anybody else. `moves` says how many places each holder
has to give for that: one after the other from whoever has most to the asking client that has least. All holders
compute the same, so together they give as many as are needed, and no two of them the same one. What is free, or
*doubtful* (its holder was not heard of for an interval, which a live one is twice), goes to those who ask first: if
others gave places for what the dead are about to leave, they would claim nothing at the moment when it is left.

*Shedding.* A holder that has to give something, for a full interval without a break, releases all of it, or as many as
it was told are the most; then no sooner than an interval later the next ones. Meanwhile it claims nothing.

*Claiming.* What is free is taken up to floor(places / present), which there is for everybody; and up to the fair
share, ceil(places / present), unless somebody who asks has less. Beyond it one place an interval, and only while
nobody asks: others may be bounded to fewer than their share.

Each client has its own order of the places (rendezvous hashing), so that several rarely reach for the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from harvester.coordination.messages import Place
from harvester.delivery.partitioner import murmur2


@dataclass(frozen=True, slots=True)
class Roster:
    """`counts`: places by client id, of all that are present, oneself included. `asking`: ids, oneself left out.

    `doubtful`: how many of a client's places it has not been heard of for an interval.
    """

    me: str
    counts: Mapping[str, int]
    asking: Collection[str]
    free: int
    places: int
    doubtful: Mapping[str, int] = field(default_factory=dict)

    @property
    def fair(self) -> int:
        """The most that a client has when all have their share."""
        return -(-self.places // max(1, len(self.counts)))

    @property
    def least_asking(self) -> int | None:
        """What the one has that asks and has least; None when nobody asks."""
        return min((self.counts.get(client, 0) for client in self.asking), default=None)

    def may_claim(self, mine: int) -> bool:
        """Whether a client with so many places, claims under way included, takes a free one within its share."""
        least = self.least_asking
        if mine < self.places // max(1, len(self.counts)):
            return True  # there is as much for everybody
        return mine < self.fair and (least is None or mine <= least)

    def has_reason_to_ask(self, mine: int) -> bool:
        """Whether somebody has so much more that a place could move without turning the tables."""
        return max(self.counts.values(), default=0) >= mine + 2

    def moves(self) -> Counter[str]:
        """How many places each holder has to give; see the module's text."""
        counts = Counter(self.counts)
        given: Counter[str] = Counter()
        if not self.asking:
            return given
        counts.subtract(self.doubtful)
        for _ in range(self.free + sum(self.doubtful.values())):
            counts[_lowest(counts, self.asking)] += 1
        while True:
            high = min(counts, key=lambda client: (-counts[client], client))
            low = _lowest(counts, self.asking)
            if counts[high] - counts[low] < 2:
                return given
            counts[high] -= 1
            counts[low] += 1
            given[high] += 1


@dataclass(slots=True)
class Shedding:
    """When a holder gives something: the bounds in time of P31. Times are of the local clock."""

    interval_s: float
    above_since: float | None = None
    next_at: float = -math.inf

    def due(self, has_to_give: bool, now: float) -> bool:
        """Whether that is now."""
        if not has_to_give:
            self.above_since = None
            return False
        if self.above_since is None:
            self.above_since = now
        if now - self.above_since < self.interval_s or now < self.next_at:
            return False
        self.next_at = now + self.interval_s
        return True

    def may_claim(self, now: float) -> bool:
        """Not in the interval after something was shed."""
        return now >= self.next_at


def preferred(client_id: str, places: Iterable[Place]) -> list[Place]:
    """The places in the order in which this client would take them."""
    return sorted(places, key=lambda place: (_weight(client_id, place), place))


def _weight(client_id: str, place: Place) -> int:
    return murmur2(f"{client_id}\0{place.topic}\0{place.partition}".encode())


def _lowest(counts: Mapping[str, int], among: Collection[str]) -> str:
    return min(among, key=lambda client: (counts.get(client, 0), client))
