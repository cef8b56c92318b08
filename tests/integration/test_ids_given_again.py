"""P50: what was published is purged, and no other row that has got its id since.

`setval` gives ids out again without a trace: the sequence keeps its file, and stands where it stood once as many ids
are given out as before. Acknowledgements, or purges, are held back meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester import LeaderAcquired
from harvester.delivery.decode import decode
from harvester.errors import DatabaseUnavailable
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome, Rules
from harvester.record import RowVersions
from tests.support.harvesting import Embedded, Scene, alive, shards_of, wait_leads
from tests.support.hooks import Plan
from tests.support.marking import BOTH, TABLE, mark
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]

KEYS = 20
# Acknowledgements may take a while, and so may what waits for them.
PATIENT: dict[str, Any] = {"session_timeout": "30s", "drain_interval": "15s", "heartbeat_timeout": "10s"}
EXACTLY_ONCE: dict[str, Any] = {"delivery": "exactly-once", "shards": 1}

Change = Callable[[psycopg.Connection[Any]], object]


def truncate(db: psycopg.Connection[Any]) -> None:
    db.execute("TRUNCATE outbox")


def delete(db: psycopg.Connection[Any]) -> None:
    db.execute("DELETE FROM outbox")


def vacuum_full(db: psycopg.Connection[Any]) -> None:
    db.execute("VACUUM FULL outbox")


def cluster(db: psycopg.Connection[Any]) -> None:
    db.execute("CLUSTER outbox USING outbox_pkey")


def alter(db: psycopg.Connection[Any]) -> None:
    """The table is written anew, and every row has the xmin of this statement then."""
    db.execute("ALTER TABLE outbox ADD COLUMN note uuid DEFAULT gen_random_uuid()")


def update(db: psycopg.Connection[Any]) -> None:
    db.execute("UPDATE outbox SET kafka_value = kafka_value")


CHANGES = pytest.mark.parametrize("change", [truncate, delete])
WRITTEN_ANEW = pytest.mark.parametrize("change", [vacuum_full, cluster, alter, update])


def slow_to_acknowledge(kafka: Proxy) -> dict[str, Any]:
    """A busy machine may bring the rows in several batches, and none is acknowledged."""
    return {
        "bootstrap.servers": kafka.address,
        "linger.ms": "200",
        "max.in.flight.requests.per.connection": "5",
    }


def rows(name: str, count: int = KEYS) -> list[tuple[str | None, str | None]]:
    return [(f"{name}-{number}", name) for number in range(count)]


def replace_rows(scene: Scene, change: Change, old: list[int]) -> list[int]:
    """Rows go, and others get their ids, all of them: the sequence stands where it stood. The new rows' ids."""
    with scene.db.transaction():
        change(scene.db)
        scene.db.execute("SELECT setval('outbox_id_seq', %s, false)", (min(old),))
        new = scene.add(*rows("new", len(old)))
    assert new == old
    return new


def incarnation(scene: Scene) -> Any:
    return scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()


def assert_published_once(scene: Scene, name: str, count: int) -> None:
    published = scene.published()
    wrong = {key: published.get(key) for key, _ in rows(name, count) if published.get(key) != [name]}
    assert not wrong, f"{len(wrong)} of {count} were deleted and never published, or repeated: {wrong}"


def wait_published(scene: Scene, count: int) -> None:
    eventually(lambda: len(scene.published()) == count, what="all of them in the topic")


@contextmanager
def leading(scene: Scene, **given: Any) -> Iterator[Embedded]:
    """A leader that has published the rows `warm`."""
    with scene.embedded(**given, **PATIENT) as running:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        yield running


@contextmanager
def committed(scene: Scene, plan: Plan) -> Iterator[list[int]]:
    """The rows `old`, which Kafka has committed, and which are not deleted within the block; their ids."""
    with plan.blocked("shard.committed") as reached:
        with scene.db.transaction():
            old = scene.add(*rows("old"))
        reached()
        yield old


# -- at least once: acknowledgements come late


@BOTH
@CHANGES
def test_what_is_acknowledged_late_purges_no_row_that_has_its_id_by_now(
    scene: Scene, kafka: Proxy, marking: str, change: Change
) -> None:
    with leading(scene, marking=marking, producer_kafka_config=slow_to_acknowledge(kafka)) as running:
        before = incarnation(scene)
        kafka.freeze(up=False)  # no acknowledgement comes back
        with scene.db.transaction():
            old = scene.add(*rows("old"))
        wait_published(scene, 2 * KEYS)
        replace_rows(scene, change, old)
        kafka.thaw()
        scene.wait_left()
        assert_published_once(scene, "new", KEYS)
        running.wait_for(LeaderAcquired, 2)
        assert incarnation(scene) != before


