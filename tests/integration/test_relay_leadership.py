"""Two harvesters: hand-over, standing by, and what ends a harvester."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import psycopg
import pytest

from harvester import FakeGroup, Harvester, HarvesterError, LeaderAcquired, State
from harvester.errors import ExitCode
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.tables import OutboxTable
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from tests.support.harvesting import Scene, causal, wait_leads
from tests.support.hooks import Plan
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

TABLE = OutboxTable.parse("outbox")


# -- hand-over


def test_a_take_over_that_is_revoked_does_not_take_the_term_from_its_successor(scene: Scene, plan: Plan) -> None:
    """P8: its compare-and-set fails, and it is trusted, but nobody wants it to try again."""
    group, successor = FakeGroup(elected=True), MarkSession(scene.dsn, TABLE, "successor", 30.0)
    with ExitStack() as until_the_end:
        until_the_end.enter_context(closing(successor))
        with plan.blocked("marker.term_read") as reached:
            running = until_the_end.enter_context(scene.embedded(group=group))
            reached()
            group.revoke()
            assert successor.take_term(0, 0, uuid.uuid4(), "successor") == 1
        assert group.elect()
        assert running.wait_leading().term == 2


def test_a_leader_that_is_stopped_under_load_hands_over_without_a_repeat(scene: Scene) -> None:
    load = Load(
        records=1_000_000,
        topics=(scene.topic,),
        keys=50,
        rate_per_s=1000,
        rows_per_transaction=3,
        late=0.1,
        rollbacks=0.1,
    )
    stop = threading.Event()
    with scene.cli(name="one") as one, ThreadPoolExecutor(1) as pool:
        first_id, first_term = wait_leads(one)
        with scene.cli(name="two") as two:
            _wait_members(scene, 2)
            pumping = pool.submit(pump, scene.dsn, TABLE, load, stop=stop)
            try:
                _wait_inserted(scene, 700)
                assert one.stop(signal.SIGTERM) == 0
                second_id, second_term = wait_leads(two)
                assert second_term > first_term
                assert second_id != first_id
                seen = _wait_inserted(scene, 0)
                _wait_inserted(scene, seen + 300)
            finally:
                stop.set()
            report = pumping.result(60)
            scene.wait_left()
            assert two.stop() == 0
    verdict = verify(scene.dsn, TABLE, scene.config().common_options()).verdict
    assert verdict.inserted == verdict.delivered == report.records
    assert (verdict.lost, verdict.duplicates, verdict.order_violations, verdict.unexpected) == (0, 0, 0, 0)
    assert verdict.findings == ()


def _wait_inserted(scene: Scene, at_least: int) -> int:
    def inserted() -> int:
        try:
            row = scene.db.execute("SELECT last_value FROM outbox_id_seq").fetchone()
        except psycopg.Error:
            return 0
        return int(row[0]) if row is not None else 0

    eventually(lambda: inserted() >= at_least, what=f"{at_least} rows")
    return inserted()


def test_a_standby_that_joins_or_leaves_interrupts_nothing(scene: Scene) -> None:
    # A session timeout beyond the patience of this test: who leaves has to say so.
    with scene.member(name="leader", session_timeout="60s") as leader:
        leader.wait_leading()
        acquired = leader.of(LeaderAcquired)[0]
        for number, force in ((1, False), (2, True)):
            with scene.member(name="standby", session_timeout="60s") as standby:
                eventually(lambda: standby.harvester.state is State.STANDBY, what="standby")
                _wait_members(scene, 2)
                scene.add(("a", str(number)))
                scene.wait_left()
                assert not standby.harvester.is_leader
                assert standby.harvester.leader_id is None
                standby.harvester.stop(force=force)
            _wait_members(scene, 1)
        scene.add(("a", "3"))
        scene.wait_left()
        assert (leader.harvester.leader_id, leader.harvester.term) == (acquired.leader_id, acquired.term)
        assert leader.leadership() == ["LeaderAcquired"]
    assert scene.published() == causal(("a",), 3)


def _wait_members(scene: Scene, count: int) -> None:
    """Until the coordinator counts this many members of a group that is at rest."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"})

    def members() -> int:
        described = admin.describe_consumer_groups([scene.group])[scene.group].result(10)
        return len(described.members) if described.state.name == "STABLE" else -1

    eventually(lambda: members() == count, what=f"{count} members", interval_s=0.05)


