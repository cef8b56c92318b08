"""Decides which partitions a consumer claims, asks for and gives up: who is present, and what is fair. Pure.

Nobody assigns anything. Each client reads the same log and does its own part of what follows from it (P31):

*Present* is a client that holds a partition, or has lost a claim within 2 intervals. A client that has less than others
and finds nothing free claims a held partition anyway, once an interval. It loses, and thereby makes itself heard: it
*asks*.

*Fair* means that those who ask have at most one partition less than anyone else. All holders compute the same `moves`,
so together they give as many as needed, and no two of them the same one. What is free, or *doubtful* (its holder has
not been heard from for an interval, in which a live one writes twice), goes to those who ask first: otherwise others
would give up partitions for what the dead are about to leave, and claim nothing at the moment when it becomes free.

*Shedding.* A holder that has had to give something for a full interval releases all of it, or as many as its settings
allow at once; the next ones no sooner than an interval later. Meanwhile it claims nothing. A release waits for what is
in hand, for at most an interval: until then the partition counts as held for others, and as free for the holder itself,
which would otherwise give more. It does not take it back for 2 intervals, nor does it ask: others who give may not have
released yet.

*Claiming.* A partition is *open* (P28) if a claim would win now: according to the log, or as it will be if log time has
advanced as `LogTime` estimates; or if our own client id holds it, from an earlier life (P29); or if nothing was heard
of it for 2 intervals of the *local* clock. If the estimate was wrong, the claim loses and is retried. A reader that is
not certain about a partition also allows for `clock_step` (P30). Open partitions are taken up to floor(partitions /
present), and up to ceil(partitions / present) unless someone who asks has less. Beyond that, one partition per
interval, and only while nobody asks: others may be limited to fewer than their share. For its first half interval a
client takes at most one, or only what its id already held, so that clients starting together hear of each other before
the first of them has taken everything. The same applies for half an interval after an outage in which nothing of the
log was read for an interval: everyone gets their own partitions back, and nothing has to be given.

Shares are counted in *units*: partitions, or with whole topics their first partitions, whose holder alone claims the
others. Each client prefers the partitions in its own order (rendezvous hashing), so that several clients rarely reach
for the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from struct import pack

from harvester.coordination.core.claim import ClaimPhase, ClaimState
from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.world import Freshness, World
from harvester.coordination.settings import ConsumerSettings
from harvester.delivery.partitioner import murmur2


@lru_cache(maxsize=1 << 16)
def log_partition(place: GroupPartition, partitions: int) -> int:
    """Which of the coordination topic's `partitions` a partition's messages go to.

    The hash of Kafka's default partitioner, ignoring the sign bit, over the topic as UTF-8 and the partition as four
    bytes, most significant first. The group is not part of it. The number is fixed for the life of the coordination
    topic: with different numbers, two clients would look for the same claim in different places, and both would win it.
    """
    return murmur2(place.topic.encode() + pack(">i", place.partition)) % partitions


class LogTime:
    """Estimates the log time between its records: it stands still while nobody writes (P28).

    A record is read after it was appended, so its log time plus the local time since it was read is never ahead of its
    broker's clock. The best such estimate over all partitions is used. Brokers' clocks differ, and a local clock has
    its own rate, so this determines when to try; only the log decides whether a claim wins.
    """

    def __init__(self) -> None:
        self._ahead_s: dict[int, float] = {}  # ahead of the local clock, by partition of the log

    def read(self, partition: int, now_ms: int, now: float) -> None:
        """A record was read: log time there is now `now_ms`; `now` is local."""
        self._ahead_s[partition] = now_ms / 1000 - now

    def now_ms(self, now: float) -> int:
        """The estimate at a local time; 0 before the first record."""
        return max(0, math.floor(1000 * (now + max(self._ahead_s.values(), default=-now))))


@dataclass(frozen=True, slots=True)
class Roster:
    """`counts`: units by client id, of all present clients including oneself. `asking`: ids, excluding oneself.

    `doubtful`: how many of a client's units have not been heard of for an interval.
    """

    counts: Mapping[str, int]
    asking: Collection[str]
    free: int
    places: int
    doubtful: Mapping[str, int] = field(default_factory=dict)

    @property
    def fair(self) -> int:
        """The most that a client has when everyone has their share."""
        return -(-self.places // max(1, len(self.counts)))

    @property
    def least_asking(self) -> int | None:
        """The lowest count among those who ask; None if nobody asks."""
        return min((self.counts.get(client, 0) for client in self.asking), default=None)

    def may_claim(self, mine: int) -> bool:
        """Whether a client with `mine` units, including claims under way, takes a free one within its share."""
        least = self.least_asking
        if mine < self.places // max(1, len(self.counts)):
            return True  # there are enough for everyone
        return mine < self.fair and (least is None or mine <= least)

    def has_reason_to_ask(self, mine: int) -> bool:
        """Whether another client has so much more that moving a unit would not reverse the imbalance."""
        return max(self.counts.values(), default=0) >= mine + 2

    def moves(self) -> Counter[str]:
        """How many units each holder has to give up."""
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
    """When a holder gives something up: the time limits of P31. Times are of the local clock."""

    interval_s: float
    above_since: float | None = None
    next_at: float = -math.inf

    def due(self, has_to_give: bool, now: float) -> bool:
        """Whether something is to be given up now."""
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
        """False in the interval after something was shed."""
        return now >= self.next_at


def preferred(client_id: str, places: Iterable[GroupPartition]) -> list[GroupPartition]:
    """The partitions in this client's order of preference."""
    return sorted(places, key=lambda place: (_weight(client_id, place), place))