@BOTH
@WRITTEN_ANEW
def test_a_table_that_is_written_anew_has_the_same_records(
    scene: Scene, kafka: Proxy, marking: str, change: Change
) -> None:
    with leading(scene, marking=marking, producer_kafka_config=slow_to_acknowledge(kafka)) as running:
        before = incarnation(scene)
        kafka.freeze(up=False)
        with scene.db.transaction():
            scene.add(*rows("old"))
        wait_published(scene, 2 * KEYS)
        change(scene.db)
        kafka.thaw()
        scene.wait_left()
        scene.add(*rows("new"))
        scene.wait_left()
        assert_nothing_has_happened(scene, running, before)


def assert_nothing_has_happened(scene: Scene, running: Embedded, before: Any) -> None:
    for name in ("warm", "old", "new"):
        assert_published_once(scene, name, KEYS)
    assert len(running.of(LeaderAcquired)) == 1
    assert incarnation(scene) == before


# -- exactly once: a transaction is committed, and its rows are not deleted yet


@BOTH
@CHANGES
def test_what_is_committed_purges_no_row_that_has_its_id_by_now(
    scene: Scene, plan: Plan, marking: str, change: Change
) -> None:
    with leading(scene, marking=marking, **EXACTLY_ONCE) as running:
        before = incarnation(scene)
        with committed(scene, plan) as old:
            replace_rows(scene, change, old)
        scene.wait_left()
        assert_published_once(scene, "new", KEYS)
        running.wait_for(LeaderAcquired, 2)
        assert incarnation(scene) != before


@BOTH
@WRITTEN_ANEW
def test_what_is_committed_is_purged_from_a_table_that_is_written_anew(
    scene: Scene, plan: Plan, marking: str, change: Change
) -> None:
    with leading(scene, marking=marking, **EXACTLY_ONCE) as running:
        before = incarnation(scene)
        with committed(scene, plan):
            change(scene.db)
        scene.wait_left()
        scene.add(*rows("new"))
        scene.wait_left()
        assert_nothing_has_happened(scene, running, before)


def kill_before_the_purge(scene: Scene, marking: str) -> list[int]:
    """A harvester that has committed, and is killed with its shards before it has deleted; the ids.

    Nothing waits long here, and whoever succeeds it waits as long as its trust and its delivery timeout together.
    """
    with scene.cli(env=scene.plan.env, marking=marking, **EXACTLY_ONCE) as running:
        wait_leads(running)
        scene.add(*rows("warm"))
        scene.wait_left()
        with committed(scene, scene.plan) as old:
            shards = shards_of(running.pid)
            os.kill(running.pid, signal.SIGKILL)
            running.process.wait()
            eventually(lambda: not any(map(alive, shards)), what="the end of the shards")
    assert scene.left() == old
    return old


def succeed(scene: Scene, **given: Any) -> None:
    """Another harvester leads until nothing is left."""
    with scene.cli(name="second", **given) as running:
        wait_leads(running)
        scene.wait_left()
        assert running.stop() == 0


@BOTH
@CHANGES
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_successor_purges_no_row_that_has_the_id_of_a_committed_one(
    scene: Scene, marking: str, change: Change, delivery: str
) -> None:
    """Nobody leads while the ids are given out again, and the lane's progress names them. The new rows get another
    incarnation: under the old one, consumers would take them for repeats."""
    replace_rows(scene, change, kill_before_the_purge(scene, marking))
    before = incarnation(scene)
    succeed(scene, marking=marking, delivery=delivery, shards=1)
    assert_published_once(scene, "new", KEYS)
    assert incarnation(scene) != before


@BOTH
@WRITTEN_ANEW
def test_a_successor_purges_what_was_committed_from_a_table_that_is_written_anew(
    scene: Scene, marking: str, change: Change
) -> None:
    kill_before_the_purge(scene, marking)
    change(scene.db)
    succeed(scene, marking=marking, **EXACTLY_ONCE)
    assert_published_once(scene, "old", KEYS)


