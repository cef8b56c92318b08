"""Exactly-once mode under faults: nothing lost, repeated or reordered for readers of what is committed (I6).

Aimed by named places: `shard.commit` (all is sent, nothing is committed), `shard.committed` (Kafka has committed, the
database has not deleted), `lane.fenced` (a take-over has fenced a lane and not read its progress).
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from harvester import LeaderRefreshed
from harvester.delivery.progress import lanes_of
from tests.support.cli import RunningCli
from tests.support.families import QUICK, Family, family, pass_time, wait_gone, wait_members
from tests.support.harvesting import Scene
from tests.support.hooks import Fault
from tests.support.wait import eventually
from tests.support.writing import Load, figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

ONCE: dict[str, Any] = {"delivery": "exactly-once"}
PLACES = ("shard.commit", "shard.committed")


def _kill_exactly_once_leader(scene: Scene, place: str) -> Load:
    """A leader that is alone dies under load when a shard comes to this place; what was written."""
    with family(scene, "one", hooks=True, **QUICK, **ONCE) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(200)
            with scene.plan.blocked(place) as reached:
                reached()
                load.wait(100)
                one.kill()
    return load


def _kill_at_least_once_leader(scene: Scene) -> Load:
    """The same at least once, with nothing aimed at."""
    with family(scene, "one", **QUICK) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(100)
        one.kill()
    return load


@pytest.mark.parametrize("place", PLACES)
def test_shards_that_die_there_repeat_nothing(scene: Scene, place: str) -> None:
    with family(scene, "one", hooks=True, restart_budget=50, **ONCE) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(300)
            before = one.shards
            with scene.plan.blocked(place) as reached:
                reached()
                load.wait(100)
                one.kill(*before)
            one.wait_replaced(*before)
            load.wait(300)
        assert verify(scene, load) == 0
        one.stop()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", ["supervisor", "group"])
def test_a_leader_that_dies_there_is_succeeded_without_a_repeat(scene: Scene, victim: str, place: str) -> None:
    with family(scene, "one", hooks=True, **QUICK, **ONCE) as one:
        one.wait_leads()
        with family(scene, "two", **QUICK, **ONCE) as two:
            wait_members(scene, 2)
            with writing(scene) as load:
                load.wait(300)
                everyone = one.everyone()
                with scene.plan.blocked(place) as reached:
                    reached()
                    load.wait(100)
                    one.kill(*[one.pid] if victim == "supervisor" else [])
                wait_gone(everyone, 2 + 5)
                two.wait_leads()
                load.wait(300)
            assert verify(scene, load) == 0
            two.stop()


@pytest.mark.parametrize("place", [*PLACES, "lane.fenced"])
def test_a_leader_that_froze_there_commits_nothing_when_it_thaws(scene: Scene, place: str) -> None:
    """The zombie's transaction is open, or committed and not purged, when another takes over."""
    with family(scene, "one", hooks=True, **QUICK, **ONCE) as one:
        one.wait_leads()
        with family(scene, "two", **QUICK, **ONCE) as two:
            with writing(scene) as load:
                load.wait(200)
                with scene.plan.blocked(place) as reached:
                    if place == "lane.fenced":
                        one.kill(*one.shards)
                    reached()
                    one.freeze()
                two.wait_leads()
                load.wait(300)
                one.thaw()
                pass_time(1)
                load.wait(300)
            assert verify(scene, load) == 0
            two.stop()


@pytest.mark.parametrize("earlier", [0, 1])
def test_an_outcome_that_nobody_knows_on_either_lane(scene: Scene, earlier: int) -> None:
    """It is committed. Nothing is sent again before both lanes are open, whichever of them is opened first."""
    with family(scene, "one", hooks=True, **{**ONCE, "shards": 1}) as one:
        one.wait_leads()
        for number in range(earlier):
            scene.add(("k", f"before {number}"))
            scene.wait_left()
        scene.plan.add(Fault("_TIMED_OUT", when="committed"))
        with scene.db.transaction():
            scene.add(("k", "1"), ("k", "2"))
        eventually(lambda: scene.plan.struck() == 1, what="an unclear outcome")
        scene.wait_left()
        scene.add(("k", "3"))
        scene.wait_left()
        one.stop()
    assert scene.published() == {"k": [*(f"before {number}" for number in range(earlier)), "1", "2", "3"]}


