"""Snapshots of a running harvester, for hosts, dashboards and monitoring, and their form in JSON.

Frozen values: taking a snapshot never waits for the relay, and rendering one needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any
from uuid import UUID


class State(StrEnum):
    """The state of the supervisor."""

    CREATED = "created"
    STARTING = "starting"  # connecting, spawning shards
    STANDBY = "standby"  # a healthy member of the group that does not lead
    LEADING = "leading"
    REMARKING = "remarking"  # leading; queues were dropped, waiting for the shards' answers
    SUSPENDED = "suspended"  # leader of its group, but the term is lent to a bulk drain
    PAUSED = "paused"  # leading; nothing is marked until it is resumed
    DRAINING = "draining"  # revoked or stopping: finishing what is on the wire
    FENCED = "fenced"  # trust has expired; still a member, may lead again
    STOPPED = "stopped"
    FAILED = "failed"


# The states of a group member that leads or stands by.
READY_STATES = frozenset({State.STANDBY, State.LEADING, State.REMARKING, State.PAUSED, State.SUSPENDED})


class ShardState(StrEnum):
    """The state of a shard process."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"  # waiting to be replaced


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """A shard. Counters start at zero with its process."""

    index: int
    state: ShardState
    pid: int | None
    queued: int  # marked, not sent
    in_flight: int  # sent, not settled
    parked: int  # keys waiting for a retry
    delivered: int  # published to Kafka
    rate_per_s: float
    retries: int
    errors: int
    quarantined: int
    restarts: int
    cpu_percent: float | None  # of one core; None if unknown
    stored: int = 0  # values written to a store


@dataclass(frozen=True, slots=True)
class Backlog:
    """Rows in the outbox. Counting `records` stops at a limit; `capped` is then true."""

    records: int
    capped: bool
    oldest_age_s: float | None  # None when empty, or created at `infinity`
    quarantine: int | None = None  # rows in quarantine, up to the same limit; None while unknown
    advice: str | None = None  # how to publish it faster, if it consists of few keys


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """Everything known about one key: from the relay while it leads, and from the database; None if it did not answer.

    Records that the relay has under way or waiting are still rows of the outbox: `rows` includes them.
    """

    at: datetime
    key: str
    leads: bool  # whether this harvester leads; otherwise the next three are meaningless
    shard: int  # the shard that has the key under way, or would
    under_way: int  # unsettled records at that shard
    waiting: int  # records that were read and wait for a retry or for earlier ones
    retry_in_s: float | None  # until its first record is retried; None: none has failed
    held: bool  # that record blocks the key for as long as it fails (poison.policy "hold")
    rows: int | None  # in the outbox
    capped: bool  # counting `rows` stopped at a limit
    oldest_id: int | None
    oldest_age_s: float | None
    quarantined: int | None  # in the quarantine table, up to the same limit
    newest_error: str | None  # of the quarantined records
    trouble: str | None = None  # why the database did not answer


@dataclass(frozen=True, slots=True)
class LastEvent:
    """An entry of the event list: time (aware UTC) and text."""

    at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """Everything about a harvester at one moment."""

    at: datetime
    name: str
    outbox: str
    state: State
    leader_id: UUID | None
    term: int | None
    state_since_at: datetime
    started_at: datetime
    shards: tuple[ShardStatus, ...]
    in_flight: int
    max_in_flight: int
    queued: int
    delivered: int  # published to Kafka and purged; excludes quarantined records
    quarantined: int
    rate_per_s: float
    rate_history: tuple[float, ...]  # records/s, one entry per second, oldest first, at most 60
    p50_ms: float | None  # create_time -> acknowledged, over the last interval with traffic
    p99_ms: float | None
    backlog: Backlog | None  # None while unknown
    problem: str | None  # what the harvester is waiting for, in words; None when all is well
    events: tuple[LastEvent, ...]  # newest last, at most 20
    paused_since_at: datetime | None = None  # also set for a paused standby
    waits_for: str | None = None  # in state standby: what it waits for before it leads or could take over
    waits_until_at: datetime | None = None  # the latest end of that, if known


def awaited(status: Status) -> str | None:
    """What a standby waits for while nobody may be leading, preceded by the latest end if known."""
    if status.state is not State.STANDBY or status.waits_for is None:
        return None
    until = "" if status.waits_until_at is None else f"until {status.waits_until_at:%H:%M:%S} UTC at the latest: "
    return f"{until}{status.waits_for}"


def to_json(status: Status | KeyStatus) -> dict[str, Any]:
    """Plain values under the same names; times are ISO 8601, ids and states text."""
    values: dict[str, Any] = adapter(type(status)).dump_python(status, mode="json")  # type: ignore[arg-type]
    return values


@cache
def adapter(kind: type) -> Any:
    """pydantic's TypeAdapter of one of these classes."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