@pytest.mark.parametrize("dies", [False, True], ids=["one leader", "a successor"])
def test_exactly_once_rows_without_a_moment_are_known_by_their_content(scene: Scene, plan: Plan, dies: bool) -> None:
    """Their times do not tell whether they are the same; in the next incarnation their sums do (P49)."""
    scene.db.execute("ALTER TABLE outbox ALTER create_time TYPE timestamptz(0)")
    if dies:
        kill_before_the_purge(scene, "table")
        update(scene.db)
        succeed(scene, marking="table", **EXACTLY_ONCE)
    else:
        with leading(scene, marking="table", **EXACTLY_ONCE):
            with committed(scene, plan):
                update(scene.db)
            scene.wait_left()
    assert_published_once(scene, "old", KEYS)


# -- a session by itself


class Purging:
    """A shard's session, and what it told."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.told: list[str] = []
        self.session = PurgeSession(
            scene.dsn, TABLE, "test", Rules(), server_changed=pytest.fail, ids_given_again=self.told.append
        )
        self.session.ready()

    def versions(self, *ids: int) -> RowVersions:
        """The rows with these ids, as a mark in memory would read them now."""
        query = """SELECT id, xmin::text::bigint, (extract(epoch FROM create_time) * 1000000)::bigint
                   FROM outbox WHERE id = ANY(%s) ORDER BY id"""
        found = self.scene.db.execute(query, (list(ids),)).fetchall()
        return RowVersions(*map(list, zip(*found, strict=True)))


@pytest.fixture
def purging(scene: Scene) -> Iterator[Purging]:
    made = Purging(scene)
    yield made
    made.session.close()


def test_a_purge_that_is_repeated_deletes_nothing_that_came_behind_it(scene: Scene, purging: Purging) -> None:
    """Its answer was lost on the way. With `setval` alone, an id is free as soon as the first attempt has committed."""
    old = scene.add(*rows("old", 3))
    meant = purging.versions(*old)
    assert purging.session.delete(meant) == []
    scene.db.execute("SELECT setval('outbox_id_seq', %s, false)", (old[0],))
    assert scene.add(*rows("new", 2)) == old[:2]
    assert purging.session.delete(meant) == old[:2]
    assert scene.left() == old[:2]
    assert purging.session.delete_unlocked(meant) == ([], old[:2])
    with pytest.raises(DatabaseUnavailable, match="given out again"):
        purging.session.refuse_other(old[0])
    assert len(purging.told) == 1


def test_setval_alone_gives_no_id_of_a_row_that_is_still_there(scene: Scene) -> None:
    old = scene.add(*rows("old", 2))
    scene.db.execute("SELECT setval('outbox_id_seq', %s, false)", (old[0],))
    with pytest.raises(psycopg.errors.UniqueViolation):
        scene.add(("new", "1"))


def test_a_time_that_all_records_have_proves_nothing(scene: Scene, purging: Purging) -> None:
    """Rather a record twice than one that is lost."""
    scene.db.execute("ALTER TABLE outbox ALTER create_time DROP NOT NULL")
    for time in ("'2026-01-01 12:00:00+00'", "NULL", "'infinity'", "'294276-12-31 23:59:59.999999+00'"):
        insert = f"""INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)
                     VALUES ({time}, 't', 'k', '{{}}', '{{}}') RETURNING id, xmin::text::bigint"""
        [(record_id, xmin)] = scene.db.execute(insert).fetchall()
        meant = RowVersions((record_id,), (xmin,), (0,))
        update(scene.db)
        assert purging.session.delete(meant) == [record_id]
        [(xmin,)] = scene.db.execute("SELECT xmin::text::bigint FROM outbox").fetchall()
        assert purging.session.delete(RowVersions((record_id,), (xmin,), (0,))) == []
    assert scene.left() == []


@pytest.mark.parametrize("change", [vacuum_full, cluster])
def test_what_keeps_rows_as_they_are_keeps_their_xmin(scene: Scene, purging: Purging, change: Change) -> None:
    """With freezing, too: a frozen row still shows it."""
    ids = scene.add(*rows("old", 3))
    before = purging.versions(*ids)
    change(scene.db)
    scene.db.execute("VACUUM (FREEZE) outbox")
    assert purging.versions(*ids) == before


def test_a_locked_row_that_was_updated_is_tried_apart(scene: Scene, purging: Purging) -> None:
    ids = scene.add(*rows("old", 3))
    meant = purging.versions(*ids)
    scene.db.execute("UPDATE outbox SET kafka_value = 'x' WHERE id = %s", (ids[1],))
    with scene.writer() as other:
        other.execute("SELECT FROM outbox WHERE id = ANY(%s) FOR UPDATE", (ids[1:],))
        assert purging.session.delete_unlocked(meant) == ([ids[2], ids[1]], [])
    assert scene.left() == ids[1:]
    assert purging.session.delete_unlocked(meant) == ([], [])
    assert scene.left() == []


def test_a_row_that_is_written_anew_while_it_is_purged_is_tried_again(
    scene: Scene, purging: Purging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count as settled, stay, and be published once more, exactly once, too."""
    [record] = scene.add(("k", "1"))
    meant, session = purging.versions(record), purging.session
    update(scene.db)
    purge = session._purge_unlocked

    def overtaken(rows: RowVersions) -> list[int]:
        if rows != meant:  # as it was found to be by now
            update(scene.db)
        return purge(rows)

    with monkeypatch.context() as patch:
        patch.setattr(session, "_purge_unlocked", overtaken)
        assert session.delete_unlocked(meant) == ([record], [])
    assert scene.left() == [record]
    assert session.delete_unlocked(meant) == ([], [])
    assert scene.left() == []