def _weight(client_id: str, place: GroupPartition) -> int:
    return murmur2(f"{client_id}\0{place.topic}\0{place.partition}".encode())


def _lowest(counts: Mapping[str, int], among: Collection[str]) -> str:
    return min(among, key=lambda client: (counts.get(client, 0), client))


class Choice:
    """Chooses for one client, over the worlds by partition of the log and the client's own claims (`holdings`).

    Times at which something was heard or tried are of the local clock.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        client: Client,
        worlds: Mapping[int, World],
        holdings: Mapping[GroupPartition, ClaimState],
    ) -> None:
        self._settings, self._me, self._worlds, self._holdings = settings, client.id, worlds, holdings
        self._interval_s = settings.heartbeat_interval_s
        self._places: list[GroupPartition] = []  # of the subscribed topics, in this client's order of preference
        self._units: list[GroupPartition] = []
        self._ready_at = self._first_until = self._read_at = -math.inf
        self._heard_at: dict[GroupPartition, float] = {}
        self._retry_at: dict[GroupPartition, float] = {}
        self._log_time = LogTime()
        self._shedding = Shedding(self._interval_s)
        self._next_ask_at = self._next_extra_at = -math.inf
        self._left_over_since: float | None = None

    # -- input

    def consume(self, places: Iterable[GroupPartition]) -> None:
        self._places = preferred(self._me, places)
        self._units = [place for place in self._places if not self._settings.whole_topics or place.partition == 0]
        for place in self._places:
            self.world(place)  # registers its partition of the log

    def ready(self, now: float) -> None:
        """The log is read to its initial end: silence counts from here."""
        self._ready_at = now

    def active(self, now: float) -> None:
        """Claims are made from now on."""
        self._first_until = now + self._interval_s / 2

    def read(self, partition: int, now_ms: int, now: float) -> None:
        """A record was read in a partition of the log, where log time is now `now_ms`."""
        self._log_time.read(partition, now_ms, now)
        self._read_at = now

    def heard(self, place: GroupPartition, now: float) -> None:
        self._heard_at[place] = now

    def missed(self, place: GroupPartition, now: float) -> None:
        """A claim was not won: not the same again at once, unless it only came a little too early."""
        world = self.world(place)
        claim = world.claim(place)
        wait_s = self._interval_s / 2
        if claim.exact and claim.holder is not None:
            early_ms = claim.beat_ms + 2 * world.timing.interval_ms + 1 - world.now_ms
            wait_s = min(wait_s, early_ms / 1000) if early_ms > 0 else wait_s
        self._retry_at[place] = now + wait_s

    def let_go(self, place: GroupPartition, now: float) -> None:
        """It is given up for others to claim: at most an interval until it is released, and another one for them."""
        self._retry_at[place] = now + 2 * self._interval_s

    # -- decisions

    def to_shed(self, roster: Roster, now: float) -> list[GroupPartition]:
        """What to give up now, for those who have fewer."""
        surplus = roster.moves()[self._me]
        if not self._shedding.due(surplus > 0, now) or not roster.counts[self._me]:
            return []
        held = [place for place in self._units if self._phase(place) is ClaimPhase.HELD]
        most = self._settings.shed_at_once
        given = held[-(surplus if most is None else min(most, surplus)) :]
        for place in given:
            self.let_go(place, now)
        self._next_ask_at = now + 2 * self._interval_s
        return given

    def orphans(self) -> list[GroupPartition]:
        """With whole topics: the held partitions of topics whose first partition is not held."""
        if not self._settings.whole_topics:
            return []
        return [
            place
            for place, holding in self._holdings.items()
            if holding.phase is ClaimPhase.HELD and self._is_orphan(place)
        ]

    def fewer_elsewhere(self, now: float) -> bool:
        """Whether another present client has less, and so could take something over.

        Not while one asks: it gets its share anyway, and both together would exceed the limit.
        """
        roster = self.roster(now)
        return not roster.asking and min(roster.counts.values()) < roster.counts[self._me]

    def to_claim(self, roster: Roster, now: float) -> list[GroupPartition]:
        """What to claim now: open partitions within the share or, if none is open, perhaps a held one, as a request."""
        if now - self._read_at > self._interval_s:
            self.active(now)  # an outage: start over
        if not self._shedding.may_claim(now):
            return []
        if roster.counts[self._me] == len(self._places):  # everything is ours: nothing to look for
            self._left_over_since = None
            return []
        units = frozenset(self._units)
        mine = sum(1 for place in units if self._phase(place) is not ClaimPhase.IDLE)
        under_way = sum(1 for holding in self._holdings.values() if holding.phase is ClaimPhase.CLAIMING)
        chosen: list[GroupPartition] = []
        log_ms = self._log_time.now_ms(now)
        free = [place for place in self._places if not self._is_orphan(place) and self._is_open(place, now, log_ms)]
        if not units.intersection(free):
            self._left_over_since = None
        elif self._left_over_since is None:
            self._left_over_since = now
        for place in free:
            if not self._settings.greedy and under_way + len(chosen) > 0:
                break
            if place in units:
                if not self._allows(mine) or not (self._is_ours(place) or self._may_take(roster, mine, now)):
                    continue
                mine += 1
            chosen.append(place)
        if not chosen and not under_way and self._allows(mine) and roster.has_reason_to_ask(mine):
            return self._to_ask(roster, now)
        return chosen

    # -- parts

    def world(self, place: GroupPartition) -> World:
        return self._worlds[log_partition(place, self._settings.coordination_partitions)]

    def _phase(self, place: GroupPartition) -> ClaimPhase:
        holding = self._holdings.get(place)
        return ClaimPhase.IDLE if holding is None else holding.phase

    def _is_orphan(self, place: GroupPartition) -> bool:
        if not self._settings.whole_topics or place.partition == 0:
            return False
        return self._phase(GroupPartition(place.group, place.topic, 0)) is not ClaimPhase.HELD

    def _may_take(self, roster: Roster, mine: int, now: float) -> bool:
        """Whether to take one more unit. Beyond the fair share, only what was left over for an interval."""
        if now < self._first_until and (mine > 0 or any(map(self._is_ours, self._units))):
            return False
        if roster.may_claim(mine):
            return True
        since = self._left_over_since
        if roster.asking or since is None or now < max(since + self._interval_s, self._next_extra_at):
            return False
        self._next_extra_at = now + self._interval_s
        return True

    def _to_ask(self, roster: Roster, now: float) -> list[GroupPartition]:
        """A unit of the client that has most."""
        if now < self._next_ask_at:
            return []
        self._next_ask_at = now + self._interval_s
        others = [
            (roster.counts[claim.holder.id], place)
            for place in self._units
            if self._phase(place) is ClaimPhase.IDLE
            and (claim := self.world(place).claim(place)).holder is not None
            and claim.holder.id in roster.counts
            and claim.exact
        ]
        most = max((count for count, _ in others), default=0)
        return [place for count, place in others if count == most][:1]

    def _is_open(self, place: GroupPartition, now: float, log_ms: int) -> bool:
        if self._phase(place) is not ClaimPhase.IDLE or now < self._retry_at.get(place, -math.inf):
            return False
        world = self.world(place)
        if world.claimable(place, log_ms) or self._is_ours(place):
            return True
        allowance_s = 0.0 if world.claim(place).exact else world.timing.clock_step_ms / 1000
        return self._silent_for(place, now) > 2 * self._interval_s + allowance_s

    def _is_ours(self, place: GroupPartition) -> bool:
        """Whether our client id is certainly the holder according to the log."""
        claim = self.world(place).claim(place)
        return claim.exact and claim.holder is not None and claim.holder.id == self._me

    def _gives(self, place: GroupPartition, holder: Client) -> bool:
        """Whether it is being released, or was, but not yet according to the log."""
        return holder.id == self._me and self._phase(place) in (ClaimPhase.LEAVING, ClaimPhase.IDLE)

    def _silent_for(self, place: GroupPartition, now: float) -> float:
        return now - max(self._heard_at.get(place, self._ready_at), self._ready_at)

    def roster(self, now: float) -> Roster:
        """Who holds how many, according to the log and the clock."""
        log_ms = self._log_time.now_ms(now)
        counts = {self._me: 0}
        doubtful: Counter[str] = Counter()
        free = 0
        for place in self._units:
            if self._phase(place) is ClaimPhase.HELD:
                counts[self._me] += 1
                continue
            world = self.world(place)
            holder = world.claim(place).holder
            if holder is None or world.claimable(place, log_ms) or self._gives(place, holder):
                free += 1
            elif holder.id != self._me and self._silent_for(place, now) <= 2 * self._interval_s:
                counts[holder.id] = counts.get(holder.id, 0) + 1
                doubtful[holder.id] += world.freshness(place, log_ms) is not Freshness.FRESH
        group = self._settings.group
        asking = {client for world in self._worlds.values() for client in world.waiting(group, log_ms)}
        for client in asking:
            counts.setdefault(client, 0)
        return Roster(counts, frozenset(asking - {self._me}), free, len(self._units), doubtful)

    def _allows(self, mine: int) -> bool:
        return self._settings.max_claims is None or mine < self._settings.max_claims
