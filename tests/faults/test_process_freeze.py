"""SIGSTOP for longer than every timeout, then SIGCONT, under load (I2, I4, P6, P12, P15): a shard, the supervisor,
the whole leader, and who was about to lead. What a zombie does after its thaw is read from the records' signatures and
from an audit of the database: it publishes nothing more, and changes nothing but what Kafka had acknowledged to it.
"""

from __future__ import annotations

import pytest

from tests.support.audit import Audit
from tests.support.families import QUICK, family, full_wire, slice_of, wait_members, wait_sent
from tests.support.findings import ends, repeats_by_key, sent_by
from tests.support.harvesting import Scene, alive, causal, electors_of
from tests.support.longs import long
from tests.support.wait import eventually
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

MARKINGS = ("memory", "table")


@pytest.mark.parametrize("marking", MARKINGS)
def test_a_shard_that_thaws_finds_itself_replaced(scene: Scene, marking: str) -> None:
    """It is killed while it stands still, after 2 s of silence; the other slice of the keys flows all the while."""
    scene.plan.sign()
    with family(scene, "one", hooks=True, marking=marking, **QUICK) as one:
        one.wait_leads()
        with writing(scene) as load:
            load.wait(300)
            shard, other = one.shards
            one.freeze(shard)
            frozen_at = ends(scene.log())
            eventually(lambda: len(sent_by(scene.log(), [other], frozen_at)) > 300, what="records of the other shard")
            one.wait_replaced(shard)
            one.thaw(shard)
            load.wait(300)
        repeats = verify(scene, load)
        assert not alive(shard)
        by_key = repeats_by_key(scene.log())
        assert {slice_of(key) for key in by_key} <= {0}
        assert set(by_key.values()) <= {1}
        one.stop()
    figure(f"repeats_frozen_shard_{marking}", repeats, "records")


# By day, each marking and each process once.
@pytest.mark.parametrize(
    ("who", "marking"),
    [
        ("supervisor", "memory"),
        ("leader", "table"),
        pytest.param("supervisor", "table", marks=long),
        pytest.param("leader", "memory", marks=long),
    ],
)
def test_a_zombie_publishes_and_changes_nothing(scene: Scene, who: str, marking: str) -> None:
    scene.plan.sign()
    audit = Audit(scene)
    with family(scene, "one", hooks=True, marking=marking, **QUICK) as one:
        _, first_term = one.wait_leads()
        with family(scene, "two", hooks=True, marking=marking, **QUICK) as two:
            wait_members(scene, 2)
            zombie, shards = one.everyone(), one.shards
            with writing(scene) as load:
                load.wait(300)
                if who == "supervisor":
                    with full_wire(scene, load):  # so that its shards have acknowledgements to read, and a queue
                        one.freeze(one.pid)
                else:
                    with full_wire(scene, load):
                        wait_sent(scene, load)
                        one.freeze(*shards)
                    load.wait(100)  # these the supervisor still sends down the pipes
                    one.freeze()
                _, term = two.wait_leads()
                assert term > first_term
                taken_over, audited_before = ends(scene.log()), audit.last()
                load.wait(600)
                thawed = ends(scene.log())
                one.thaw(*shards)  # before the supervisor can tell them anything
                load.wait(100)
                one.thaw()
                one.running.wait_for_line("fenced: ")
                wait_members(scene, 2)
                load.wait(600)
            repeats = verify(scene, load)
            log = scene.log()
            assert sent_by(log, zombie, thawed) == []
            assert sent_by(log, zombie, taken_over) == []
            assert len(sent_by(log, two.everyone(), thawed)) >= 500
            once_more = max(repeats_by_key(log).values(), default=0)
            assert once_more <= 1 + one.deaths + two.deaths, f"{one.running.output}\n{two.running.output}"
            assert audit.updates("harvester one", audited_before) == 0
            acknowledged = {record.value for record in sent_by(log, zombie, {})}
            assert set(audit.deleted("harvester one", audited_before)) <= acknowledged
            assert scene.term() == two.terms[-1]  # higher than `term` only if a busy machine cost it its trust
            assert one.terms[-1] < term
            two.stop()
            one.stop()
    figure(f"repeats_frozen_{who}_{marking}", repeats, "records")


@pytest.mark.parametrize("who", ["supervisor", "supervisor and elector"])
def test_who_froze_in_a_take_over_leads_when_it_is_trusted_again(scene: Scene, who: str) -> None:
    """The term is taken and told to the shards, whose replies it finds when it thaws; another one leads by then."""
    once = {**QUICK, "delivery": "exactly-once"}
    with family(scene, "one", hooks=True, **once) as one:
        with scene.plan.blocked("lane.fenced") as reached:
            reached()
            one.freeze(one.pid, *(electors_of(one.pid) if "elector" in who else ()))
        assert scene.holder() == "one"
        with family(scene, "two", **once) as two:
            _, term = two.wait_leads()
            scene.add(("a", "1"))
            scene.wait_left()
            one.thaw()
            wait_members(scene, 2)
            scene.add(("a", "2"))
            scene.wait_left()
            two.stop()
        one.wait_leads()
        scene.add(("a", "3"))
        scene.wait_left()
        assert one.terms[0] > term
        assert scene.holder() == "one"
        one.stop()
    assert scene.published() == causal(("a",), 3)
