"""Processes that stand still: a stopped shard, a stopped supervisor (P12, P15, P16)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from harvester import LeaderFenced
from harvester.delivery.partitioner import shard_of
from tests.support.harvesting import Scene, alive, causal, family_of, shards_of, wait_leads
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

QUICK: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "5s", "drain_interval": "3s"}


def keys_of(shard: int, count: int) -> list[str]:
    """Keys that belong to this one of two shards."""
    names = (f"k{number}" for number in range(1000))
    return [name for name in names if shard_of(name.encode(), 0, 2) == shard][:count]


def _published(scene: Scene, ids: Collection[int]) -> bool:
    return set(ids).isdisjoint(scene.left())


def test_a_shard_that_stands_still_is_replaced_and_the_other_goes_on(scene: Scene) -> None:
    stuck, free = keys_of(0, 3), keys_of(1, 3)
    with scene.embedded(**QUICK) as running:
        acquired = running.wait_leading()
        scene.add(*((key, "1") for key in stuck + free))
        scene.wait_left()
        frozen = running.harvester.status().shards[0].pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        waiting = set(scene.add(*((key, "2") for key in stuck)))
        went_on = False
        for number in range(2, 20):
            added = scene.add(*((key, str(number)) for key in free))
            eventually(partial(_published, scene, added), what="the other shard's records")
            went_on = went_on or waiting <= set(scene.left())
        assert went_on
        refreshed = running.wait_refreshed("shard 0 died")
        eventually(lambda: not alive(frozen), what="its death")
        scene.add(*((key, "3") for key in stuck))
        scene.wait_left()
        assert refreshed.term == acquired.term
        assert running.harvester.status().shards[0].pid != frozen
        assert not running.of(LeaderFenced)
    published = scene.published()
    assert {key: published[key] for key in free} == causal(free, 19)
    assert {key: list(dict.fromkeys(published[key])) for key in stuck} == causal(stuck, 3)


def test_a_shard_that_stands_still_for_a_moment_is_left_alone(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        before = running.pids()
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        ids = scene.add(*((key, "1") for key in keys_of(0, 3) + keys_of(1, 3)))
        eventually(lambda: running.harvester.in_flight == len(ids), what="all records handed to shards")
        for pid in before:
            os.kill(pid, signal.SIGCONT)
        scene.wait_left()
        assert running.pids() == before
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(keys_of(0, 3) + keys_of(1, 3), 1)


def test_shards_of_a_frozen_supervisor_stop_sending_when_trust_ends(scene: Scene) -> None:
    """What was queued is dropped, never sent late; the thawed supervisor fences itself and leads under a new term."""
    keys = keys_of(0, 3) + keys_of(1, 3)
    with scene.cli(env=scene.plan.env, **QUICK) as running:
        first_id, first_term = wait_leads(running)
        shards = shards_of(running.pid)
        with scene.plan.blocked("shard.purged") as reached:
            with scene.db.transaction():
                scene.add(*((key, str(number)) for number in range(1, 11) for key in keys))
            reached()
            os.kill(running.pid, signal.SIGSTOP)
            expired_at = time.time() + 1.0  # at the latest: the last proof was sent before the freeze
            eventually(lambda: time.time() > expired_at + 0.1, what="the end of trust")
        # The shards may go on now; all they have is a queue and no trust.
        eventually(lambda: time.time() > expired_at + 0.5, what="time to send, for a shard that would")
        thawed_at = time.time()
        os.kill(running.pid, signal.SIGCONT)
        fenced = running.wait_for_line(r"fenced: ")
        del fenced
        line = running.wait_for_line(rf"leads as (\S+) under term {first_term + 1}\b")
        assert line[1] != first_id
        scene.wait_left()
        assert shards_of(running.pid) == shards
        assert running.stop() == 0
    log = scene.log()
    assert scene.published() == causal(keys, 10)
    late = [record for record in log if expired_at * 1000 < record.created_ms < thawed_at * 1000]
    assert late == []
    assert any(record.created_ms < expired_at * 1000 for record in log)


def test_a_frozen_harvester_thaws_after_another_one_has_taken_over(scene: Scene) -> None:
    """Supervisor and shards stand still for longer than the session: what they still have is sent by nobody twice."""
    keys = keys_of(0, 3) + keys_of(1, 3)
    with scene.cli(name="one", env=scene.plan.env, **QUICK) as one:
        _, first_term = wait_leads(one)
        with scene.member(name="two", **QUICK) as two:
            eventually(lambda: two.harvester.state.value == "standby", what="standby")
            with scene.plan.blocked("shard.purged") as reached:
                with scene.db.transaction():
                    scene.add(*((key, str(number)) for number in range(1, 6) for key in keys))
                reached()
                family = family_of(one.pid)
                for pid in family:
                    os.kill(pid, signal.SIGSTOP)
            acquired = two.wait_leading()
            assert acquired.term > first_term
            scene.wait_left()
            for pid in reversed(family):  # a supervisor that thaws first kills its shards
                os.kill(pid, signal.SIGCONT)
            one.wait_for_line(r"fenced: ")
            for number in range(6, 11):
                scene.add(*((key, str(number)) for key in keys))
            scene.wait_left()
            # A busy machine may fence the successor, which then leads again.
            assert scene.holder() == "two"
            assert sum("leads as " in line for line in one.output.splitlines()) == 1
            assert one.stop() == 0
    assert {key: list(dict.fromkeys(values)) for key, values in scene.published().items()} == causal(keys, 10)
