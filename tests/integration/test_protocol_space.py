"""P35: ids mean rows only within their id space: one table, and one file of its sequence.

Acknowledgements are held back, so that purges, quarantines and gaps of the old space meet the rows of the new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester import LeaderAcquired, failpoints
from harvester.errors import DatabaseUnavailable
from harvester.outbox import purge_session
from harvester.outbox.leader_session import Holders, MarkSession, TermSession
from harvester.outbox.purge_session import PoisonRow, PurgeSession, Rules
from harvester.outbox.sql import queries, settle
from harvester.outbox.sql.queries import IdSpace, oid_of
from harvester.outbox.tables import OutboxTable
from harvester.record import RowVersions
from harvester.relay.core.messages import Mark, Marked, Report, ServerChanged
from harvester.relay.marker import MarkReader
from tests.support.harvesting import Scene
from tests.support.hooks import Fault, Plan
from tests.support.marking import BOTH, TABLE, mark
from tests.support.proxy import Proxy
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]

KEYS = 20
# Acknowledgements may take a while, and so may what waits for them.
PATIENT: dict[str, Any] = {"session_timeout": "30s", "drain_interval": "15s", "heartbeat_timeout": "10s"}

Change = Callable[[psycopg.Connection[Any]], None]


def truncate(db: psycopg.Connection[Any]) -> None:
    db.execute("TRUNCATE outbox RESTART IDENTITY")


def swap(db: psycopg.Connection[Any]) -> None:
    """Another table takes the name; its ids come from a sequence of its own, from 1 on."""
    with db.transaction():
        db.execute("ALTER TABLE outbox RENAME TO outbox_before")
        db.execute("CREATE TABLE outbox (LIKE outbox_before INCLUDING ALL)")
        db.execute("CREATE SEQUENCE outbox_second_seq OWNED BY outbox.id")
        db.execute("ALTER TABLE outbox ALTER id SET DEFAULT nextval('outbox_second_seq'::regclass)")


def swap_with_the_same_sequence(db: psycopg.Connection[Any]) -> None:
    """Another table takes the name, and its rows get the ids of the first one's again."""
    with db.transaction():
        db.execute("ALTER TABLE outbox RENAME TO outbox_before")
        db.execute("CREATE TABLE outbox (LIKE outbox_before INCLUDING ALL)")
        db.execute("SELECT setval('outbox_id_seq', 1, false)")


CHANGES = pytest.mark.parametrize(
    "change", [truncate, swap, swap_with_the_same_sequence], ids=["truncate", "swap", "swap-same-sequence"]
)


def rows(name: str, count: int = KEYS) -> list[tuple[str | None, str | None]]:
    return [(f"{name}-{number}", name) for number in range(count)]


def incarnation(scene: Scene) -> Any:
    return scene.db.execute("SELECT incarnation FROM outbox_term").fetchone()


@BOTH
@CHANGES
def test_what_is_acknowledged_late_purges_no_row_of_another_id_space(
    scene: Scene, kafka: Proxy, marking: str, change: Change
) -> None:
    # A busy machine may bring the rows in several batches, and none is acknowledged.
    many = {"linger.ms": "200", "max.in.flight.requests.per.connection": "5"}
    producer = {"bootstrap.servers": kafka.address, **many}
    with scene.embedded(marking=marking, producer_kafka_config=producer, **PATIENT) as running:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        before = incarnation(scene)
        kafka.freeze(up=False)  # no acknowledgement comes back
        with scene.db.transaction():
            old = scene.add(*rows("old"))
        eventually(lambda: len(scene.published()) == 2 * KEYS, what="all of them in the topic")
        change(scene.db)
        with scene.db.transaction():
            new = scene.add(*rows("new", 2 * KEYS))
        assert set(new) > set(old), "no id was given out again: the test proves nothing"
        kafka.thaw()
        running.wait_for(LeaderAcquired, 2)
        scene.wait_left()
        published = scene.published()
        lost = [key for key, _ in rows("new", 2 * KEYS) if published.get(key) != ["new"]]
        assert not lost, f"{len(lost)} of {len(new)} were deleted and never published, or repeated"
        assert incarnation(scene) != before


