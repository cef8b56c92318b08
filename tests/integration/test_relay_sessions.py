"""Database sessions that end under the relay, and servers that are not there, go away and come back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester import FakeGroup, LeaderAcquired, LeaderFenced, State
from tests.support.harvesting import Scene, causal, messages, wait_leads
from tests.support.hooks import Fault, Plan
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

KEYS = ("a", "b", "c")


@pytest.fixture
def postgres(scene: Scene) -> Iterator[Proxy]:
    """A proxy in front of PostgreSQL, closed at first."""
    parts = conninfo_to_dict(scene.dsn)
    with Proxy(f"{parts.get('host') or '127.0.0.1'}:{parts.get('port') or 5432}") as proxy:
        yield proxy


@pytest.fixture
def kafka(scene: Scene) -> Iterator[Proxy]:
    """A proxy in front of Kafka, closed at first."""
    with Proxy(scene.bootstrap, kafka=True) as proxy:
        yield proxy


def through(scene: Scene, proxy: Proxy) -> str:
    return make_conninfo(scene.dsn, host="127.0.0.1", port=proxy.port)


def terminate(scene: Scene) -> None:
    """End every session of the harvester in this database."""
    ended = scene.db.execute(
        """SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name LIKE 'harvester%'"""
    ).fetchone()
    assert ended is not None
    assert ended[0] > 0


def fill(scene: Scene, first: int, last: int) -> None:
    for number in range(first, last + 1):
        scene.add(*((key, str(number)) for key in KEYS))


def test_sessions_that_are_terminated_while_idle_are_opened_again(scene: Scene) -> None:
    with scene.embedded() as running:
        running.wait_leading()
        for first in (1, 6, 11):
            fill(scene, first, first + 4)
            scene.wait_left()
            terminate(scene)
        fill(scene, 16, 20)
        scene.wait_left()
        eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
        assert not running.of(LeaderFenced)
    assert scene.published() == causal(KEYS, 20)


def test_the_session_of_a_leader_with_nothing_to_mark_may_end(scene: Scene, plan: Plan) -> None:
    """All room is taken by a parked record, so no mark is under way when the session ends."""
    plan.add(Fault(error="_MSG_TIMED_OUT", key="a", times=10_000))
    with scene.embedded(max_in_flight_records=1, shards=1) as running:
        running.wait_leading()
        scene.add(("a", "1"))
        eventually(plan.struck, what="the parked record")
        scene.add(("a", "2"))
        terminate(scene)
        eventually(lambda: plan.struck() > 3, what="further retries")
        plan.heal()
        scene.wait_left()
    assert scene.published() == {"a": ["1", "2"]}


def test_the_session_of_a_former_leader_may_end_while_it_stands_by(scene: Scene) -> None:
    group = FakeGroup()
    with scene.embedded(group=group) as running:
        assert group.elect(60)
        running.wait_leading()
        group.revoke()
        eventually(lambda: running.harvester.state is State.STANDBY, what="standby")
        eventually(lambda: scene.sessions("harvester"), what="its sessions")
        terminate(scene)
        fill(scene, 1, 3)
        assert group.elect(60)
        running.wait_for(LeaderAcquired, 2)
        scene.wait_left()
    assert scene.published() == causal(KEYS, 3)


def test_postgresql_comes_later_than_the_harvester(scene: Scene, postgres: Proxy) -> None:
    fill(scene, 1, 3)
    with scene.cli(data_source=through(scene, postgres)) as running:
        running.wait_for_line(rf"problem=.*cannot reach PostgreSQL at 127\.0\.0\.1:{postgres.port}\b")
        running.wait_for_line(r"cannot reach PostgreSQL.*refused.*check that the server runs")
        assert running.process.poll() is None
        postgres.open()
        wait_leads(running)
        scene.wait_left()
        assert any(text.startswith("database: recovered after ") for text in messages(running))
        assert running.stop() == 0
    assert scene.published() == causal(KEYS, 3)
    _only_json(running.stderr)


def test_kafka_comes_later_than_the_harvester(scene: Scene, kafka: Proxy) -> None:
    fill(scene, 1, 3)
    with scene.cli(base_kafka_config={"bootstrap.servers": kafka.address}, min_poll_interval="50ms") as running:
        running.wait_for_line(rf"group: Kafka at {re.escape(kafka.address)} does not answer")
        assert running.process.poll() is None
        kafka.open()
        wait_leads(running)
        scene.wait_left()
        eventually(
            lambda: any(text.startswith("group: recovered after ") for text in messages(running)),
            what="the recovery in the log",
        )
        assert running.stop() == 0
    assert scene.published() == causal(KEYS, 3)
    _only_json(running.stderr)


def _only_json(lines: list[str]) -> None:
    assert [line for line in lines if not line.startswith("{")] == []


def test_postgresql_goes_away_and_comes_back(scene: Scene, postgres: Proxy) -> None:
    postgres.open()
    with scene.embedded(data_source=through(scene, postgres)) as running:
        running.wait_leading()
        fill(scene, 1, 5)
        scene.wait_left()
        fill(scene, 6, 30)
        postgres.cut()
        eventually(lambda: "database" in (running.harvester.status().problem or ""), what="a problem")
        fill(scene, 31, 35)
        postgres.open()
        scene.wait_left()
        eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
        assert running.harvester.state is State.LEADING
    assert scene.published() == causal(KEYS, 35)


def test_kafka_goes_away_and_comes_back(scene: Scene, kafka: Proxy) -> None:
    kafka.open()
    with scene.member(base_kafka_config={"bootstrap.servers": kafka.address}, shards=1) as running:
        first = running.wait_leading()
        fill(scene, 1, 5)
        scene.wait_left()
        kafka.cut()
        fill(scene, 6, 10)
        running.wait_for(LeaderFenced)
        assert not running.harvester.is_leader
        assert eventually(lambda: running.harvester.status().problem, what="a problem")
        kafka.open()
        second = running.wait_for(LeaderAcquired, 2)
        assert second.term > first.term
        assert second.leader_id != first.leader_id
        scene.wait_left()
        eventually(lambda: running.harvester.status().problem is None, what="no problem any more")
    assert {key: list(dict.fromkeys(values)) for key, values in scene.published().items()} == causal(KEYS, 10)


def test_a_short_cut_of_the_brokers_is_bridged_by_retries(scene: Scene, kafka: Proxy) -> None:
    """Under a leadership that lasts (a fake group), an outage under the delivery timeout repeats nothing (I8)."""
    kafka.open()
    with scene.embedded(base_kafka_config={"bootstrap.servers": kafka.address}) as running:
        running.wait_leading()
        fill(scene, 1, 3)
        scene.wait_left()
        kafka.cut()
        fill(scene, 4, 10)
        eventually(lambda: running.harvester.in_flight == len(KEYS), what="records on the wire")
        kafka.open()
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(KEYS, 10)
