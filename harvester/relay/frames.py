"""What supervisor and shards say to each other over their pipes. Values only; their bytes: `harvester.relay.framing`.

The *epoch* counts remarks (takeovers, drains and stops included). Both directions of a pipe keep order, so a
shard that has read `Remark(n)` will see nothing of an epoch below n, and a supervisor that has read
`Remarked(n)` will hear nothing about one, except acknowledgements of what was on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Supervisor → shard: rows to publish, one after the other, in id order.

    `low_water`: every id below it is settled, and no new one can appear there (P25); None: not known.
    """

    epoch: int
    rows: bytes
    low_water: int | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """Supervisor → shard: drop what is queued, answer with what is still on the wire, go on under this term.

    `term` and `holder` fence the shard's quarantine statements; both None: no leader, nothing may be produced.
    `server` is the database server that the term was taken on; None: not known, or not to be compared. `incarnation`
    is the outbox's; `lanes` how many there are to be fenced, by `shards` shards (exactly-once mode).
    """

    epoch: int
    term: int | None
    holder: str | None
    server: str | None = None
    incarnation: str | None = None
    lanes: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """Supervisor → shard: this record is parked; no older frame of its key can follow (P5)."""

    epoch: int
    record_id: int


@dataclass(frozen=True, slots=True)
class Login:
    """Supervisor → shard: what new connections log in with from now on; those that are open stay. All of it secret.

    `user` and `password` are Kafka's (SASL); an empty user changes nothing there.
    """

    dsn: str = field(repr=False)
    user: str = field(repr=False)
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stop:
    """Supervisor → shard: produce nothing more, finish the wire, purge, exit."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Shard → supervisor: connected to the database, its producer made."""

    pid: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Shard → supervisor: the commit of these ids' purge (or quarantine) has come back (P1, P2)."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Remarked:
    """Shard → supervisor: queues are empty; exactly these ids are on the wire or unpurged.

    `in_doubt`: among what is given up was something that had been sent, and may arrive yet.
    """

    epoch: int
    ids: Sequence[int]
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Parked:
    """Shard → supervisor: `record_id` is to be tried again after `wait_s`; it and `given_back` were dropped here.

    `held`: by policy it will be tried for ever.
    """

    epoch: int
    record_id: int
    given_back: Sequence[int]
    error: str
    wait_s: float
    attempts: int
    held: bool


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Shard → supervisor: this record failed, and what was sent of it may still arrive (P36).

    What follows from the failure is said after it, in a frame of its own.
    """

    record_id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Shard → supervisor: dropped on arrival, because their key was parked meanwhile."""

    epoch: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Shard → supervisor, of any epoch: these were not sent for lack of trust or a leader; forget them."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class FateUnknown:
    """Shard → supervisor: nobody can tell whether these were published; they are to be marked again."""

    epoch: int
    ids: Sequence[int]
    reason: str


@dataclass(frozen=True, slots=True)
class QueueTimedOut:
    """Shard → supervisor: this record was queued for longer than queue_timeout without any progress."""

    epoch: int
    record_id: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Shard → supervisor: this record went to quarantine (its `Settled` is sent as well)."""

    record_id: int
    error: str


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Shard → supervisor: this record used up its attempts, and the policy is to stop."""

    record_id: int
    error: str


@dataclass(frozen=True, slots=True)
class Session:
    """Shard → supervisor: its database session; `started` as pg_stat_activity.backend_start prints it (P7)."""

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class ServerChanged:
    """Shard → supervisor: its database server is not the one it was (P9); it purges nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Shard → supervisor, at most once a second: gauges, counters since start, latency buckets since the last."""

    queued: int
    in_flight: int
    parked: int
    delivered: int
    retries: int
    errors: int
    quarantined: int
    latency: str = ""  # harvester.telemetry.latency.Histogram.pack() in hex


@dataclass(frozen=True, slots=True)
class Log:
    """Shard → supervisor: a line for the log. `level` as in the module logging."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Shard → supervisor: what this shard waits for, in words; None when that is over."""

    text: str | None


Frame = (
    Dispatch
    | Remark
    | Closed
    | Login
    | Stop
    | Ready
    | Settled
    | Remarked
    | Parked
    | InDoubt
    | Refused
    | Dropped
    | FateUnknown
    | QueueTimedOut
    | Quarantined
    | Poisoned
    | Session
    | ServerChanged
    | Stats
    | Log
    | Trouble
)
