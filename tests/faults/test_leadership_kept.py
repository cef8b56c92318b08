"""A leader that is short of time keeps its lead (P11, P12): frozen for half of heartbeat_timeout, starved of CPU."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.families import family, pass_time, wait_members
from tests.support.harvesting import Scene
from tests.support.longs import some_of
from tests.support.wait import eventually
from tests.support.writing import figure, longest_gap_ms, verify, writing

pytest_plugins = ["tests.support.scenes"]

ROUNDS = max(3, some_of(9))  # of three kinds in turn
HEARTBEAT_S = 5.0  # what is left of it beside the freeze has to do on a busy machine, too
# A frozen shard's records must not time out, either.
LIMITS: dict[str, Any] = {"heartbeat_timeout": f"{HEARTBEAT_S:g}s", "session_timeout": "15s", "drain_interval": "8s"}


def test_freezes_of_half_the_heartbeat_timeout_cost_no_leadership(scene: Scene) -> None:
    with family(scene, "one", **LIMITS) as one, family(scene, "two", **LIMITS) as two:
        wait_members(scene, 2)
        with writing(scene) as load:
            load.wait(100)
            eventually(lambda: any("leads as" in each.running.output for each in (one, two)), what="a leader")
            leader = one if "leads as" in one.running.output else two
            term = scene.term()
            whom = itertools.cycle([[], [leader.pid], leader.shards])  # the whole of it, the supervisor, the shards
            for _ in range(ROUNDS):
                pids = next(whom)
                leader.freeze(*pids)
                pass_time(HEARTBEAT_S / 2)
                leader.thaw(*pids)
                load.wait(150)
        repeats = verify(scene, load)
        assert scene.term() == term
        assert "fenced" not in leader.running.output
        assert repeats == 0
        figure("leads_kept_frozen_half_heartbeat", ROUNDS, "rounds")
        figure("longest_gap_frozen_half_heartbeat", longest_gap_ms(scene.log()), "ms")


def test_a_leader_with_a_tenth_of_the_time_keeps_its_lead(scene: Scene) -> None:
    """Stopped and continued in turn, as a scheduler does it that has better things to do."""
    with family(scene, "one") as one, family(scene, "two") as two:
        wait_members(scene, 2)
        with writing(scene) as load:
            load.wait(100)
            eventually(lambda: any("leads as" in each.running.output for each in (one, two)), what="a leader")
            leader = one if "leads as" in one.running.output else two
            term = scene.term()
            for _ in range(20):
                leader.freeze()
                pass_time(0.27)
                leader.thaw()
                pass_time(0.03)
            load.wait(300)
        repeats = verify(scene, load)
        assert scene.term() == term
        assert "fenced" not in leader.running.output
        assert repeats == 0
