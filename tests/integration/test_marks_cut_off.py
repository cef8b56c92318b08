"""A mark cut off by its limit has not looked above its last row, also where a row went while it waited (P10)."""

from __future__ import annotations

import threading
from uuid import uuid4

import psycopg
import pytest

from harvester.outbox.leader_session import MarkSession
from harvester.relay.core.scan import Scan
from tests.support.marking import TABLE
from tests.support.wait import eventually

pytestmark = pytest.mark.servers

LOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
ADD = "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'k' FROM generate_series(1, %s)"


def test_a_row_deleted_under_a_mark_that_writes_does_not_close_the_gap_behind_it(database: str) -> None:
    """Ten rows commit late; while a mark of five of them waits for the first one's lock, that row is deleted.

    The mark returns four rows, fewer than its limit, and has not seen the other five.
    """
    session, scan, holder, leader_id = MarkSession(database, TABLE, "test", 30.0), Scan(), uuid4(), uuid4()

    def mark() -> list[int]:
        rows = session.mark(
            term=1, holder=holder, leader_id=leader_id, limit=5, high=scan.high, gaps=scan.ranges()
        )  # fmt: skip
        ids = [row[0] for row in rows]
        scan.read(ids, 5, writes=True)
        found = session.holders()
        scan.listed(found.transactions, found.last_value)
        return ids

    with psycopg.connect(database) as late, psycopg.connect(database, autocommit=True) as db:
        db.execute("UPDATE outbox_term SET term = 1, holder = %s", (holder,))
        late.execute(ADD, (10,))
        db.execute(ADD, (1,))
        session.open()
        try:
            assert mark() == [11]
            late.commit()
            assert scan.ranges(), "the gap waits for its holder"
            found = session.holders()
            scan.listed(found.transactions, found.last_value)  # the holder is gone: one last look
            late.execute("DELETE FROM outbox WHERE id = 1")
            result: list[int] = []
            waiting = threading.Thread(target=lambda: result.extend(mark()))
            waiting.start()
            eventually(lambda: db.execute(LOCKED).fetchone() == (1,), what="the mark waiting for the row")
            late.commit()
            waiting.join(60)
            assert result == [2, 3, 4, 5]
            assert [*mark(), *mark()] == [6, 7, 8, 9, 10]
        finally:
            session.close()
