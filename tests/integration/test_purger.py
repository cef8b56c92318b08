"""Which thread deletes what Kafka has acknowledged, on a real database."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from harvester.failpoints import load
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome, Rules
from harvester.relay.core import frames as f
from harvester.relay.purger import Purger
from tests.support.marking import TABLE
from tests.support.wait import eventually

pytestmark = pytest.mark.servers


class Shard:
    """A purger, its database, and what it says. `is_awaited`: something waits for each purge."""

    def __init__(self, dsn: str) -> None:
        self.db = psycopg.connect(dsn, autocommit=True)
        self.said: list[f.Frame] = []
        self.by: list[tuple[str, list[int]]] = []  # thread, ids
        self.index, self.is_crowded, self.is_awaited, self.unsettled = 0, False, True, 1
        self.failpoints, self.records, self.send = load(), self, self.said.append
        self.session = PurgeSession(dsn, TABLE, "test purger", Rules())
        self.session.ready()
        self.purger = Purger(self.session, 0.05, self)
        self.purge, self.quarantine = self.purger.purge_here, self.purger.quarantine

    def purged(self, ids: Sequence[int]) -> None:
        self.by.append((threading.current_thread().name, list(ids)))

    def quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        raise AssertionError(poison, outcome)

    def wake(self) -> None: ...
    def trusted(self) -> bool:
        return True

    def die(self, reason: str) -> None:
        raise AssertionError(reason)

    def add(self, count: int) -> list[Any]:
        """Rows of the outbox as they were read."""
        added = self.db.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 'topic', 'key' FROM generate_series(1, %s)"
            " RETURNING id, xmin::text::bigint",
            (count,),
        )
        return [SimpleNamespace(id=record_id, xmin=xmin, created_us=0) for record_id, xmin in added]

    def left(self) -> list[int]:
        return [row[0] for row in self.db.execute("SELECT id FROM outbox ORDER BY id")]

    def all_purged(self) -> list[int]:
        return sorted(record_id for _, ids in self.by for record_id in ids)


@pytest.fixture
def shard(database: str) -> Iterator[Shard]:
    made = Shard(database)
    yield made
    made.purger.stop()
    if made.purger.is_alive():
        made.purger.join(30)
    made.db.close()


HERE = threading.current_thread().name


def test_a_lone_row_that_is_waited_for_is_deleted_by_whoever_served_its_report(shard: Shard) -> None:
    (row,) = shard.add(1)
    shard.purge([row])  # the purger's thread does not even run
    assert shard.left() == []
    assert shard.by == [(HERE, [row.id])]


@pytest.mark.parametrize("why", ["nothing waits", "much is in flight", "the session is in use"])
def test_otherwise_the_purgers_thread_deletes_it(shard: Shard, why: str) -> None:
    (row,) = shard.add(1)
    shard.is_awaited = why != "nothing waits"
    shard.unsettled = 100 if why == "much is in flight" else 1
    if why == "the session is in use":
        with shard.purger._using:
            shard.purge([row])
    else:
        shard.purge([row])
    assert shard.left() == [row.id]
    assert shard.by == []
    shard.purger.start()
    eventually(lambda: shard.by == [("purger", [row.id])], what="a purge")
    assert shard.left() == []


def test_a_row_that_another_session_locks_is_left_to_the_purgers_thread(shard: Shard, database: str) -> None:
    first, second = shard.add(2)
    with psycopg.connect(database) as other:
        other.execute("SELECT 1 FROM outbox WHERE id = %s FOR UPDATE", (first.id,))
        shard.purge([first, second])
        assert shard.by == [(HERE, [second.id])]
        assert shard.left() == [first.id]
        shard.purger.start()
    eventually(lambda: shard.by[1:] == [("purger", [first.id])], what="a purge")
    assert shard.left() == []


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_session_that_breaks_is_left_to_the_purgers_thread(shard: Shard, database: str, moment: str) -> None:
    rows = shard.add(2)
    if moment == "before":
        end_session(shard)
        shard.purge(rows)
    else:
        with psycopg.connect(database) as other:
            other.execute("LOCK TABLE outbox")
            caller = threading.Thread(target=shard.purge, args=(rows,), name="reports")
            caller.start()
            eventually(lambda: is_waiting(shard), what="a purge that waits for a lock")
            end_session(shard)
            caller.join(30)
    assert shard.by == []
    shard.purger.start()
    eventually(lambda: shard.all_purged() == [row.id for row in rows], what="a purge")
    assert {thread for thread, _ in shard.by} == {"purger"}
    assert shard.left() == []


_OWN = "FROM pg_stat_activity WHERE application_name = 'test purger' AND datname = current_database()"


def end_session(shard: Shard) -> None:
    shard.db.execute(f"SELECT pg_terminate_backend(pid, 10000) {_OWN}")


def is_waiting(shard: Shard) -> bool:
    return shard.db.execute(f"SELECT count(*) {_OWN} AND wait_event_type = 'Lock'").fetchone() == (1,)


def test_rows_that_come_from_both_threads_are_each_purged_once(shard: Shard) -> None:
    shard.purger.start()
    rows = shard.add(300)
    for at in range(0, 300, 3):
        shard.unsettled = 1 if at % 2 else 100
        shard.purge(rows[at : at + 3])
    eventually(lambda: len(shard.all_purged()) >= 300, what="all purges")
    assert shard.all_purged() == [row.id for row in rows]
    assert shard.left() == []


def test_a_purge_is_planned_once_and_uses_the_index_although_the_table_was_empty_at_first(shard: Shard) -> None:
    """A plan from then would read the whole table each time."""
    connection = shard.session._connection
    assert connection is not None
    (first,) = shard.add(1)
    shard.purge([first])
    rows = shard.add(5_000)
    scans = "SELECT seq_scan FROM pg_stat_all_tables WHERE relname = 'outbox' AND schemaname = 'public'"
    connection.execute("SELECT pg_stat_force_next_flush()")
    before = shard.db.execute(scans).fetchone()
    for row in rows[:20]:
        shard.purge([row])
    (plans,) = connection.execute(
        "SELECT array_agg(DISTINCT custom_plans) FROM pg_prepared_statements WHERE statement LIKE 'DELETE%'"
    ).fetchall()[0]
    assert plans == [0]
    # Before version 18, the one scan of the term's only row would count as costly enough to compile each purge.
    assert connection.execute("SHOW jit").fetchone() == ("off",)
    connection.execute("SELECT pg_stat_force_next_flush()")
    connection.execute("SELECT 1")
    assert shard.db.execute(scans).fetchone() == before
