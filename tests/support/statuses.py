"""Made-up snapshots for the dashboard's tests and its synthetic feed: the same arguments, the same Status."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from harvester.status import Backlog, KeyStatus, LastEvent, ShardState, ShardStatus, State, Status

AT = datetime(2025, 3, 14, 15, 9, 26, tzinfo=UTC)
LEADER = UUID("3f2a91c0-5b1e-4a7e-9d55-0c1d2e3f4a5b")


def a_shard(index: int, *, state: ShardState = ShardState.READY) -> ShardStatus:
    return ShardStatus(
        index=index,
        state=state,
        pid=None if state is ShardState.DEAD else 41_200 + index,
        queued=250 * index,
        in_flight=97 + index,
        parked=index % 3,
        delivered=154_000 + 1_717 * index,
        rate_per_s=0.0 if state is ShardState.DEAD else 1_523.4 + 17 * index,
        retries=2 * index,
        stored=4 * index,
        errors=index // 4,
        quarantined=index // 7,
        restarts=1 if state is ShardState.DEAD else 0,
        cpu_percent=None if state is ShardState.DEAD else 11.7 + index,
    )


def leading(shards: int = 8, *, beat: int = 0) -> Status:
    """A busy leader; `beat` moves the figures, as time would."""
    rates = tuple(12_000.0 + 3_000 * (((second + beat) * 7) % 11 - 5) / 5 for second in range(60))
    return Status(
        at=AT + timedelta(seconds=beat),
        name="billing-1",
        outbox='"billing"."outbox"',
        state=State.LEADING,
        leader_id=LEADER,
        term=7,
        state_since_at=AT - timedelta(minutes=2, seconds=13),
        started_at=AT - timedelta(minutes=4, seconds=2),
        shards=tuple(a_shard(index) for index in range(shards)),
        in_flight=812,
        max_in_flight=1_000,
        queued=4_000,
        delivered=1_234_567 + beat,
        quarantined=1,
        rate_per_s=rates[-1],
        rate_history=rates,
        p50_ms=12.84,
        p99_ms=227.1,
        backlog=Backlog(records=10_000, capped=True, oldest_age_s=3.21),
        problem=None,
        events=tuple(
            LastEvent(at=AT - timedelta(seconds=133 - 9 * number), text=text)
            for number, text in enumerate(
                [
                    "term: waits until the outbox is free: held by 9d8b2c11 under term 6",
                    "term: the wait is over after 4 s",
                    "leads under term 7 as 5e8d7a90",
                    "shard 3 died: marks again as 3f2a91c0",
                    "paused: nothing is marked until it is resumed",
                    "resumed",
                    "changed to 8 shards",
                ]
            )
        ),
    )


def standby() -> Status:
    return replace(
        leading(),
        state=State.STANDBY,
        leader_id=None,
        term=None,
        shards=(),
        in_flight=0,
        queued=0,
        delivered=0,
        quarantined=0,
        rate_per_s=0.0,
        rate_history=(0.0,) * 30,
        p50_ms=None,
        p99_ms=None,
        backlog=None,
        events=(LastEvent(at=AT, text="kafka: recovered after 12 s"),),
    )


def fenced() -> Status:
    return replace(
        leading(),
        state=State.FENCED,
        leader_id=None,
        rate_per_s=0.0,
        rate_history=(9_000.0, 4_000.0, *((0.0,) * 6)),
        problem="no heartbeat came back for 5.0 s: waiting for the broker at kafka-1:9092",
        events=(LastEvent(at=AT, text="no heartbeat came back for 5.0 s: fenced"),),
    )


def failed() -> Status:
    shards = [a_shard(index) for index in range(8)]
    shards[5] = a_shard(5, state=ShardState.DEAD)
    return replace(
        leading(),
        state=State.FAILED,
        leader_id=None,
        term=7,
        shards=tuple(shards),
        rate_per_s=0.0,
        backlog=Backlog(records=0, capped=False, oldest_age_s=None),
        problem="shard 5 died 6 times in 60 s: its restart budget is used up",
    )


KEY = KeyStatus(
    at=AT,
    key="account-17",
    leads=True,
    shard=3,
    under_way=2,
    waiting=41,
    retry_in_s=12.4,
    held=False,
    rows=43,
    capped=False,
    oldest_id=811,
    oldest_age_s=75.0,
    quarantined=1,
    newest_error="MSG_SIZE_TOO_LARGE: the broker refused it",
)
