"""The full remark path on real servers, once for each of its causes, and the retry in a shard that avoids it."""

from __future__ import annotations

import os
import signal

import pytest

from harvester import LeaderAcquired, LeaderFenced, LeaderRefreshed
from tests.support.harvesting import Scene, alive, causal
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

KEYS = ("a", "b", "c", "d")


def fill(scene: Scene, first: int, last: int, keys: tuple[str, ...] = KEYS) -> None:
    """Rows first … last of each key, a transaction each round."""
    for number in range(first, last + 1):
        with scene.db.transaction():
            scene.add(*((key, str(number)) for key in keys))


def first_deliveries(values: list[str | None]) -> list[str | None]:
    """Without repeats; fails on a repeat that comes after a successor."""
    found: list[str | None] = []
    for value in values:
        if value in found:
            assert value == found[-1], f"{value} is repeated after {found[-1]}"
        else:
            found.append(value)
    return found


@BOTH
def test_a_fatal_producer_error_leads_to_a_new_process_and_a_remark(scene: Scene, plan: Plan, marking: str) -> None:
    """The record was acknowledged, but its producer says it cannot tell: a repeat is allowed, a reordering is not."""
    plan.add(Fault(error="_FATAL", key="a", when="ack", fatal=True))
    with scene.embedded(marking=marking) as running:
        acquired = running.wait_leading()
        before = running.pids()
        fill(scene, 1, 20)
        refreshed = running.wait_refreshed("fate unknown")
        scene.wait_left()
        assert plan.struck() == 1
        assert refreshed.term == acquired.term
        assert refreshed.leader_id != acquired.leader_id
        running.wait_ready()
        assert len(set(before) & set(running.pids())) == 1
        assert running.harvester.status().shards[0].restarts + running.harvester.status().shards[1].restarts == 1
        ids = {acquired.leader_id, *(event.leader_id for event in running.of(LeaderRefreshed))}
        assert len(ids) == 1 + len(running.of(LeaderRefreshed))
        assert not running.of(LeaderFenced)
    published = scene.published()
    assert {key: first_deliveries(values) for key, values in published.items()} == causal(KEYS, 20)
    assert published["a"].count("1") == 2
    repeats = sum(map(len, published.values())) - 80
    assert repeats <= len(KEYS)  # the barrier: at most one record of a key was on the wire


@BOTH
def test_a_shard_that_is_killed_loses_nothing(scene: Scene, plan: Plan, marking: str) -> None:
    with scene.embedded(marking=marking) as running:
        acquired = running.wait_leading()
        fill(scene, 1, 3)
        scene.wait_left()
        with plan.blocked("shard.reports") as reached:
            scene.add(*((key, "4") for key in KEYS))
            reached()
            victims = running.pids()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not any(map(alive, victims)), what="the death of the shards")
        refreshed = running.wait_refreshed("died")
        fill(scene, 5, 10)
        scene.wait_left()
        assert refreshed.leader_id != acquired.leader_id
        assert running.harvester.term == acquired.term
        assert not set(victims) & set(running.pids())
    published = scene.published()
    assert {key: first_deliveries(values) for key, values in published.items()} == causal(KEYS, 10)
    assert all(values.count("4") <= 2 and len(values) <= 11 for values in published.values())


@BOTH
def test_a_record_that_queues_too_long_behind_a_purge_that_waits(scene: Scene, plan: Plan, marking: str) -> None:
    """Somebody else's transaction holds a published row, so that its DELETE waits: the key's next record is stuck."""
    with scene.embedded(marking=marking, queue_timeout="1s", drain_interval="3s") as running, scene.writer() as other:
        acquired = running.wait_leading()
        with plan.blocked("marker.marked") as reached:
            with scene.db.transaction():
                scene.add(*((key, str(number)) for number in (1, 2) for key in KEYS))
            reached()
            other.execute("SELECT FROM outbox WHERE kafka_key = 'a' ORDER BY id LIMIT 1 FOR UPDATE")
        refreshed = running.wait_refreshed("queue timeout")
        assert refreshed.term == acquired.term
        assert refreshed.leader_id != acquired.leader_id
        assert scene.published()["a"] == ["1"]
        other.rollback()
        scene.wait_left()
        assert not running.of(LeaderFenced)
    assert scene.published() == causal(KEYS, 2)


def test_a_mark_that_fails_is_followed_by_one_under_a_new_leader_id(scene: Scene) -> None:
    fill(scene, 1, 5)
    with scene.writer() as other:
        locked = other.execute("SELECT id FROM outbox ORDER BY id LIMIT 1 FOR UPDATE").fetchone()
        assert locked is not None
        with scene.embedded(marking="table") as running:
            acquired = running.wait_leading()
            eventually(lambda: scene.waiting_for_locks() == 1, what="the mark waits for the row")
            (marker,) = scene.db.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            ).fetchall()
            scene.db.execute("SELECT pg_terminate_backend(%s)", marker)
            refreshed = running.wait_refreshed("a mark failed")
            assert refreshed.term == acquired.term
            assert refreshed.leader_id != acquired.leader_id
            other.rollback()
            scene.wait_left()
            assert running.leadership() == ["LeaderAcquired", "LeaderRefreshed"]
            eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
    assert scene.published() == causal(KEYS, 5)


@pytest.mark.parametrize("error", ["_MSG_TIMED_OUT", "_TRANSPORT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND"])
def test_a_transient_failure_is_retried_in_its_shard_behind_its_barrier(error: str, scene: Scene, plan: Plan) -> None:
    plan.add(Fault(error=error, key="a", times=3))
    plan.add(Fault(error=error, key="b", when="produce", times=2))
    with scene.embedded() as running:
        running.wait_for(LeaderAcquired)
        fill(scene, 1, 10)
        scene.wait_left()
        assert plan.struck() == 5
        assert running.leadership() == ["LeaderAcquired"]
        eventually(lambda: sum(s.retries for s in running.harvester.status().shards) == 5, what="the retries counted")
        assert not any(shard.quarantined for shard in running.harvester.status().shards)
    assert scene.published() == causal(KEYS, 10)


def test_time_behind_a_parked_record_is_no_queue_timeout(scene: Scene, plan: Plan) -> None:
    plan.add(Fault(error="_MSG_TIMED_OUT", key="a", times=1000))
    with scene.embedded(queue_timeout="600ms", retry_backoff="300ms", retry_backoff_max="300ms", shards=1) as running:
        running.wait_leading()
        parked = [row for number in range(1, 4) for row in scene.add(("a", str(number)))]
        eventually(plan.struck, what="the first failure")
        eventually(lambda: plan.struck() >= 6, what="retries for longer than queue_timeout")
        fill(scene, 1, 3, KEYS[1:])
        scene.wait_left(*parked)
        plan.heal()
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(KEYS, 3)
