"""Two harvesters, terms and fencing on real servers."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harvester import FakeGroup, Harvester, HarvesterError, LeaderAcquired, LeaderFenced, State
from harvester.errors import ExitCode, TermLost
from harvester.outbox.marker import MarkSession
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


def test_a_leader_that_is_stopped_under_load_hands_over_without_a_repeat(scene: Scene) -> None:
    load = Load(
        records=6000, topics=(scene.topic,), keys=50, rate_per_s=1000, rows_per_transaction=3, late=0.1, rollbacks=0.1
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


# -- the term


@pytest.fixture
def sessions(scene: Scene) -> Iterator[Callable[[], MarkSession]]:
    made: list[MarkSession] = []

    def make() -> MarkSession:
        session = MarkSession(scene.dsn, TABLE, "test", 30.0)
        session.open()
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()


def mark(session: MarkSession, term: int, holder: UUID) -> list[int]:
    rows = session.mark(
        term=term, holder=holder, leader_id=uuid.uuid4(), limit=10, closed_keys=frozenset(), closed_slices=None
    )
    return [row[0] for row in rows]


def marked(scene: Scene) -> list[int]:
    return [row[0] for row in scene.db.execute("SELECT id FROM outbox WHERE leader_id IS NOT NULL")]


def test_an_old_mark_that_waited_while_the_term_rose_takes_nothing(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    """P6: its snapshot is older than the new term, and it still sees it."""
    scene.add(("a", "1"), ("b", "1"))
    old, holder = sessions(), uuid.uuid4()
    term = old.take_term(0, 0, holder, "old")
    assert term == 1
    with scene.writer() as other, ThreadPoolExecutor(1) as pool:
        other.execute("UPDATE outbox_term SET term = term + 1, holder = gen_random_uuid()")
        waiting: Future[Any] = pool.submit(mark, old, term, holder)
        eventually(lambda: scene.waiting_for_locks() == 1, what="the mark waits")
        other.commit()
        with pytest.raises(TermLost):
            waiting.result(30)
    assert marked(scene) == []
    assert scene.term() == 2


def test_the_term_rises_only_after_a_mark_that_waits_for_a_row(
    scene: Scene, sessions: Callable[[], MarkSession]
) -> None:
    """P6: the mark holds the term row shared, so whoever takes over comes after it and sees what it took."""
    (row, _) = scene.add(("a", "1"), ("b", "1"))
    old, new, holder, successor = sessions(), sessions(), uuid.uuid4(), uuid.uuid4()
    term = old.take_term(0, 0, holder, "old")
    assert term == 1
    with scene.writer() as other, ThreadPoolExecutor(2) as pool:
        other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (row,))
        marking = pool.submit(mark, old, term, holder)
        eventually(lambda: scene.waiting_for_locks() == 1, what="the mark waits for the row")
        taking = pool.submit(new.take_term, term, 0, successor, "new")
        eventually(lambda: scene.waiting_for_locks() == 2, what="the take-over waits for the term row")
        other.rollback()
        taken = marking.result(30)
        assert taking.result(30) == 2
    assert len(taken) == 2
    assert mark(new, 2, successor) == taken  # all of them, whatever the old leader wrote into them
    old.reset(term=term, holder=holder, leader_id=uuid.uuid4(), ids=tuple(taken))
    assert marked(scene) == taken
    with pytest.raises(TermLost):
        mark(old, term, holder)


def test_a_reset_of_an_old_leader_has_no_effect(scene: Scene, sessions: Callable[[], MarkSession]) -> None:
    ids = scene.add(("a", "1"))
    old, holder, leader_id = sessions(), uuid.uuid4(), uuid.uuid4()
    assert old.take_term(0, 0, holder, "old") == 1
    old.mark(term=1, holder=holder, leader_id=leader_id, limit=10, closed_keys=frozenset(), closed_slices=None)
    scene.db.execute("UPDATE outbox_term SET term = 2, holder = gen_random_uuid()")
    old.reset(term=1, holder=holder, leader_id=leader_id, ids=tuple(ids))
    assert marked(scene) == ids
    scene.db.execute("UPDATE outbox_term SET term = 1, holder = %s", (holder,))
    old.reset(term=1, holder=holder, leader_id=leader_id, ids=tuple(ids))
    assert marked(scene) == []


def test_a_trusted_leader_whose_term_was_raised_by_another_takes_it_again(scene: Scene) -> None:
    """P8: a late UPDATE of a loser must not stall the rightful leader on "0 rows"."""
    with scene.member() as running:
        first = running.wait_leading()
        scene.add(("a", "1"))
        scene.wait_left()
        scene.db.execute("UPDATE outbox_term SET term = term + 5, holder = gen_random_uuid(), holder_name = 'loser'")
        second = running.wait_for(LeaderAcquired, 2)
        assert second.term == first.term + 6
        assert second.leader_id != first.leader_id
        scene.add(("a", "2"))
        scene.wait_left()
        assert running.leadership() == ["LeaderAcquired", "LeaderAcquired"]
        assert scene.db.execute("SELECT holder_name FROM outbox_term").fetchone() == ("test",)
    assert scene.published() == causal(("a",), 2)


def test_a_leader_without_trust_does_not_take_the_term_again(scene: Scene) -> None:
    group = FakeGroup(elected=True)
    with scene.embedded(group=group) as running:
        running.wait_leading()
        group.fence("a test")
        running.wait_for(LeaderFenced)
        scene.db.execute("UPDATE outbox_term SET term = 9, holder = gen_random_uuid()")
        scene.add(("a", "1"))
        assert running.harvester.leader_id is None
        assert running.harvester.state is State.FENCED
    assert scene.term() == 9
    assert len(scene.left()) == 1


def test_what_kafka_acknowledged_to_a_deposed_leader_is_purged(scene: Scene, plan: Plan) -> None:
    """P2: a purge is not fenced; the acknowledgement was real, whoever received it."""
    group = FakeGroup(elected=True)
    with scene.embedded(group=group) as running:
        running.wait_leading()
        with scene.writer() as other:
            with plan.blocked("marker.marked") as is_marked:
                (row,) = scene.add(("a", "1"))
                is_marked()
                other.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (row,))
            eventually(lambda: scene.waiting_for_locks() == 1, what="the purge, after the acknowledgement")
            group.fence("a test")
            running.wait_for(LeaderFenced)
            scene.db.execute("UPDATE outbox_term SET term = 9, holder = gen_random_uuid()")
            assert scene.left() == [row]
            other.rollback()
            scene.wait_left()
    assert scene.published() == causal(("a",), 1)
    assert scene.term() == 9


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
        poll_duration=5,
        queue_timeout="1 fortnight",
        no_such_limit=1,
    ) as running:
        assert running.wait() == 78
        for name in ("group.id", "enable.idempotence", "acks", "poll_duration", "queue_timeout", "no_such_limit"):
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
