"""What happened in a campaign, as recorded: the input of the judge. Plain data, no I/O.

Times are seconds since the UNIX epoch, all of one machine's clock. A record is named by its key and its number within
the key: numbers are raised under a lock on the key, so a smaller number of a key was committed before a larger one and
is its cause. `stamp` is the moment at which the row was inserted, in microseconds; it tells two rows apart that had
the same number because the first one's transaction failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .setup import AT_LEAST_ONCE


@dataclass(frozen=True, slots=True)
class Committed:
    """A row whose transaction was committed. `late`: it was held open on purpose, so `at` says little."""

    key: str
    seq: int
    at: float  # when it was inserted
    stamp: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """A record in a topic; `at` is the broker's clock at the append, `term` the one under which it was sent."""

    key: str
    seq: int
    topic: str
    partition: int
    offset: int
    at: float
    stamp: int
    term: int | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record in quarantine."""

    key: str
    seq: int
    at: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """A row that left the outbox by a committed DELETE, and when the server got that statement."""

    key: str
    seq: int
    at: float


@dataclass(frozen=True, slots=True)
class Marked:
    """Rows taken in the table by one statement: by which process, under which leader id, and whose term it was then."""

    by: str
    leader_id: str
    at: float
    rows: int
    term: int
    holder: str  # who held the term row, locked by the statement


@dataclass(frozen=True, slots=True)
class Led:
    """A process's leadership, from "leads" to "fenced", "revoked", its end or the next term of its own.

    `frozen` are the times in which its supervisor stood still, as far as they lie in it; `delivery` is its mode.
    """

    name: str
    leader_id: str
    term: int
    began: float
    ended: float
    frozen: tuple[tuple[float, float], ...] = ()
    delivery: str = AT_LEAST_ONCE


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault and its effects, which may last until `ended`.

    `repeats`: whether invariant I8 allows records to be repeated because of it, if they were sent at least once, by a
    process of `names` (none: by any) while that one led; then at most as many as may be in flight, of each key one,
    once for the fault and once for each leadership that ended meanwhile.
    """

    kind: str
    target: str
    began: float
    ended: float
    repeats: bool
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Stuck:
    """A key whose records could not be delivered for a while, by the campaign's own doing."""

    key: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the judge allows. `cap`: max_in_flight_records.

    `clock_slack_s` is for clocks that tick in whole milliseconds; `recovery_s` is how long after its end a fault may
    still slow things down; `unclear_s` how long after its end a record may still arrive whose sender will never know:
    the delivery timeout and a margin; `flow_s` how soon other keys' records must be out while one key is stuck.
    """

    heartbeat_timeout_s: float = 2.0
    cap: int = 1000
    clock_slack_s: float = 0.002
    overlap_s: float = 0.25
    recovery_s: float = 15.0
    unclear_s: float = 5.0
    flow_s: float = 10.0


@dataclass(frozen=True, slots=True)
class History:
    """Everything that was recorded. `delivered` is what a reader of committed records sees, in the order of offsets
    within each partition; `delivery` is the campaign's mode."""

    committed: Sequence[Committed]
    delivered: Sequence[Delivered]
    quarantined: Sequence[Quarantined] = ()
    waiting: Sequence[tuple[str, int]] = ()  # rows that still stand in the outbox
    truncated: Sequence[tuple[str, int]] = ()  # rows that a TRUNCATE found in the outbox
    removed: Sequence[Removed] = ()
    marked: Sequence[Marked] = ()
    led: Sequence[Led] = ()
    faults: Sequence[Fault] = ()
    stuck: Sequence[Stuck] = ()
    accidents: Sequence[str] = ()  # what must not happen at all: a process that ended by itself, an unreadable log
    rolled_back: int = 0
    foreign: Sequence[str] = ()  # records in the topics that no writer wrote, and rolled-back ones
    limits: Limits = field(default_factory=Limits)
    delivery: str = AT_LEAST_ONCE
