"""What happened in a campaign, as each consumer noted it: the input of the judge. Plain data, no I/O.

Times are seconds of CLOCK_MONOTONIC, which is one for all processes of a machine. A record is its partition and offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Span = tuple[float, float]
Record = tuple[int, int]  # partition, offset


@dataclass(frozen=True, slots=True)
class Processed:
    """A record that a consumer had in hand, and under which generation."""

    at: float
    partition: int
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class Holds:
    """What a consumer held from this moment on, by its own account: partition to generation."""

    at: float
    claims: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Holding:
    """One partition that was held without a break by a process that could act. `resumed`: it had just been frozen."""

    partition: int
    began: float
    ended: float
    by: str
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a consumer. `born`: when it began to consume; `ended`: when it was killed, or had ended.

    `lost`: partitions and generations that it was told to be another's, and had not given up. `done`: when its handler
    had processed which records, or had given them up; empty without a handler.
    """

    name: str
    born: float
    ended: float = math.inf
    processed: Sequence[Processed] = ()
    holds: Sequence[Holds] = ()
    frozen: Sequence[Span] = ()
    lost: frozenset[tuple[int, int]] = frozenset()
    done: Sequence[tuple[float, Record]] = ()

    def able(self, at: float) -> bool:
        """Whether it lived and did not stand still."""
        return self.born <= at < self.ended and not any(began <= at < ended for began, ended in self.frozen)

    def holdings(self) -> Iterator[Holding]:
        """What it held, without the times in which it stood still."""
        open_: dict[int, tuple[float, int]] = {}
        for holds in (*self.holds, Holds(self.ended, {})):
            at = min(holds.at, self.ended)
            for partition, (began, generation) in list(open_.items()):
                if holds.claims.get(partition) != generation:
                    del open_[partition]
                    yield from self._awake(partition, began, at)
            for partition, generation in holds.claims.items():
                open_.setdefault(partition, (at, generation))

    def _awake(self, partition: int, began: float, ended: float) -> Iterator[Holding]:
        resumed = False
        for frozen, thawed in sorted(self.frozen):
            if thawed <= began or frozen >= ended:
                continue
            if frozen > began:
                yield Holding(partition, began, frozen, self.name, resumed)
            began, resumed = thawed, True
        if began < ended:
            yield Holding(partition, began, ended, self.name, resumed)


@dataclass(frozen=True, slots=True)
class Episode:
    """Faults that belong together, undisturbed by others until `until`.

    `since`: from when on partitions have to be claimed again: when it struck consumers, or the broker is back.
    `healed`: when everything ran again, those who took a place included.
    """

    what: str
    began: float
    since: float
    healed: float
    until: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the judge allows. `slack_s`: for what a consumer notes a moment late on a machine that is busy."""

    interval_s: float
    slack_s: float = 0.25
    wakes_within_s: float = 0.5
    claimed_extra_s: float = 2.0
    fair_intervals: float = 3.0
    max_open_records: int = 0  # at least once; 0: consumers commit each record before they take the next one

    @property
    def claimed_s(self) -> float:
        """All partitions are claimed again.

        After a death: 2 intervals of silence, a twentieth until somebody looks, a round trip; half an interval more if
        only successors may take them that have just begun. After an outage of the broker: half an interval, or 1 s,
        until clients have connected again, up to 2 s where a reader that stands still has to be replaced, round trips.
        """
        return 2 * self.interval_s + self.claimed_extra_s

    @property
    def fair_s(self) -> float:
        """The fair share is reached, from when everything is held and runs.

        Half an interval, or 1 s, until who was cut off is connected again; a twentieth until it asks; an interval in
        which the others have to give; another one for what they have in hand (`fair_intervals` has it where records are
        committed late); two twentieths until they have released and it has claimed. So the sum is 1.65 intervals, or
        2.65; the rest is for three round trips, and for a client that has just begun and reads the log.
        """
        return self.fair_intervals * self.interval_s


@dataclass(frozen=True, slots=True)
class History:
    """Everything that was noted. `keys`: of the records that handlers in several threads took, in the order of each."""

    at_most_once: bool
    partitions: int
    records: frozenset[Record]
    members: Sequence[Member]
    limits: Limits
    episodes: Sequence[Episode] = ()
    keys: Mapping[Record, int] = field(default_factory=dict)
    accidents: Sequence[str] = field(default=())  # what must not happen at all: a process that ended by itself
