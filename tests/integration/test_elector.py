"""The elector: it outlives a supervisor that is killed, and leaves the group when nothing can be published any more.

Sessions are long here: what leads before one has run out was let in by a member that has left.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from harvester import State
from tests.support.harvesting import Scene, alive, causal, electors_of, shards_of, wait_leads
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

SESSION_S = 45
LONG: dict[str, Any] = {"heartbeat_timeout": "2s", "session_timeout": f"{SESSION_S}s"}
SHORT: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "6s"}


def test_a_supervisor_that_is_killed_is_succeeded_before_its_session_ends(scene: Scene) -> None:
    with scene.cli(name="one", **LONG) as one:
        wait_leads(one)
        with scene.member(name="two", **LONG) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            scene.add(("a", "1"))
            scene.wait_left()
            began = time.monotonic()
            os.kill(one.pid, signal.SIGKILL)
            two.wait_leading()
            assert time.monotonic() - began < SESSION_S / 2
            scene.add(("a", "2"))
            scene.wait_left()
    assert scene.published() == causal(("a",), 2)


def test_nobody_succeeds_while_a_shard_may_still_publish(scene: Scene) -> None:
    """A shard that is stopped keeps its lock: the elector ends without leaving, and the group waits for the session."""
    with scene.cli(name="one", **SHORT) as one:
        wait_leads(one)
        (shard, *_), (elector,) = shards_of(one.pid), electors_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            os.kill(shard, signal.SIGSTOP)
            os.kill(one.pid, signal.SIGKILL)
            eventually(lambda: not alive(elector), what="the elector ends")
            assert two.harvester.state is State.STANDBY
            os.kill(shard, signal.SIGKILL)
            two.wait_leading()


def test_an_elector_that_dies_costs_leadership_and_is_replaced(scene: Scene) -> None:
    with scene.cli(**SHORT) as running:
        _, term = wait_leads(running)
        (elector,) = electors_of(running.pid)
        os.kill(elector, signal.SIGKILL)
        running.wait_for_line(r"fenced: the process that holds the place in the group has ended \(exit code -9\)")
        scene.add(("a", "1"))
        running.wait_for_line(rf"leads as \S+ under term {term + 1}\b")
        scene.wait_left()
        assert electors_of(running.pid) not in ([], [elector])
        assert running.stop() == 0
    assert scene.published() == causal(("a",), 1)


def test_a_supervisor_that_stands_still_loses_its_place_and_finds_another(scene: Scene) -> None:
    with scene.cli(name="one", **SHORT) as one:
        _, term = wait_leads(one)
        (elector,) = electors_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            os.kill(one.pid, signal.SIGSTOP)
            assert two.wait_leading().term > term
            assert not alive(elector)
            scene.add(("a", "1"))
            scene.wait_left()
            os.kill(one.pid, signal.SIGCONT)
            one.wait_for_line("fenced: ")
            eventually(lambda: electors_of(one.pid) not in ([], [elector]), what="another elector")
            scene.add(("a", "2"))
            scene.wait_left()
            assert two.leadership() == ["LeaderAcquired"]
            assert one.stop() == 0
    assert scene.published() == causal(("a",), 2)