def test_a_purge_that_waits_for_the_truncate_deletes_nothing_of_what_follows(scene: Scene, plan: Plan) -> None:
    """The DELETE is sent before the TRUNCATE commits, waits for its lock, and finds the ids given out again."""
    with scene.embedded(shards=1, **PATIENT) as running:
        running.wait_leading()
        scene.add(*rows("warm"))
        scene.wait_left()
        scene.db.execute("ALTER SEQUENCE outbox_id_seq RESTART")
        running.wait_for(LeaderAcquired, 2)
        with plan.blocked("shard.reports") as reached:
            with scene.db.transaction():
                old = scene.add(*rows("old"))
            reached()
            with scene.writer() as other:
                other.execute("TRUNCATE outbox RESTART IDENTITY")
                threading.Timer(0.0, (plan.directory / "shard.reports.block").unlink).start()
                eventually(scene.waiting_for_locks, what="the purge that waits")
                assert scene.add(*rows("new"), db=other) == old
                other.commit()
            (plan.directory / "shard.reports.block").touch()  # the block expects to remove it
        scene.wait_left()
    published = scene.published()
    assert [key for key, _ in rows("new") if published.get(key) != ["new"]] == []


def test_a_quarantine_that_waits_for_the_truncate_takes_nothing_of_what_follows(scene: Scene, plan: Plan) -> None:
    plan.add(Fault("MSG_SIZE_TOO_LARGE", key="old-0", when="produce", times=1000))
    with scene.embedded(max_attempts=1, **PATIENT) as running:
        running.wait_leading()
        running.harvester.pause()
        old = scene.add(("old-0", "old"))
        with scene.writer() as other:
            other.execute("LOCK TABLE outbox IN SHARE MODE")
            running.harvester.resume()
            eventually(scene.waiting_for_locks, what="the quarantine that waits")
            other.execute("TRUNCATE outbox RESTART IDENTITY")
            assert scene.add(("new-0", "new"), db=other) == old
            eventually(scene.waiting_for_locks, what="the quarantine that waits, again")
            other.commit()
        scene.wait_left()
    assert scene.published().get("new-0") == ["new"]
    assert scene.quarantined() == {}


@BOTH
def test_gaps_wait_for_the_writers_of_the_table_that_bears_the_name_now(scene: Scene, marking: str) -> None:
    """Looked up for the table of before, nobody holds a lock, and the gap of a living writer closes."""
    with scene.embedded(marking=marking, head_scan_interval="1h", **PATIENT) as running:
        running.wait_leading()
        scene.add(("k", "0"))
        scene.wait_left()
        swap_with_the_same_sequence(scene.db)
        running.wait_for(LeaderAcquired, 2)
        with scene.writer() as slow:
            scene.add(("cause", "1"), db=slow)
            scene.add(("other", "1"))
            eventually(lambda: scene.published().get("other") == ["1"], what="the row above the gap")
            for number in range(5):  # each is a mark, and a list of who holds locks
                scene.add((f"more-{number}", "1"))
                eventually(lambda: len(scene.published()) == number + 3, what="the row, and so a mark")  # noqa: B023
            slow.commit()
        scene.wait_left()
    assert scene.published().get("cause") == ["1"]


# -- a test that cannot fail is a defect: statements and the list of locks, with the rule broken

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
Sessions = Callable[[], MarkSession]
REMOVALS = ["purge", "purge of what is free", "quarantine"]
ALL = {*REMOVALS, "fetch", "mark in memory", "mark in the table"}


def _as_it_is(_: Patch) -> None:
    """The rule holds."""


def _in_space(patch: Patch, condition: Callable[[OutboxTable, IdSpace | None], str]) -> None:
    for module in (queries, settle):
        patch.setattr(module, "in_space", condition)


def _nothing_is_compared(patch: Patch) -> None:
    _in_space(patch, lambda _table, _space: "")


def _the_table_is_not_compared(patch: Patch) -> None:
    whole = queries.in_space

    def condition(table: OutboxTable, space: IdSpace | None) -> str:
        assert space is not None
        return whole(table, space).removeprefix(f" AND {oid_of(table.sql)} = {space.table}::oid")

    _in_space(patch, condition)


def _the_sequence_is_not_compared(patch: Patch) -> None:
    whole = queries.in_space
    _in_space(patch, lambda table, space: whole(table, replace(space, sequence=0) if space is not None else None))


def _nobody_asks_why_fewer_left_the_outbox(patch: Patch) -> None:
    check = PurgeSession._check_server

    def only_at_first(self: PurgeSession, connection: psycopg.Connection[Any]) -> None:
        if connection is not self._connection:
            check(self, connection)

    patch.setattr(PurgeSession, "_check_server", only_at_first)