def test_a_standby_takes_over_from_a_leader_that_is_killed(scene: Scene) -> None:
    with scene.cli(name="one", session_timeout="4s", heartbeat_timeout="1s", drain_interval="2s") as one:
        _, first_term = wait_leads(one)
        with scene.member(name="two", session_timeout="4s", heartbeat_timeout="1s", drain_interval="2s") as two:
            eventually(lambda: two.harvester.state is State.STANDBY, what="standby")
            _wait_members(scene, 2)
            for number in range(1, 21):
                scene.add(("a", str(number)), ("b", str(number)))
            one.process.kill()
            acquired = two.wait_for(LeaderAcquired)
            assert acquired.term > first_term
            for number in range(21, 31):
                scene.add(("a", str(number)), ("b", str(number)))
            scene.wait_left()
    published = scene.published()
    assert {key: list(dict.fromkeys(values)) for key, values in published.items()} == causal(("a", "b"), 30)


# -- what ends a harvester


def outcome(harvester: Harvester) -> HarvesterError:
    harvester.start()
    try:
        with pytest.raises(HarvesterError) as raised:
            assert harvester.wait(30) is None, "it did not end"
        assert harvester.state is State.FAILED
        return raised.value
    finally:
        harvester.stop(force=True)


def test_a_wrong_schema_ends_the_start(scene: Scene) -> None:
    scene.db.execute("ALTER TABLE outbox DROP COLUMN kafka_header_keys")
    error = outcome(Harvester(scene.config()))
    assert error.exit_code is ExitCode.SCHEMA
    assert "kafka_header_keys" in error.message
    assert error.hint
    with scene.cli() as running:
        assert running.wait() == 65
        assert any(line.startswith("harvester: ") and "kafka_header_keys" in line for line in running.stderr)
        assert any(line.startswith("hint: ") for line in running.stderr)
        assert "Traceback" not in running.output


def test_a_group_that_serves_another_outbox_is_refused_by_name(scene: Scene, make_database: Callable[[], str]) -> None:
    other_dsn = make_database()
    with scene.member(name="billing") as running:
        running.wait_leading()
        scene.add(("a", "1"))
        scene.wait_left()
        with scene.cli(name="intruder", data_source=other_dsn) as intruder:
            # At once: a standby hears nothing, and would wait for ever for a leadership that is another outbox's.
            assert intruder.wait() == 76
            (line,) = [line for line in intruder.stderr if line.startswith("harvester: ")]
            assert scene.group in line
            assert "'billing'" in line
            assert "Traceback" not in intruder.output


def test_everything_wrong_with_a_configuration_is_listed(scene: Scene) -> None:
    with scene.cli(
        base_kafka_config={"group.id": "mine", "enable.idempotence": "false"},
        producer_kafka_config={"acks": "1"},
        mark_backoff=5,
        queue_timeout="1 fortnight",
        no_such_limit=1,
    ) as running:
        assert running.wait() == 78
        for name in ("group.id", "enable.idempotence", "acks", "mark_backoff", "queue_timeout", "no_such_limit"):
            assert name in running.output
        assert "6 configuration problems" in running.output
        assert "Traceback" not in running.output


# -- topics


def test_missing_topics_are_made(scene: Scene) -> None:
    from confluent_kafka.admin import AdminClient

    target, leader_topic = f"made.{uuid.uuid4().hex}", f"{scene.group}.leaders"
    scene.add(("a", "1"), ("a", "2"), topic=target)
    with scene.member(leader_topic=leader_topic) as running:
        running.wait_leading()
        scene.wait_left()
        assert scene.quarantined() == {}
    known = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"}).list_topics(timeout=10)
    assert len(known.topics[leader_topic].partitions) == 1
    assert scene.published(target) == causal(("a",), 2)
