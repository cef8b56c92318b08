"""P18: rows that have to wait, for their key or for their shard, keep their order and hold up nobody else."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from harvester import HarvesterError, State
from harvester.delivery.partitioner import shard_of
from tests.support.harvesting import Embedded, Scene, causal
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

COLD = ("b", "c", "d")


def parked(running: Embedded) -> int:
    """Keys that wait for a retry."""
    return sum(shard.parked for shard in running.harvester.status().shards)


def waiting(running: Embedded) -> Any:
    """The rows that wait in the supervisor."""
    parts = running.harvester._life.parts
    assert parts is not None
    return parts.supervisor.machine.planner.deferred


@BOTH
def test_a_parked_key_waits_alone_and_keeps_its_order_with_rows_that_arrive_meanwhile(
    scene: Scene, plan: Plan, marking: str
) -> None:
    """P5 too, with more rows of the key than may be queued, and a cap that one key must not use up."""
    plan.add(Fault(error="TOPIC_AUTHORIZATION_FAILED", key="a", times=10_000))
    limits: dict[str, Any] = {"max_queued_per_key": 3, "max_in_flight_records": 4, "max_attempts": 100_000}
    with scene.embedded(marking=marking, shards=1, **limits) as running:
        running.wait_leading()
        stuck = [row for number in range(1, 6) for row in scene.add(("a", str(number)))]
        eventually(lambda: waiting(running).parked[0] == 1, what="a parked key")
        stuck += [row for number in range(6, 31) for row in scene.add(("a", str(number)))]
        for number in range(1, 31):
            scene.add(*((key, str(number)) for key in COLD))
        scene.wait_left(*stuck)
        assert "a" not in scene.published()
        plan.heal()
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("a", *COLD), 30)


@BOTH
def test_a_hot_key_waits_beyond_its_bound_while_cold_ones_go_on(scene: Scene, plan: Plan, marking: str) -> None:
    limits: dict[str, Any] = {"max_queued_per_key": 8, "max_in_flight_records": 20, "marking": marking}
    with scene.embedded(**limits) as running, scene.writer() as writer:
        running.wait_leading()
        with scene.writer() as other:
            with plan.blocked("marker.marked") as reached:
                scene.add(*(("hot", str(number)) for number in range(1, 301)), db=writer)
                writer.commit()
                reached()
                (first,) = other.execute("SELECT id FROM outbox ORDER BY id LIMIT 1 FOR UPDATE").fetchone() or (0,)
            eventually(lambda: len(waiting(running).by_key) == 1, what="the rows of the hot key that wait")
            hot = scene.left()
            for number in range(1, 21):
                scene.add(*((key, str(number)) for key in COLD), ("hot", str(300 + number)))
            hot = [row[0] for row in scene.db.execute("SELECT id FROM outbox WHERE kafka_key = 'hot'")]
            assert first in hot
            scene.wait_left(*hot)  # the cold ones are through, behind 300 rows of a key that stands still
            other.rollback()
        for number in range(321, 341):
            scene.add(("hot", str(number)))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
        assert not waiting(running).by_key
    assert scene.published() == causal(("hot",), 340) | causal(COLD, 20)


@BOTH
def test_rows_for_a_shard_that_is_not_there_wait_for_it_in_order(scene: Scene, plan: Plan, marking: str) -> None:
    names = [f"k{number}" for number in range(100)]
    dead = [name for name in names if shard_of(name.encode(), 0, 2) == 0][:3]
    free = [name for name in names if shard_of(name.encode(), 0, 2) == 1][:3]
    with scene.embedded(marking=marking, max_queued_per_key=5, restart_budget=10_000) as running:
        running.wait_leading()
        scene.add(*((key, "1") for key in dead + free))
        scene.wait_left()
        number = 1
        while not waiting(running).by_shard:  # the shard may be replaced before the rows come
            number += 1
            running.wait_ready()
            with plan.blocked("marker.marked") as reached:
                with scene.db.transaction():
                    scene.add(*((key, str(number)) for key in dead + free))
                reached()
                os.kill(running.pids()[0], signal.SIGKILL)
            eventually(
                lambda: waiting(running).by_shard or not scene.left(), what="a row behind the shard, or all published"
            )
        number += 1
        with plan.blocked("marker.marked") as reached:
            with scene.db.transaction():
                scene.add(*((key, str(number)) for key in dead + free))
            reached()
            running.wait_ready()  # these rows find the shard there, and what waits for it not yet sent
        for following in range(number + 1, number + 31):
            with scene.db.transaction():
                scene.add(*((key, str(following)) for key in dead + free))
        scene.wait_left()
        assert waiting(running).ids() == set()
    published = {key: list(dict.fromkeys(values)) for key, values in scene.published().items()}
    assert published == causal(dead + free, number + 30)


@BOTH
def test_a_published_row_that_somebody_has_locked_holds_up_its_own_key_alone(
    scene: Scene, plan: Plan, marking: str
) -> None:
    with scene.embedded(marking=marking, shards=1) as running, scene.writer() as other:
        running.wait_leading()
        with plan.blocked("marker.marked") as reached:
            with scene.db.transaction():
                (locked, *_) = scene.add(("a", "1"), *((key, "1") for key in COLD))
            reached()
            other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (locked,))
        (behind,) = scene.add(("a", "2"))
        scene.wait_left(locked, behind)
        for number in range(2, 5):
            scene.add(*((key, str(number)) for key in COLD))
            scene.wait_left(locked, behind)
        eventually(lambda: f"lock on record {locked}" in (running.harvester.status().problem or ""), what="the problem")
        assert scene.published()["a"] == ["1"]
        other.rollback()
        scene.wait_left()
        eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("a",), 2) | causal(COLD, 4)


@BOTH
def test_a_record_held_by_policy_holds_its_key_until_it_can_be_sent(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, max_queued_per_key=3, poison={"policy": "hold"}) as running:
        running.wait_leading()
        (bad,) = scene.add(("a", "1"), topic="no topic")
        stuck = [bad, *scene.add(*(("a", str(number)) for number in range(2, 12)))]
        for number in range(1, 6):
            scene.add(*((key, str(number)) for key in COLD))
        scene.wait_left(*stuck)
        eventually(lambda: parked(running) == 1, what="the held key")
        assert scene.quarantined() == {}
        scene.db.execute("UPDATE outbox SET kafka_topic = %s WHERE id = %s", (scene.topic, bad))
        scene.wait_left()
        eventually(lambda: parked(running) == 0, what="no held key any more")
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("a",), 11) | causal(COLD, 5)


@BOTH
def test_a_record_that_ends_the_harvester_by_policy_stays_where_it_is(scene: Scene, marking: str) -> None:
    with scene.embedded(marking=marking, poison={"policy": "stop"}) as running:
        running.wait_leading()
        (bad,) = scene.add(("a", "1"), topic="no topic")
        with pytest.raises(HarvesterError, match=f"record {bad}"):
            running.harvester.wait(30)
        assert running.harvester.state is State.FAILED
    assert scene.left() == [bad]
    assert scene.quarantined() == {}
