"""`harvester pause`, `scale` and the like on `harvester start`, under load and while leadership changes hands."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import harvester.harvester as harvester_module
from harvester import FakeGroup, LeaderAcquired
from harvester.control.client import Connection
from harvester.control.protocol import NoHarvester
from harvester.errors import HarvesterError
from harvester.status import State, Status
from tests.support.cli import RunningCli, run_cli
from tests.support.control import at, serving
from tests.support.harvesting import Scene, causal, log_lines, messages, shards_of, wait_leads
from tests.support.wait import eventually
from tests.support.writing import verify, writing

pytest_plugins = ["tests.support.scenes", "tests.support.sockets"]


@contextmanager
def started(scene: Scene, sockets: Path, name: str, *args: str) -> Iterator[RunningCli]:
    with scene.cli(*args, name=name, env=at(sockets), control={"socket": "auto"}) as running:
        eventually(lambda: answers(sockets, name), 60, f"an answer of {name}")
        yield running


def told(sockets: Path, *args: str) -> str:
    return run_cli(*args, env=at(sockets)).stdout.strip()


def status(sockets: Path, name: str) -> Status:
    with Connection(sockets / f"{name}.sock") as connection:
        return connection.status()


def answers(sockets: Path, name: str) -> bool:
    try:
        return status(sockets, name) is not None
    except NoHarvester:
        return False


def wait_quiet(sockets: Path, name: str) -> None:
    """Until what was on the wire when it was paused is settled."""
    eventually(lambda: status(sockets, name).in_flight == 0, 60, "an empty wire")


def test_paused_resumed_scaled_and_stopped_under_load(scene: Scene, sockets: Path) -> None:
    """Nothing is lost, repeated or out of order; nothing is sent during a pause."""
    with started(scene, sockets, "one") as running:
        wait_leads(running)
        with writing(scene) as load:
            load.wait(200)
            assert told(sockets, "pause").startswith("one: paused")
            wait_quiet(sockets, "one")
            now = status(sockets, "one")
            assert (now.state, now.queued) == (State.PAUSED, 0)
            assert now.paused_since_at is not None
            assert now.paused_since_at <= now.at
            term = scene.term()
            sent = len(scene.log())
            load.wait(200)
            assert told(sockets, "scale", "4", "--within", "30") == "one: 4 shards instead of 2"
            load.wait(200)
            assert len(scene.log()) == sent
            kept = scene.term() == term
            assert kept or "fenced: " in running.output  # it leads on, unless a busy machine has cost it its trust
            assert told(sockets, "resume").startswith("one: resumed")
            load.wait(200)
            assert told(sockets, "remark") == "one: marks again from the head of the outbox"
            load.wait(100)
            assert told(sockets, "scale", "1", "--within", "30") == "one: 1 shard instead of 4"
            load.wait(100)
            once = json.loads(told(sockets, "watch", "--once", "--json"))
            assert (once["name"], len(once["shards"]), once["paused_since_at"]) == ("one", 1, None)
            assert told(sockets, "pause").startswith("one: paused")
            assert told(sockets, "resume").startswith("one: resumed")
        assert verify(scene, load) == 0
        assert told(sockets, "stop") == "one: has stopped"
        assert running.wait() == 0
        assert "ended unexpectedly" not in running.output
        assert not list(sockets.iterdir())


def test_a_pause_holds_whoever_leads_and_one_process_alone(scene: Scene, sockets: Path) -> None:
    with started(scene, sockets, "one") as one:
        wait_leads(one)
        scene.add(("a", "1"))
        scene.wait_left()
        with started(scene, sockets, "two") as two:
            eventually(lambda: status(sockets, "two").state is State.STANDBY, 60, "a standby")
            several = run_cli("pause", env=at(sockets), check=False)
            assert several.returncode == 2
            assert told(sockets, "pause", "--name", "two").endswith(
                "it stands by, and would publish nothing if it took over"
            )
            refused = run_cli("remark", "--name", "two", env=at(sockets), check=False)
            assert (refused.returncode, "only a leader marks" in refused.stderr) == (1, True)
            assert status(sockets, "two").paused_since_at is not None
            assert told(sockets, "pause", "--name", "one").startswith("one: paused")
            second = scene.add(("a", "2"))
            assert told(sockets, "stop", "--name", "one") == "one: has stopped"  # drained and handed over in a pause
            assert one.wait() == 0
            wait_leads(two)
            eventually(lambda: status(sockets, "two").state is State.PAUSED, 60, "a leader that is paused")
            third = scene.add(("a", "3"))
            assert scene.left() == [*second, *third]
            assert told(sockets, "resume") == "two: resumed; it is leading"
            scene.wait_left()
            # It is a pause of the process: the next one begins without it.
            assert told(sockets, "pause").startswith("two: paused")
            assert two.stop() == 0
        with started(scene, sockets, "two") as again:
            wait_leads(again)
            assert status(sockets, "two").paused_since_at is None
            scene.add(("a", "4"))
            scene.wait_left()
            assert again.stop() == 0
    assert scene.published() == causal(("a",), 4)


def test_the_level_changes_for_supervisor_and_shards(scene: Scene, sockets: Path) -> None:
    with started(scene, sockets, "one", "--log-level", "error") as running:
        eventually(lambda: status(sockets, "one").state is State.LEADING, 60, "a leader")
        assert {line["level"] for line in log_lines(running)} <= {"error"}
        assert told(sockets, "loglevel", "debug") == "one: the log level is debug now"
        told(sockets, "scale", "3", "--within", "30")
        running.wait_for_line('"shard": 2.*ready')
        told(sockets, "loglevel", "error")
        said = len(log_lines(running))
        told(sockets, "remark")
        os.kill(shards_of(running.pid)[0], signal.SIGKILL)
        running.wait_for_line("ended unexpectedly")
        assert "marks again as" not in " ".join(messages(running)[said:])
        assert running.stop() == 0


def test_a_socket_that_another_one_has_costs_a_warning(scene: Scene, sockets: Path) -> None:
    with serving(sockets / "one.sock"), started(scene, sockets, "one") as running:
        wait_leads(running)
        running.wait_for_line("control: another harvester listens on the control socket")
        scene.add(("a", "1"))
        scene.wait_left()
        assert running.stop() == 0
        assert (sockets / "one.sock").exists()
        assert sum("control: another" in message for message in messages(running)) == 1


def test_what_a_killed_one_left_is_replaced(scene: Scene, sockets: Path) -> None:
    with started(scene, sockets, "one") as running:
        running.process.kill()
        running.wait()
    assert (sockets / "one.sock").exists()
    assert not answers(sockets, "one")
    with started(scene, sockets, "one") as running:
        assert status(sockets, "one").name == "one"
        assert running.stop() == 0
    assert not list(sockets.iterdir())


# -- embedded


def test_the_mark_loop_is_live_during_a_pause(scene: Scene) -> None:
    """P14."""
    with scene.embedded() as running:
        running.wait_leading()
        harvester = running.harvester
        assert harvester.pause()
        assert not harvester.pause()
        parts = harvester._life.parts
        assert parts is not None
        for _ in range(2):
            turned_at = parts.marker.turned_at
            eventually(lambda before=turned_at: parts.marker.turned_at > before, 60, "a turn of the mark loop")  # type: ignore[misc]
            eventually(parts.supervisor.is_working, 60, "a turn of the supervisor")  # late on a starved machine
        scene.add(("a", "1"))
        assert harvester.resume()
        assert not harvester.resume()
        scene.wait_left()
    assert scene.published() == causal(("a",), 1)


def test_a_pause_that_comes_late_is_one_all_the_same(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        harvester = running.harvester
        parts = harvester._life.parts
        assert parts is not None

        def is_paused() -> bool:
            return harvester.status().paused_since_at is not None

        for ask, paused in ((harvester.pause, True), (harvester.resume, False)):
            busy = threading.Event()

            def hold_up(_now: float, busy: threading.Event = busy) -> None:
                busy.wait(60)

            parts.supervisor.post(hold_up)
            with monkeypatch.context() as impatient:
                impatient.setattr(harvester_module, "_ANSWER_WITHIN_S", 0.01)
                with pytest.raises(HarvesterError, match="does not answer yet"):
                    ask()
            assert is_paused() is not paused
            busy.set()
            eventually(is_paused if paused else lambda: not is_paused(), 60, "what was asked")
        assert harvester.pause()
        scene.add(("a", "1"))
        assert harvester.resume()
        scene.wait_left()


def test_until_empty_waits_for_a_pause_to_end(scene: Scene) -> None:
    group = FakeGroup()
    with scene.embedded(group=group, until_empty=True) as running:
        harvester = running.harvester
        eventually(lambda: harvester.state is State.STANDBY, 60, "a standby")
        harvester.pause()
        group.elect()
        running.wait_for(LeaderAcquired)
        eventually(lambda: harvester.state is State.PAUSED, 60, "a leader that is paused")
        (row,) = scene.add(("a", "1"))
        assert not harvester.wait(0)
        assert scene.left() == [row]
        harvester.resume()
        assert harvester.wait(60)
    assert scene.published() == causal(("a",), 1)


def test_a_paused_leader_hands_over(scene: Scene) -> None:
    """The group takes leadership away, and gives it back."""
    group = FakeGroup(elected=True)
    with scene.embedded(group=group) as running:
        running.wait_leading()
        running.harvester.pause()
        group.revoke()
        eventually(lambda: running.harvester.state is State.STANDBY, 60, "a standby")
        assert running.leadership()[-1] == "LeaderRevoked"
        group.elect()
        running.wait_for(LeaderAcquired, 2)
        eventually(lambda: running.harvester.state is State.PAUSED, 60, "a leader that is paused")
        (row,) = scene.add(("a", "1"))
        assert scene.left() == [row]
        running.harvester.resume()
        scene.wait_left()