def met_another_space(change: Change, scene: Scene, sessions: Sessions) -> tuple[set[str], int]:
    """Statements that had an effect on rows of the new id space; how many purges have told that it is another one.

    Those that remove rows are sent before the change commits, and wait for it; those that read come after it, since a
    COPY sees nothing that was committed while it waited.
    """
    marking = sessions()
    holder = uuid4()
    term = marking.take_term(0, 0, holder, "test")
    assert term is not None
    told: list[str] = []
    purging = [PurgeSession(scene.dsn, TABLE, "test", Rules(), server_changed=told.append) for _ in range(3)]
    for session in purging:
        session.expect(str(marking.place), term)
        session.ready()
    purge, purge_free, quarantine = purging
    poison = PoisonRow(3, "too large", 1, datetime.now(UTC), term, str(holder))
    scene.add(*rows("old", 5))
    with scene.writer() as other, ThreadPoolExecutor() as pool:
        other.execute("SELECT")  # so that the change is a part of its transaction
        change(other)
        assert scene.add(*rows("new", 5), db=other) == [1, 2, 3, 4, 5]
        removals: list[Future[Any]] = [
            pool.submit(purge.delete, RowVersions((1,))),  # by their ids alone, or P50 would protect them as well
            pool.submit(purge_free.delete_unlocked, RowVersions((2,))),
            pool.submit(quarantine.quarantine, poison),
        ]
        eventually(lambda: scene.waiting_for_locks() >= len(removals), what="statements that wait")
        other.commit()
        for removal in removals:
            with suppress(DatabaseUnavailable):
                removal.result(30.0)
    for session in purging:
        session.close()
    left = scene.left()
    met = {name for number, name in enumerate(REMOVALS, 1) if number not in left}
    found = {
        "fetch": marking.fetch(term=term, holder=holder, ids=(4,)),
        "mark in memory": mark(marking, term, holder, "memory"),
        "mark in the table": mark(marking, term, holder, "table"),
    }
    return met | {name for name, ids in found.items() if ids}, len(told)


@pytest.mark.parametrize(
    ("mutation", "change", "expected"),
    [
        (_as_it_is, truncate, (set(), 3)),
        (_as_it_is, swap, (set(), 3)),
        (_as_it_is, swap_with_the_same_sequence, (set(), 3)),
        (_nothing_is_compared, swap, (ALL, 1)),
        (_the_table_is_not_compared, swap_with_the_same_sequence, (ALL, 1)),
        (_the_sequence_is_not_compared, truncate, (ALL, 1)),
        (_nobody_asks_why_fewer_left_the_outbox, truncate, (set(), 0)),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
def test_no_statement_meets_another_id_space(
    mutation: Mutation,
    change: Change,
    expected: tuple[set[str], int],
    scene: Scene,
    sessions: Sessions,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(purge_session, "_LOCK_WAIT", "30s")
    mutation(monkeypatch)
    assert met_another_space(change, scene, sessions) == expected


def _locks_are_looked_up_for_the_table_of_the_beginning(patch: Patch) -> None:
    opening, oids = TermSession.open, list[int]()

    def open_again(self: TermSession) -> None:
        opening(self)
        assert self.shape is not None
        oids.append(self.shape.oid)
        self.shape = replace(self.shape, oid=oids[0])

    patch.setattr(TermSession, "open", open_again)


def _nobody_looks_which_table_bears_the_name(patch: Patch) -> None:
    holders = MarkSession.holders

    def unchanged(self: MarkSession) -> Holders:
        assert self.place is not None
        return replace(holders(self), table=self.place.space.table)

    patch.setattr(MarkSession, "holders", unchanged)


def read_beside_a_slow_writer(scene: Scene, session: MarkSession) -> list[int]:
    """Ids that marks bring after another table has taken the name, in which somebody writes 1 and commits behind 2."""
    holder, leader_id = uuid4(), uuid4()
    term = session.take_term(0, 0, holder, "test")
    assert term is not None
    found: list[int] = []

    def report(told: Report) -> None:
        if isinstance(told, Marked):
            found.extend(row[0] for row in told.rows)
        elif isinstance(told, ServerChanged):
            session.close()  # as it is told to the marker; the next mark opens it

    taker: Any = SimpleNamespace(taken=None, ids_restarted=False)
    reader = MarkReader(session, taker, report, failpoints.load(), writes=False)

    def read(marks: int = 5) -> None:
        for number in range(marks):
            reader.listed_at = 0.0  # the locks are listed behind each mark
            reader.perform(Mark(number, term, holder, leader_id, 1000))

    read()
    swap_with_the_same_sequence(scene.db)
    with scene.writer() as slow:
        assert scene.add(("cause", "1"), db=slow) == [1]
        assert scene.add(("other", "1")) == [2]
        read()
        slow.commit()
    read()
    return found


@pytest.mark.parametrize(
    ("mutation", "expected"),
    [
        (_as_it_is, [2, 1]),
        (_locks_are_looked_up_for_the_table_of_the_beginning, [2]),
        (_nobody_looks_which_table_bears_the_name, []),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
def test_a_gap_of_the_table_that_has_taken_the_name_is_read(
    mutation: Mutation, expected: list[int], scene: Scene, sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    assert read_beside_a_slow_writer(scene, sessions()) == expected