@BOTH
def test_a_mark_reads_the_xmin_that_its_row_has_then(
    scene: Scene, purging: Purging, sessions: Callable[[], Any], marking: str
) -> None:
    session, holder = sessions(), uuid4()
    term = session.take_term(0, 0, holder, "test")
    ids = scene.add(*rows("old", 3))
    leader = uuid4() if marking == "table" else None
    found = session.mark(term=term, holder=holder, leader_id=leader, limit=10, high=None, gaps=())
    records = decode(b"".join(raw for _, _, raw in found))
    read = RowVersions(ids, [record.xmin for record in records], [record.created_us for record in records])
    assert read == purging.versions(*ids)
    assert purging.session.delete(read) == []
    assert scene.left() == []


def test_a_deposed_leaders_purge_tells_nobody_of_rows_that_another_has_marked(
    scene: Scene, purging: Purging, sessions: Callable[[], Any]
) -> None:
    """A mark in the table writes them anew, and here their times prove nothing."""
    [record] = scene.add(("k", "1"))
    scene.db.execute("UPDATE outbox SET create_time = '2026-01-01'")
    meant = purging.versions(record)
    purging.session.expect(None, 1)
    session, holder = sessions(), uuid4()
    term = session.take_term(0, 1, holder, "test")
    assert mark(session, term, holder) == [record]
    assert purging.session.delete(meant) == [record]
    purging.session.refuse_other(record)
    assert purging.told == []
    assert scene.left() == [record]


def test_a_quarantine_takes_the_record_that_failed_and_no_other(scene: Scene, purging: Purging) -> None:
    holder = uuid4()
    scene.db.execute("UPDATE outbox_term SET term = 1, holder = %s", (holder,))
    first, second = scene.add(*rows("old", 2))
    meant = purging.versions(first, second)

    def move(index: int) -> QuarantineOutcome:
        poison = PoisonRow(
            meant.ids[index], "too large", 1, datetime.now(UTC), 1, str(holder),
            xmin=meant.xmins[index], created_us=meant.created_us[index],
        )  # fmt: skip
        return purging.session.quarantine(poison)

    update(scene.db)
    assert move(0) is QuarantineOutcome.MOVED
    replace_rows(scene, delete, [second])
    with pytest.raises(DatabaseUnavailable, match="given out again"):
        move(1)
    assert (scene.left(), list(scene.quarantined())) == ([second], [first])
    with suppress(DatabaseUnavailable):
        move(1)
    assert len(purging.told) == 2
    delete(scene.db)
    assert move(1) is QuarantineOutcome.GONE


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_records_that_fail_one_after_the_other_under_one_id_are_both_kept(scene: Scene, delivery: str) -> None:
    """The sequence was set back, which leaves no trace; in quarantine, the place of the second one is taken."""
    bad = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES ('no topic!', 'k', %s) RETURNING id"
    with scene.embedded(delivery=delivery, head_scan_interval="500ms", **PATIENT) as running:
        running.wait_leading()
        scene.db.execute(bad, ("first",))
        eventually(lambda: scene.left() == [], what="the first one in quarantine")
        with scene.db.transaction():
            scene.db.execute("SELECT setval('outbox_id_seq', last_value, false) FROM outbox_id_seq")
            scene.db.execute(bad, ("second",))
        eventually(lambda: scene.left() == [], what="the second one in quarantine")
    kept = "SELECT count(DISTINCT id), count(DISTINCT incarnation), array_agg(kafka_value ORDER BY kafka_value)"
    assert scene.db.execute(f"{kept} FROM outbox_quarantine").fetchone() == (1, 2, ["first", "second"])
