"""Leaders' sessions without a harvester around them, for tests of the term and of marks."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harvester.outbox.leader_session import MarkSession
from harvester.outbox.sql import queries
from harvester.outbox.tables import OutboxTable

from .harvesting import Embedded, Scene
from .wait import eventually

TABLE = OutboxTable.parse("outbox")
BOTH = pytest.mark.parametrize("marking", ["memory", "table"])


def mark(session: MarkSession, term: int, holder: UUID, marking: str = "table", high: int | None = None) -> list[int]:
    """Ids of a mark under a new leader id."""
    leader_id = uuid.uuid4() if marking == "table" else None
    rows = session.mark(term=term, holder=holder, leader_id=leader_id, limit=1000, high=high, gaps=())
    return [row[0] for row in rows]


def marked(scene: Scene) -> list[int]:
    """Ids of the rows that any leader has marked in the table."""
    return [row[0] for row in scene.db.execute("SELECT id FROM outbox WHERE leader_id IS NOT NULL ORDER BY id")]


def freeze(scene: Scene, session: MarkSession, term: int, holder: UUID) -> int:
    """A mark in the table whose result nobody reads: its backend hangs in a write and keeps its locks. Its pid.

    The outbox must hold more than sockets buffer.
    """
    assert session.shape is not None
    assert session.session is not None
    assert session._connection is not None
    where: dict[str, Any] = {"limit": 1000, "high": None, "gaps": ()}
    statement = queries.mark_in_table(
        TABLE, session.shape, fence=queries.Fence(term, holder), leader_id=uuid.uuid4(), **where
    )
    pid = session.session[0]
    session._connection.pgconn.send_query(statement.encode())
    session._connection.pgconn.flush()
    query = "SELECT wait_event = 'ClientWrite' FROM pg_stat_activity WHERE pid = %s"
    eventually(lambda: scene.db.execute(query, (pid,)).fetchone() == (True,), what="a backend that hangs in a write")
    return pid


def add_large(scene: Scene, rows: int = 300, bytes_each: int = 100_000) -> list[int]:
    """Rows of one key each, together larger than the buffers of any socket."""
    found = scene.db.execute(
        """INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)
           SELECT %s, 'large' || n, repeat('x', %s) FROM generate_series(1, %s) AS n RETURNING id""",
        (scene.topic, bytes_each, rows),
    )
    return sorted(row[0] for row in found)


def named(db: psycopg.Connection[Any]) -> set[int]:
    """Pids of the sessions that the term row names."""
    row = db.execute("SELECT sessions FROM outbox_term").fetchone()
    assert row is not None
    sessions = row[0] if not isinstance(row[0], str) else json.loads(row[0])
    return {session["pid"] for session in sessions}


def backends(scene: Scene) -> set[int]:
    """Pids of all live sessions of this database."""
    return {row[0] for row in scene.db.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")}


def scan_of(running: Embedded) -> Any:
    """The scan of a harvester's mark loop, to see which gaps it still watches."""
    parts = running.harvester._life.parts
    assert parts is not None
    return parts.marker._reader.scan


def no_gaps(running: Embedded) -> bool:
    """Whether the scan has passed everything that it watched."""
    scan = scan_of(running)
    return scan.high is not None and bool(scan.floor == scan.high + 1)


def wait_listed(running: Embedded) -> None:
    """Until the locks have been listed, at a time when all rows that were published by now had been read."""
    parts = running.harvester._life.parts
    assert parts is not None
    since = time.monotonic()
    eventually(lambda: parts.marker._reader.listed_at > since, what="a list of the locks")
