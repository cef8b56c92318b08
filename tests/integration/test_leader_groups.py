"""An outbox belongs to one leader group of one Kafka cluster (P37): others are refused; it moves only on purpose."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest

from harvester import Harvester, HarvesterError, State, wiring
from harvester.doctor import CheckLevel, examine
from harvester.errors import ExitCode, ForeignLeader, TermContested
from harvester.neli.topic import ask_cluster_id
from harvester.outbox.leader_session import MarkSession, Owner
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_loan import Borrower, Patience
from tests.support.cli import run_cli
from tests.support.harvesting import Scene, causal, family_of, wait_leads
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]

OUTBOX = OutboxTable.parse("outbox")


def test_a_harvester_of_another_group_is_refused_and_disturbs_nothing(scene: Scene) -> None:
    with scene.member(name="ours") as leader:
        leader.wait_leading()
        with scene.cli(name="theirs", leader_group_id=f"{scene.group}-other") as intruder:
            for number in range(1, 301):
                scene.add(("a", str(number)), ("b", str(number)))
                time.sleep(0.01)
            scene.wait_left()
            assert intruder.wait() == 76
            (line,) = [line for line in intruder.stderr if line.startswith("harvester: ")]
            (hint,) = [line for line in intruder.stderr if line.startswith("hint: ")]
            assert f"'{scene.group}'" in line
            assert f"'{scene.group}-other'" in line
            assert "harvester move" in hint
            assert "Traceback" not in intruder.output
        assert leader.leadership() == ["LeaderAcquired"]
        assert scene.term() == 1
    assert scene.published() == causal(("a", "b"), 300)


def test_a_harvester_of_another_cluster_is_refused_before_it_takes_the_term(scene: Scene) -> None:
    scene.db.execute("UPDATE outbox_term SET leader_group = %s, kafka_cluster = 'another'", (scene.group,))
    scene.add(("a", "1"))
    error = outcome(Harvester(scene.config()))
    assert isinstance(error, ForeignLeader)
    assert error.exit_code is ExitCode.LEADERSHIP
    assert "'another'" not in error.message
    assert "Kafka cluster another" in error.message
    assert owner(scene)[1] == "another"
    assert (scene.term(), len(scene.left())) == (0, 1)


def test_the_first_leader_makes_the_outbox_its_groups(scene: Scene) -> None:
    assert owner(scene) == (None, None)
    with scene.member() as leader:
        leader.wait_leading()
        group, cluster = owner(scene)
    assert group == scene.group
    assert cluster == ask_cluster_id(scene.config().common_options())
    assert cluster


def test_of_two_groups_that_read_the_same_row_one_takes_the_term(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    first, second = sessions(), sessions()
    assert first.take_term(0, 0, uuid.uuid4(), "first", owner=Owner("one", "cluster")) == 1
    for other in (Owner("two", "cluster"), Owner("one", "another"), Owner("two", None)):
        assert second.take_term(1, 0, uuid.uuid4(), "second", owner=other) is None
    assert second.take_term(1, 0, uuid.uuid4(), "second", owner=Owner("one", None)) == 2
    assert owner(scene) == ("one", "cluster")


def test_a_take_over_that_comes_too_late_ends_no_session_of_the_new_leader(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    first, late, holder = sessions(), sessions(), uuid.uuid4()
    assert first.take_term(0, 0, holder, "first") == 1
    assert late.take_term(0, 0, uuid.uuid4(), "late") is None
    first.release(1, holder)


# -- moves


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_an_outbox_moves_when_its_harvesters_are_stopped(scene: Scene, delivery: str) -> None:
    new_group = f"{scene.group}-new"
    moving = ("move", "-f", str(scene.config_file("moving", leader_group_id=new_group, delivery=delivery)))
    with scene.member(name="old", delivery=delivery) as leader:
        leader.wait_leading()
        scene.add(("a", "1"))
        scene.wait_left()
        refused = run_cli(*moving, check=False)
        assert refused.returncode == 76
        assert "'old'" in refused.stderr
        assert f"'{scene.group}'" in refused.stderr
        assert "hint: stop its harvesters" in refused.stderr
        assert leader.leadership() == ["LeaderAcquired"]
    assert f"belongs to leader group '{new_group}'" in run_cli(*moving).stdout
    assert "nothing to do" in run_cli(*moving).stdout
    assert isinstance(outcome(Harvester(scene.config())), ForeignLeader)
    with scene.member(leader_group_id=new_group, delivery=delivery) as leader:
        leader.wait_leading()
        assert "expires" not in (leader.harvester.status().problem or "")
        assert scene.term() == 2
        scene.add(("a", "2"))
        scene.wait_left()
    assert scene.published() == causal(("a",), 2)


def test_after_a_leader_that_was_killed_the_first_term_of_the_new_group_waits(scene: Scene) -> None:
    given = {"leader_group_id": f"{scene.group}-new", "session_timeout": "6s", "heartbeat_timeout": "1s"}
    moving = ("move", "-f", str(scene.config_file("moving", **given)))
    expiry_s = wiring.expiry_s(scene.config(**given))
    with scene.cli(name="old") as old:
        wait_leads(old)
        for pid in family_of(old.process.pid):
            os.kill(pid, signal.SIGKILL)
    assert run_cli(*moving, check=False).returncode == 76
    assert f"waits {expiry_s:.0f} s" in run_cli(*moving, "--unreleased").stdout
    scene.add(("a", "1"))
    with scene.member(name="dying", **given) as dying:  # one that ends in its wait leaves the wait to the next
        eventually(lambda: "may still arrive" in (dying.harvester.status().problem or ""), what="it waits")
    with scene.member(name="new", **given) as leader:
        eventually(lambda: "may still arrive" in (leader.harvester.status().problem or ""), what="it waits")
        began = time.monotonic()
        leader.wait_leading()
        assert time.monotonic() - began > expiry_s - 1.0
        assert scene.db.execute("SELECT holder_kind FROM outbox_term").fetchone() == ("harvester",)
        scene.wait_left()
    assert scene.published() == causal(("a",), 1)


def test_a_term_that_changes_meanwhile_is_not_moved(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    old, mover, holder, new = sessions(), sessions(), uuid.uuid4(), Owner("new", "cluster")
    read = mover.read_term()
    assert old.take_term(0, 0, holder, "old", owner=Owner("old", "cluster")) == 1
    assert not mover.move(read, new)
    held = mover.read_term()
    old.release(1, holder)
    assert not mover.move(held, new)
    assert mover.move(mover.read_term(), new)
    assert old.take_term(1, 0, holder, "old", owner=Owner("old", "cluster")) is None  # it had read the row before
    row = mover.read_term()
    assert (row.owner, row.kind, row.delivery) == (new, "harvester", "at-least-once")


def test_a_drain_of_another_group_is_refused(scene: Scene) -> None:
    with scene.embedded() as leader:
        leader.wait_leading()
        patience = Patience(release_s=60.0, expiry_s=0.0)
        borrower = Borrower(
            scene.dsn, OUTBOX, "drain", timedelta(seconds=60), patience, lambda *_: None, owner=Owner("other", None)
        )
        with borrower, pytest.raises(ForeignLeader):
            borrower.take(lambda _text: None, lambda: False)
        assert leader.leadership() == ["LeaderAcquired"]
        assert scene.db.execute("SELECT wanted_by FROM outbox_term").fetchone() == (None,)


# -- one group, two leaders


def test_of_two_that_one_group_trusts_side_by_side_one_gives_up(scene: Scene) -> None:
    """Their group is no group: each of them is elected, and trusted for ever."""
    with scene.embedded(name="one") as one:
        one.wait_leading()
        with scene.embedded(name="two") as two:
            for number in range(1, 101):
                scene.add(("a", str(number)))
            both = (one.harvester, two.harvester)
            ended = eventually(lambda: next((each for each in both if each.state is State.FAILED), None), what="an end")
            assert ended is not None
            with pytest.raises(TermContested) as raised:
                ended.wait(10.0)
            assert scene.term() < 12
            scene.wait_left()
        assert raised.value.exit_code is ExitCode.LEADERSHIP
        assert raised.value.holder in {"one", "two"}
        assert f"'{scene.group}'" in raised.value.message


# -- what people see


def test_status_and_doctor_name_the_group_that_an_outbox_belongs_to(scene: Scene) -> None:
    config = str(scene.config_file())
    with scene.member() as leader:
        leader.wait_leading()
    assert f"leader group '{scene.group}' in Kafka cluster" in run_cli("status", "-f", config).stdout
    told = json.loads(run_cli("status", "-f", config, "--json").stdout)
    assert (told["leader_group"], told["kafka_cluster"]) == owner(scene)
    other = scene.config(leader_group_id="other")
    shown = run_cli("status", "-f", str(scene.config_file("other", leader_group_id="other"))).stdout
    assert "'other', whose harvesters are refused" in " ".join(shown.split())
    (found,) = [finding for finding in examine(scene.config()).findings if finding.check == "outbox.group"]
    assert found.level is CheckLevel.OK
    (found,) = [finding for finding in examine(other).findings if finding.check == "outbox.group"]
    assert found.level is CheckLevel.PROBLEM
    assert "harvester move" in (found.advice or "")


def owner(scene: Scene) -> tuple[str | None, str | None]:
    row = scene.db.execute("SELECT leader_group, kafka_cluster FROM outbox_term").fetchone()
    assert row is not None
    return row[0], row[1]


def outcome(harvester: Harvester) -> BaseException:
    """What ends it."""
    harvester.start()
    try:
        with pytest.raises(HarvesterError) as raised:
            assert harvester.wait(90) is None, "it did not end"
        return raised.value
    finally:
        harvester.stop(force=True)
