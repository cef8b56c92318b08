"""Produce errors, acknowledgements turned into failures, poison records (I7, I8), under load."""

from __future__ import annotations

import time

import pytest

from tests.conftest import MakeTopic
from tests.support.families import family, pass_time
from tests.support.findings import repeats_by_record
from tests.support.harvesting import Scene
from tests.support.hooks import Fault, Share
from tests.support.wait import eventually
from tests.support.writing import figure, parse, verify, writing

pytest_plugins = ["tests.support.scenes"]

POISON = "p" * 3000  # for a topic that takes less


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_transient_produce_errors_repeat_nothing(scene: Scene, marking: str) -> None:
    scene.plan.add(Share(error="_MSG_TIMED_OUT", share=0.02, when="delivery", seed=3))
    scene.plan.add(Share(error="_TRANSPORT", share=0.02, when="delivery", seed=4))
    scene.plan.add(Share(error="_QUEUE_FULL", share=0.02, when="produce", seed=5))
    with family(scene, "one", hooks=True, marking=marking) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(1500)
        repeats = verify(scene, load)
        one.stop()
    struck = scene.plan.chosen()
    assert struck.total() > 30
    assert repeats == 0
    figure(f"produce_errors_{marking}", struck.total(), "errors")
    figure(f"repeats_produce_errors_{marking}", repeats, "records")


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_an_acknowledgement_turned_into_a_failure_repeats_its_record_once(scene: Scene, marking: str) -> None:
    scene.plan.add(Share(error="_MSG_TIMED_OUT", share=0.02, when="ack", seed=6))
    with family(scene, "one", hooks=True, marking=marking) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(1500)
        repeats = verify(scene, load)
        one.stop()
    turned = scene.plan.chosen("ack")
    assert turned.total() > 15
    assert repeats_by_record(scene.log()) == turned
    figure(f"acknowledgements_turned_{marking}", turned.total(), "errors")
    figure(f"repeats_acknowledgements_turned_{marking}", repeats, "records")


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_one_poison_record_among_500_delays_nobody_else(scene: Scene, make_topic: MakeTopic, marking: str) -> None:
    """Refused by the broker for its size, and quarantined."""
    narrow = make_topic(1, {"max.message.bytes": "2000"})
    with family(scene, "one", marking=marking) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(250)
            (poison,) = scene.add(("poison", POISON), topic=narrow)
            scene.add(("poison", "after"), topic=narrow)
            load.wait(250)
        eventually(lambda: poison in scene.quarantined(), what="quarantine")
        verify(scene, load, quarantined=1)
        assert scene.published(narrow) == {"poison": ["after"]}
        one.stop()
    latest_ms = max(record.created_ms - parse(record.value).inserted_ms for record in scene.log())
    figure(f"latest_beside_poison_{marking}", latest_ms, "ms")
    assert latest_ms < 2000 + 3000  # the goal is 2 s; generous, for a machine that is busy with other tests


@pytest.mark.parametrize("marking", ["memory", "table"])
def test_a_stuck_key_leaves_the_processor_calm(scene: Scene, marking: str) -> None:
    """Every attempt fails, and none is the record's fault: its key waits, with 500 rows."""
    scene.plan.add(Fault(error="_MSG_TIMED_OUT", key="stuck", times=10_000))
    with family(scene, "one", hooks=True, marking=marking) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(200)
            scene.add(*(("stuck", str(number)) for number in range(500)))
            load.wait(300)
        eventually(lambda: len(scene.left()) <= 500, 60, "everything but the stuck key")
        latest_ms = max(record.created_ms - parse(record.value).inserted_ms for record in scene.log())
        used_s, struck, began_at = one.cpu_s(), scene.plan.struck(), time.monotonic()
        pass_time(5.0)
        took_s = time.monotonic() - began_at
        share, attempts_per_s = (one.cpu_s() - used_s) / took_s, (scene.plan.struck() - struck) / took_s
        assert len(scene.left()) == 500
        scene.plan.heal()
        scene.wait_left()
        one.stop()
    assert scene.published()["stuck"] == [str(number) for number in range(500)]
    figure(f"latest_beside_a_stuck_key_{marking}", latest_ms, "ms")
    figure(f"cpu_beside_a_stuck_key_{marking}", 100 * share, "%_of_a_core")
    figure(f"attempts_of_a_stuck_key_{marking}", attempts_per_s, "1/s")
    assert latest_ms < 2000 + 3000
    assert share < 0.25
    assert attempts_per_s < 2 / 0.1  # its backoff is 100 to 200 ms
