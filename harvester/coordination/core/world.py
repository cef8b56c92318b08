"""The world as one partition of the coordination log tells it: who holds what, how fresh, up to where. Pure data.

A world is made by reading records in order (`rationalizer.read`) and by nothing else, so two readers of the same
records have the same world. `now_ms` is log time: the running maximum of the brokers' append times (P28). It stands
still while nobody writes.

*Freshness* (seed 003), by the age of the holder's last accepted message in log time:

    age < interval               fresh      the holder lives
    interval … 2 × interval      unknown    it may
    age > 2 × interval           stale      the next claim wins

A stale holder holds its claim until another claim wins, or it is released.

*Exact.* A reader from offset 0 knows everything. One that begins in the tail, or meets a hole in the offsets, knows
nothing for certain at first (P30): `exact` says, claim by claim, whether what is known is what a reader from offset 0
would know. What is not exact may be looked at, and is not acted upon. `positioned` says the same of `last_offset`
alone, which a claim that wins does not bring along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from harvester.coordination.core.messages import Client, GroupPartition

NO_GENERATION = -1
SET_TO_START = -1  # the last offset of a place that certainly goes on with offset 0


class Freshness(Enum):
    """See the module's text; FREE: nobody holds the claim."""

    FREE = "free"
    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class LogTiming:
    """`interval_ms`: HeartbeatInterval. `clock_step_ms`: what the clocks of two brokers may differ by at most."""

    interval_ms: int
    clock_step_ms: int

    def freshness(self, age_ms: int) -> Freshness:
        """Of a held claim."""
        if age_ms < self.interval_ms:
            return Freshness.FRESH
        return Freshness.UNKNOWN if age_ms <= 2 * self.interval_ms else Freshness.STALE


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of one place. Times are log times.

    `generation`: offset of the claim that won last, kept when it is released. `last_offset`: the last processed one,
    None before the first (then Kafka's group offset counts), SET_TO_START if an administrator or a holder put it back
    there. `proposed`: a message claim that no heartbeat has followed yet. `heard_ms`: of the last
    message about the place, whoever sent it. `contested`: offset of the last record that may have changed the
    generation; only kept while the claim is not exact.
    """

    holder: Client | None = None
    generation: int = NO_GENERATION
    beat_ms: int = 0
    last_offset: int | None = None
    proposed: int | None = None
    exact: bool = True
    positioned: bool = True
    heard_ms: int = 0
    contested: int = NO_GENERATION

    def freshness(self, now_ms: int, timing: LogTiming) -> Freshness:
        """At a log time."""
        return Freshness.FREE if self.holder is None else timing.freshness(now_ms - self.beat_ms)


@dataclass(slots=True)
class World:
    """See the module's text. `start_offset`: where this reader's unbroken view begins; `next_offset`: what it reads.

    `start_ms` is the log time of the first record of that view. `presence` keeps, by group and client id, when a
    claim was last lost, oldest first: who loses one is there, and wants a share (P31). After 2 intervals that is over.
    """

    timing: LogTiming
    start_offset: int = 0
    next_offset: int = 0
    now_ms: int = 0
    start_ms: int | None = None
    claims: dict[GroupPartition, Claim] = field(default_factory=dict)
    presence: dict[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def begin(cls, timing: LogTiming, offset: int = 0) -> World:
        """The world of a reader that will read from this offset on."""
        return cls(timing, offset, offset)

    @property
    def complete(self) -> bool:
        """Whether nothing lies before this view."""
        return self.start_offset == 0

    def claim(self, place: GroupPartition) -> Claim:
        """What is known of a place, heard of or not."""
        known = self.claims.get(place)
        if known is None:
            return Claim(exact=self.complete, positioned=self.complete, heard_ms=self.start_ms or 0)
        return known

    def freshness(self, place: GroupPartition, now_ms: int = 0) -> Freshness:
        """As of the last record, or of a later log time."""
        return self.claim(place).freshness(max(self.now_ms, now_ms), self.timing)

    @property
    def settled_ms(self) -> int | None:
        """From this log time on, stamps are those of a reader from offset 0; None before the first record."""
        if self.complete:
            return 0
        return None if self.start_ms is None else self.start_ms + self.timing.clock_step_ms

    def claimable(self, place: GroupPartition, now_ms: int = 0) -> bool:
        """Whether a claim appended now (as of the last record, or at a later log time) is certain to win, unless
        another is quicker: P30 for a late reader's view.
        """
        claim, settled_ms = self.claim(place), self.settled_ms
        if claim.exact:
            return self.freshness(place, now_ms) in (Freshness.FREE, Freshness.STALE)
        if settled_ms is None:
            return False
        return self.timing.freshness(max(self.now_ms, now_ms) - max(claim.heard_ms, settled_ms)) is Freshness.STALE

    def held(self, group: str) -> Iterator[tuple[GroupPartition, Client]]:
        """The places of a group that have a holder who is not stale."""
        for place, claim in self.claims.items():
            if place.group != group or claim.holder is None:
                continue
            if claim.freshness(self.now_ms, self.timing) is not Freshness.STALE:
                yield place, claim.holder

    def waiting(self, group: str, now_ms: int = 0) -> Iterator[str]:
        """The ids of a group's clients that lost a claim within 2 intervals, as of the last record or a later time."""
        at_ms = max(self.now_ms, now_ms)
        for (of, client_id), lost_ms in self.presence.items():
            if of == group and at_ms - lost_ms <= 2 * self.timing.interval_ms:
                yield client_id
