"""What ends leadership although the group would keep it: a drain at its bound (P13), a mark loop that stands still and
a database out of reach (P14). And shards that are killed over and over while others work (P16)."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Mapping, Sequence

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester import FakeGroup, LeaderAcquired, LeaderFenced
from harvester.relay import marker
from harvester.status import ShardStatus
from tests.support.families import slice_of
from tests.support.harvesting import Scene, alive, causal
from tests.support.hooks import Plan
from tests.support.proxy import Proxy
from tests.support.wait import eventually
from tests.support.writing import verify, writing

pytest_plugins = ["tests.support.scenes"]

FIRST_KEYS = [key for key in map(str, range(20)) if slice_of(key) == 0][:4]  # of the first shard, as the next
KILLS = int(os.environ.get("HARVESTER_TEST_KILLS", "4"))  # hundreds by hand


class Reluctant(FakeGroup):
    """A group that notes when the harvester wants to step down, and keeps it."""

    def __init__(self) -> None:
        super().__init__(elected=True)
        self.asked: list[str] = []

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        self.asked.append(reason)


def test_a_drain_ends_at_its_bound_with_the_death_of_what_is_not_done(scene: Scene, plan: Plan) -> None:
    group = FakeGroup(elected=True)
    with scene.embedded(group=group, drain_interval="1s", heartbeat_timeout="1s") as running:
        running.wait_leading()
        stuck, idle = running.pids()
        with plan.blocked("shard.reports") as reached:
            scene.add(*((key, "1") for key in FIRST_KEYS))
            reached()
            scene.add(*((key, "2") for key in FIRST_KEYS))
            group.revoke(20.0)
            assert not alive(stuck)
            assert alive(idle)
            assert running.harvester.in_flight == 0
        eventually(lambda: len(running.pids()) == 2, what="a new shard")
        assert group.elect()
        running.wait_ready()
        scene.wait_left()
    published = {key: list(dict.fromkeys(values)) for key, values in scene.published().items()}
    assert published == causal(FIRST_KEYS, 2)


def test_a_mark_loop_that_stands_still_ends_leadership(
    scene: Scene, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place among the members, its heartbeats and its trust are all in order."""
    limits = {"heartbeat_timeout": "3s", "session_timeout": "15s"}
    monkeypatch.setattr(marker, "_STALL_MARGIN_S", 2.0 - 18.0)  # 2 s; a statement may take six heartbeats
    with scene.member(**limits) as running:
        first = running.wait_leading()
        with plan.blocked("marker.mark") as reached:
            scene.add(("key", "1"))
            reached()
            fenced = running.wait_for(LeaderFenced)
        assert "the mark loop has stalled" in fenced.reason
        again = running.wait_for(LeaderAcquired, 2)
        assert again.term > first.term
        scene.wait_left()


def test_a_mark_loop_that_rests_between_marks_is_alive(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it rests when there is nothing to do."""
    monkeypatch.setattr(marker, "_STALL_MARGIN_S", 2.0 - 12.0)  # as above
    with scene.member(mark_backoff="5s", mark_backoff_max="5s") as running:
        running.wait_leading()
        for number in range(3):
            scene.add(("key", str(number)))
            scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]


def test_a_database_out_of_reach_is_handed_over_once_and_then_after_twice_as_long(scene: Scene) -> None:
    parts = conninfo_to_dict(scene.dsn)
    group = Reluctant()
    with Proxy(f"{parts['host']}:{parts['port']}") as link:
        link.open()
        through = make_conninfo(scene.dsn, host="127.0.0.1", port=link.port)
        with scene.embedded(group=group, data_source=through, heartbeat_timeout="500ms") as running:
            running.wait_leading()
            link.cut()
            eventually(lambda: len(group.asked) == 2, what="two attempts to hand over")
            link.open()
            scene.add(("key", "1"))
            scene.wait_left()
    assert all("the database has been out of reach for" in reason for reason in group.asked)
    first_s, second_s = (int(re.findall(r"\d+", reason)[0]) for reason in group.asked)
    assert first_s >= 1
    assert second_s - first_s >= 2


def test_shards_that_are_killed_over_and_over_do_not_hold_up_the_other(scene: Scene) -> None:
    """At any moment, under load: what the victim was about to do with what all share is left half done."""
    chance = random.Random(7)
    with scene.embedded(restart_budget=10_000, restart_window="1s") as running:
        running.wait_leading()

        def shards() -> Sequence[ShardStatus]:
            return running.harvester.status().shards

        with writing(scene) as load:
            load.wait(100)
            for number in range(KILLS):
                victim = number % 2
                pid = shards()[victim].pid
                assert pid is not None
                before = {shard.index: shard.delivered for shard in shards() if shard.pid != pid}
                os.kill(pid, signal.SIGSTOP)  # it stands wherever it is
                eventually(lambda: _all_go_on(shards(), before), what="deliveries of the other")  # noqa: B023
                os.kill(pid, signal.SIGKILL)
                eventually(lambda: shards()[victim].pid not in (None, pid), what="another in its place")  # noqa: B023
                running.wait_ready()
                load.wait(chance.randint(1, 40))
        verify(scene, load)


def _all_go_on(shards: Sequence[ShardStatus], before: Mapping[int, int]) -> bool:
    return all(shards[index].delivered > delivered for index, delivered in before.items())