@pytest.mark.parametrize("when", ["commit", "committed"])
def test_an_outcome_that_nobody_knows_is_looked_up(scene: Scene, when: str) -> None:
    """The lane is opened anew, and its progress says whether the transaction counts."""
    with family(scene, "one", hooks=True, **ONCE) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(200)
            scene.plan.add(Fault("_TIMED_OUT", when=when, times=5))
            eventually(lambda: scene.plan.struck() == 5, what="five unclear outcomes")
            load.wait(300)
        assert verify(scene, load) == 0
        assert one.deaths == 0
        one.stop()


def test_a_record_that_is_refused_costs_its_own_key(scene: Scene) -> None:
    """Its batch is refused with it; by halves it is found, goes to quarantine, and all others flow in order."""
    with family(scene, "one", hooks=True, max_attempts=2, **ONCE) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(200)
            scene.plan.add(Fault("INVALID_RECORD", key="poison", times=1_000))
            poison = {*scene.add(("poison", "1")), *scene.add(("poison", "2"))}
            load.wait(300)
            eventually(lambda: poison <= scene.quarantined().keys(), what="the quarantine of the records")
            scene.plan.heal()
            load.wait(300)
        quarantined = scene.quarantined()
        assert all("INVALID_RECORD" in quarantined[one] for one in poison)
        repeats = verify(scene, load, quarantined=len(quarantined))
        assert repeats == 0
        one.stop()


def test_a_record_for_a_topic_that_may_not_be_written_costs_its_own_key(scene: Scene) -> None:
    """The coordinator refuses the whole transaction, here because the topic is Kafka's own; no record is named."""
    with scene.embedded(max_attempts=2, shards=1, **ONCE) as running:
        running.wait_leading()
        scene.add(("a", "1"))
        scene.wait_left()
        with scene.db.transaction():
            (denied,) = scene.add(("denied", "1"), topic="__consumer_offsets")
            scene.add(("a", "2"), ("b", "1"), ("denied", "2"))
        scene.wait_left()
        assert "TOPIC_AUTHORIZATION_FAILED" in scene.quarantined()[denied]
        assert running.harvester.status().problem is None
    assert scene.published() == {"a": ["1", "2"], "b": ["1"], "denied": ["2"]}


@pytest.mark.timeout(600)  # six harvesters, one after the other
def test_modes_and_shard_counts_may_change_between_runs(scene: Scene) -> None:
    repeats = 0
    with writing(scene) as load:
        for number, (mode, shards) in enumerate(
            [("at-least-once", 2), ("exactly-once", 4), ("exactly-once", 1), ("exactly-once", 3), ("at-least-once", 2)]
        ):
            name = f"run-{number}"
            with scene.cli("--shards", str(shards), name=name, delivery=mode) as running:
                running.wait_for_line("leads as")
                load.wait(200)
                assert running.stop() == 0, running.output
    with scene.cli("--until-empty", delivery="exactly-once") as running:
        running.wait(60)
    repeats = verify(scene, load)
    figure("repeats_mode_switches", repeats, "records")
    assert repeats == 0


def test_the_first_exactly_once_term_waits_for_what_a_killed_leader_had_sent(scene: Scene) -> None:
    """P24. Nothing fences an at-least-once leader; after a planned stop there is nothing to wait for."""
    load = _kill_at_least_once_leader(scene)
    with family(scene, "two", **QUICK, **ONCE) as two:
        two.wait_leads()
        assert any("P24" in line for line in two.running.stderr)
        verify(scene, load)
        two.stop()
    with family(scene, "three", **QUICK, **ONCE) as three:
        three.wait_leads()
        assert not any("P24" in line for line in three.running.stderr)
        three.stop()


