"""The number of shards changes under load (P17): nothing is repeated or reordered, and never while anything is open."""

from __future__ import annotations

import os
import signal
import threading

from tests.support.harvesting import Scene, causal
from tests.support.hooks import Fault, Plan
from tests.support.wait import eventually
from tests.support.writing import verify, writing

pytest_plugins = ["tests.support.scenes"]

KEYS = [f"k{number}" for number in range(12)]  # some of them belong to another shard after each change


def test_up_and_down_under_load(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        with writing(scene) as load:
            for shards in (3, 1, 2, 4, 2):
                load.wait(150)
                assert running.harvester.scale(shards, 30.0)
                assert len(running.harvester.status().shards) == shards
                assert running.wait_refreshed(f"changed to {shards} shards")
                running.wait_ready()
            load.wait(150)
        assert verify(scene, load) == 0


def test_it_is_refused_while_anything_is_unsettled(scene: Scene, plan: Plan) -> None:
    """The first of each key is acknowledged and not settled; another shard would send the second."""
    with scene.embedded() as running:
        running.wait_leading()
        with plan.blocked("shard.reports") as reached:
            scene.add(*((key, "1") for key in KEYS))
            reached()
            eventually(lambda: running.harvester.in_flight == len(KEYS), what="all of them in flight")
            scene.add(*((key, "2") for key in KEYS))
            for shards in (3, 1):
                assert not running.harvester.scale(shards, 0.5)
                assert len(running.harvester.status().shards) == 2
        scene.wait_left()
        assert running.harvester.scale(3, 30.0)
        scene.add(*((key, "3") for key in KEYS))
        scene.wait_left()
    assert scene.published() == causal(KEYS, 3)


def test_a_shard_that_dies_while_it_is_to_go_is_not_started_again(scene: Scene) -> None:
    """Its death completes the change; a successor would be nobody's, and in the way once there are more shards."""
    with scene.embedded() as running:
        running.wait_leading()
        victim = running.harvester.status().shards[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)  # busy, or swapping: it does not answer
        change = threading.Thread(target=running.harvester.scale, args=(1, 30.0))
        change.start()
        eventually(lambda: running.harvester.state.value == "remarking", what="the change under way")
        os.kill(victim, signal.SIGKILL)
        change.join()
        assert running.harvester.scale(2, 30.0)
        scene.add(*((key, "1") for key in KEYS))
        scene.wait_left()
    assert scene.published() == causal(KEYS, 1)


def test_one_change_at_a_time(scene: Scene, plan: Plan) -> None:
    """Who asks while another change is under way is told no, and the other is told what became of his."""
    with scene.embedded() as running:
        running.wait_leading()
        answers: list[bool] = []
        with plan.blocked("shard.reports") as reached:
            scene.add(*((key, "1") for key in KEYS))
            reached()
            first = threading.Thread(target=lambda: answers.append(running.harvester.scale(4, 30.0)))
            first.start()
            eventually(lambda: running.harvester.state.value == "remarking", what="the change under way")
            assert not running.harvester.scale(1, 30.0)
            assert not answers
        first.join(60)
        assert answers == [True]
        assert len(running.harvester.status().shards) == 4
        scene.wait_left()  # what had not been sent when the change began is marked again
    assert scene.published() == causal(KEYS, 1)


def test_beside_a_record_that_is_refused_again_and_again(scene: Scene, plan: Plan) -> None:
    """A parked record is nowhere in flight: it waits in another shard after the change, its key behind it."""
    plan.add(Fault("UNKNOWN_TOPIC_OR_PART", key="stuck", times=1_000_000))
    with scene.embedded(max_attempts=1_000_000) as running:
        running.wait_leading()
        stuck = scene.add(("stuck", "1"), ("stuck", "2"), ("stuck", "3"))
        for count, shards in enumerate((3, 1, 4, 2), start=1):
            struck = plan.struck()
            eventually(lambda struck=struck: plan.struck() > struck, what="another attempt")  # type: ignore[misc]
            scene.add(*((key, str(count)) for key in KEYS))
            assert running.harvester.scale(shards, 30.0)
            scene.wait_left(*stuck)
        plan.heal()
        scene.wait_left()
    assert scene.published() == {**causal(KEYS, 4), **causal(["stuck"], 3)}
