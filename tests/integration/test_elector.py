"""The elector: it outlives a supervisor that is killed, and leaves the group when nothing can be published any more.

Where sessions are long, what leads before one has run out was let in by a member that has left.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harvester import State
from tests.support.families import family, full_wire, wait_gone
from tests.support.harvesting import Scene, alive, causal, children, electors_of, messages, shards_of, wait_leads
from tests.support.wait import eventually
from tests.support.writing import figure, verify, writing

pytest_plugins = ["tests.support.scenes"]

SESSION_S = 45
LONG: dict[str, Any] = {"heartbeat_timeout": "2s", "session_timeout": f"{SESSION_S}s", "drain_interval": "3s"}
SHORT: dict[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "6s", "drain_interval": "3s"}  # D is 2.5 s


def elector_of(pid: int) -> int:
    (elector,) = electors_of(pid)
    return elector


# -- the supervisor dies


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
            took_s = time.monotonic() - began
            scene.add(("a", "2"))
            scene.wait_left()
    figure("succeeded_after_kill_of_supervisor", took_s, "s")
    assert took_s < SESSION_S / 2
    assert scene.published() == causal(("a",), 2)


def test_what_a_dead_supervisor_s_shards_have_on_the_wire_is_not_repeated(scene: Scene) -> None:
    with family(scene, "one", hooks=True, **LONG) as one:
        one.wait_leads()
        with family(scene, "two", **LONG) as two:
            two.running.wait_for_line("stands by")
            with writing(scene) as load:
                load.wait(300)
                everyone = one.everyone()
                with full_wire(scene, load):
                    began = time.monotonic()
                    one.kill(one.pid)
                two.wait_leads()
                took_s = time.monotonic() - began
                wait_gone(everyone)
                load.wait(300)
            assert verify(scene, load) == 0
            two.stop()
    figure("succeeded_after_kill_of_supervisor_with_a_full_wire", took_s, "s")
    assert took_s < SESSION_S / 2


def test_nobody_succeeds_while_a_shard_may_still_publish(scene: Scene) -> None:
    """A shard that is stopped keeps its lock. When it goes on, it ends, and the group is left."""
    given = {**LONG, "drain_interval": "30s"}  # D is 29.5 s
    with scene.cli(name="one", **given) as one:
        wait_leads(one)
        (shard, *_), elector = shards_of(one.pid), elector_of(one.pid)
        with scene.member(name="two", **given) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            os.kill(shard, signal.SIGSTOP)
            began = time.monotonic()
            os.kill(one.pid, signal.SIGKILL)
            eventually(lambda: time.monotonic() > began + 5, what="time for a group to be left")
            assert alive(elector)
            assert two.harvester.state is State.STANDBY
            os.kill(shard, signal.SIGCONT)
            two.wait_leading()
            assert time.monotonic() - began < SESSION_S / 2
            wait_gone([shard, elector])


def test_a_shard_that_hangs_holds_nobody_up_for_longer_than_a_session(scene: Scene) -> None:
    """What it may still have on the wire is gone by then, and it publishes nothing when it goes on."""
    with scene.cli(name="one", env=scene.plan.env, **SHORT) as one:
        wait_leads(one)
        shards = shards_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            with scene.plan.blocked("shard.purged") as reached:
                with scene.db.transaction():
                    scene.add(*((key, str(number)) for number in range(1, 6) for key in "abcdef"))
                reached()
                # Nothing is on its way then: a shard that stops between its check and its send sends when it goes on.
                eventually(lambda: len(scene.log()) == 6, what="the first record of each key")
                for shard in shards:
                    os.kill(shard, signal.SIGSTOP)
            began = time.monotonic()
            os.kill(one.pid, signal.SIGKILL)
            two.wait_leading()
            took_s = time.monotonic() - began
            scene.wait_left()
            before = len(scene.log())
            for shard in shards:
                os.kill(shard, signal.SIGCONT)
            wait_gone(shards)
            assert len(scene.log()) == before
    figure("succeeded_after_kill_with_stopped_shards", took_s, "s")
    assert 3.0 < took_s < 6 + 6  # D + 1 s at least; generous, for a machine that is busy with other tests
    assert {key: list(dict.fromkeys(values)) for key, values in scene.published().items()} == causal("abcdef", 5)


def test_shards_that_are_killed_too_are_not_succeeded_before_their_wire_is_gone(scene: Scene) -> None:
    """P15: bytes of a dead process may arrive. None of them owes nothing, so D + 1 s pass."""
    with scene.cli(name="one", **SHORT) as one:
        wait_leads(one)
        shards, elector = shards_of(one.pid), elector_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            began = time.monotonic()
            for pid in (one.pid, *shards):
                os.kill(pid, signal.SIGKILL)
            two.wait_leading()
            assert time.monotonic() - began > 3.0
            wait_gone([elector])


def test_a_standby_that_is_killed_leaves_the_group_at_once(scene: Scene) -> None:
    with scene.member(name="one", **LONG) as one:
        one.wait_leading()
        with scene.cli(name="two", **LONG) as two:
            two.wait_for_line("stands by")
            elector = elector_of(two.pid)
            os.kill(two.pid, signal.SIGKILL)
            wait_gone([elector])
        scene.add(("a", "1"))
        scene.wait_left()
        assert one.leadership() == ["LeaderAcquired"]


# -- the elector dies, or stands still


def test_an_elector_that_dies_costs_leadership_and_is_replaced(scene: Scene) -> None:
    with scene.cli(**SHORT) as running:
        _, term = wait_leads(running)
        elector = elector_of(running.pid)
        os.kill(elector, signal.SIGKILL)
        running.wait_for_line("fenced: the process that holds the place in the group has ended")
        running.wait_for_line(r"has ended \(exit code -9\)")
        scene.add(("a", "1"))
        running.wait_for_line(rf"leads as \S+ under term {term + 1}\b")
        scene.wait_left()
        assert elector_of(running.pid) != elector
        assert running.stop() == 0
    assert scene.published() == causal(("a",), 1)


def test_an_elector_that_stands_still_costs_leadership_and_is_replaced(scene: Scene) -> None:
    with scene.cli(name="one", **SHORT) as one:
        _, term = wait_leads(one)
        elector = elector_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            os.kill(elector, signal.SIGSTOP)
            one.wait_for_line("fenced: ", timeout_s=5)
            assert two.wait_leading().term > term
            eventually(lambda: electors_of(one.pid) not in ([], [elector]), what="another elector")
            assert not alive(elector)
            one.wait_for_line("joined group .*, stands by", timeout_s=60)
            scene.add(("a", "1"))
            scene.wait_left()
            # A busy machine may fence the successor, which then leads again.
            assert scene.holder() == "two"
            assert sum("leads as " in line for line in one.output.splitlines()) == 1
            assert one.stop() == 0
    assert scene.published() == causal(("a",), 1)


# -- the supervisor stands still


def test_a_supervisor_that_stands_still_loses_its_place_and_finds_another(scene: Scene) -> None:
    with scene.cli(name="one", **SHORT) as one:
        _, term = wait_leads(one)
        elector = elector_of(one.pid)
        with scene.member(name="two", **SHORT) as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            os.kill(one.pid, signal.SIGSTOP)
            assert two.wait_leading().term > term
            eventually(lambda: not alive(elector), what="its end")
            scene.add(("a", "1"))
            scene.wait_left()
            os.kill(one.pid, signal.SIGCONT)
            one.wait_for_line("fenced: ")
            eventually(lambda: electors_of(one.pid) not in ([], [elector]), what="another elector")
            scene.add(("a", "2"))
            scene.wait_left()
            # A busy machine may fence the successor, which then leads again.
            assert scene.holder() == "two"
            assert sum("leads as " in line for line in one.output.splitlines()) == 1
            assert one.stop() == 0
    assert scene.published() == causal(("a",), 2)


def test_a_supervisor_that_stands_still_for_longer_than_its_trust_leads_under_a_new_term(scene: Scene) -> None:
    """Its place outlasts that; trust that has ended does not come back."""
    with scene.cli(**LONG) as running:
        _, term = wait_leads(running)
        elector = elector_of(running.pid)
        os.kill(running.pid, signal.SIGSTOP)
        began = time.monotonic()
        eventually(lambda: time.monotonic() > began + 4, what="the end of trust")
        os.kill(running.pid, signal.SIGCONT)
        running.wait_for_line("fenced: ")
        running.wait_for_line(rf"leads as \S+ under term {term + 1}\b")
        assert elector_of(running.pid) == elector
        assert running.stop() == 0


# -- stops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_all_processes_stops_in_good_order_and_at_once(scene: Scene, number: signal.Signals) -> None:
    """As Ctrl-C does, and systemd."""
    with family(scene, "one", **LONG) as one:
        one.wait_leads()
        everyone = one.everyone()
        assert len(everyone) == 5  # with the fork server, the elector and two shards
        scene.add(("a", "1"))
        scene.wait_left()
        began = time.monotonic()
        os.killpg(one.pid, number)
        assert one.running.wait() == 0
        assert time.monotonic() - began < 15  # a rebalance may take more than a session
        wait_gone(everyone)
        assert not [text for text in messages(one.running) if "ended unexpectedly" in text]
        with scene.member(name="two", **LONG) as two:
            two.wait_leading()
            assert time.monotonic() - began < SESSION_S


def test_nothing_is_left_of_a_member_that_has_stopped(scene: Scene) -> None:
    """No process, thread or descriptor; compared from the second run on, when what is made once is there."""

    def run() -> None:
        with scene.member() as running:
            running.wait_leading()

    def held() -> tuple[list[str], list[int], int]:
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        return threads, children(os.getpid()), len(list(Path("/proc/self/fd").iterdir()))

    run()
    first = held()
    run()
    run()
    eventually(lambda: held() == first, 10, f"threads, children and descriptors as before {first}; now {held()}")