@pytest.mark.parametrize("place", PLACES)
def test_at_least_once_after_a_killed_exactly_once_leader_repeats_nothing(scene: Scene, place: str) -> None:
    """Its lanes are fenced, and what they had committed is purged, before anything is marked."""
    load = _kill_exactly_once_leader(scene, place)
    with family(scene, "two", **QUICK) as two:
        two.wait_leads()
        assert verify(scene, load) == 0
        two.stop()


def test_lanes_that_another_harvester_added_are_fenced_too(scene: Scene) -> None:
    """P19: one with two shards leads again after one with four, and has to end the lanes that it did not know of."""
    with family(scene, "two", **QUICK, **ONCE) as two:
        two.wait_leads()
        file = scene.config_file("four", **QUICK, **ONCE)
        with RunningCli("start", "-f", str(file), "--shards", "4", env=scene.plan.env, session=True) as running:
            four = Family(scene, running)
            wait_members(scene, 2)
            two.freeze()
            four.wait_leads()
            two.thaw()
            with writing(scene) as load:
                load.wait(300)
                with scene.plan.blocked("shard.committed") as reached:
                    reached()
                    load.wait(200)
                    four.kill()
                load.wait(300)
            assert verify(scene, load) == 0
        two.stop()


def test_a_locked_row_does_not_let_the_fence_of_the_lanes_be_forgotten(scene: Scene) -> None:
    """The term row says how the term before delivered until what it left behind is settled."""
    load = _kill_exactly_once_leader(scene, "shard.committed")
    with scene.writer() as other:
        other.execute("SELECT FROM outbox FOR UPDATE")
        with family(scene, "two", **QUICK) as two:
            eventually(lambda: scene.term() >= 3, 60.0, "a second attempt to take over")
            other.rollback()
            two.wait_leads()
            assert verify(scene, load) == 0
            two.stop()


def test_the_wait_for_an_at_least_once_leader_is_not_forgotten(scene: Scene) -> None:
    """P24: the one that waited was killed."""
    load = _kill_at_least_once_leader(scene)
    with family(scene, "two", **QUICK, **ONCE) as two:
        eventually(lambda: scene.holder() == "two", 60.0, "the term of the second")
        two.kill()
    with family(scene, "three", **QUICK, **ONCE) as three:
        three.wait_leads()
        assert any("P24" in line for line in three.running.stderr)
        verify(scene, load)
        three.stop()


def test_no_record_goes_to_a_topic_of_the_harvesters_own(scene: Scene) -> None:
    """It could pass for a lane's progress, and delete what nobody has sent."""
    for mode in ("at-least-once", "exactly-once"):
        with scene.embedded(delivery=mode):
            for topic in (f"{scene.group}.progress", f"{scene.group}.neli"):
                (forged,) = scene.add(("key", "value"), topic=topic)
                eventually(lambda forged=forged: "harvester's own" in scene.quarantined().get(forged, ""))  # type: ignore[misc]


def test_a_transaction_that_began_ahead_of_its_records_does_not_stay_open(scene: Scene) -> None:
    """Readers of the progress topic would wait for it. Its one record, of earlier transactions, is aborted."""
    topic = f"{scene.group}.progress"

    def ends(isolation: str) -> int:
        reader = Consumer({"bootstrap.servers": scene.bootstrap, "group.id": "nobody", "isolation.level": isolation})
        with closing(reader):
            edges = [reader.get_watermark_offsets(TopicPartition(topic, lane), 10) for lane in lanes_of(0)]
        return sum(end for _, end in edges)

    with scene.embedded(shards=1, **ONCE) as running:
        running.wait_leading()
        opened = ends("read_uncommitted")
        scene.add(("a", "1"))
        scene.wait_left()
        # Two records and their marker, and of the next transaction, on the other lane, one and its marker.
        eventually(lambda: ends("read_uncommitted") == opened + 5, what="an aborted transaction")
        assert ends("read_committed") == opened + 5
        assert running.of(LeaderRefreshed) == []
