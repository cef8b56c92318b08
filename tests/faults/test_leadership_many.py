"""1, 2, 4 and 8 harvesters, started and stopped in turn under load, with and without faults of producers (I2, I8)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.support.families import Family, family, wait_members
from tests.support.findings import first_after, repeats_by_record
from tests.support.harvesting import Scene
from tests.support.hooks import Share
from tests.support.longs import long
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

FAULTS = [
    Share(error="_MSG_TIMED_OUT", share=0.02, when="delivery", seed=1),
    Share(error="_MSG_TIMED_OUT", share=0.02, when="ack", seed=2),
]


# Among faults, too, every record but those whose acknowledgement was turned is published once.
@pytest.mark.parametrize("faults", [pytest.param([], id="clean", marks=long), pytest.param(FAULTS, id="faulty")])
def test_harvesters_come_and_go_in_turn(scene: Scene, faults: list[Share]) -> None:
    for fault in faults:
        scene.plan.add(fault)
    kind = "faulty" if faults else "clean"
    running: list[Family] = []
    ended_at: list[float] = []
    with ExitStack() as stack:
        with writing(scene) as load:
            for count in (1, 2, 4, 8):
                while len(running) < count:
                    name = f"h{len(running) + 1}"
                    running.append(stack.enter_context(family(scene, name, hooks=bool(faults))))
                wait_members(scene, count)
                load.wait(200)
            for count in (4, 2, 1):
                while len(running) > count:
                    last = running.pop(0).stop()  # the leader first, sooner or later
                load.wait(200)
                ended_at.append(last)
        repeats = verify(scene, load)
        running.pop().stop()
    figure(f"repeats_1_2_4_8_{kind}", repeats, "records")
    figure(f"records_1_2_4_8_{kind}", load.committed, "records")
    resumed_s = max(first_after(scene.log(), at) for at in ended_at)
    figure(f"resume_1_2_4_8_{kind}", resumed_s, "s")
    turned = scene.plan.chosen("ack")
    assert bool(turned) == bool(faults)
    # None but the records whose acknowledgement was turned, and those no more often than that.
    assert repeats_by_record(scene.log()) <= turned
