"""What the tests of leases share: the outbox and the lease's row as they stand, and time that passes on demand."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row, tuple_row

from harvester.record import OutboxRecord

from .wait import eventually


def record(text: object) -> OutboxRecord:
    """A record that can be told from others."""
    return OutboxRecord("t", "k", str(text))


def values(dsn: str) -> list[str]:
    """What was committed, in order of ids."""
    with psycopg.connect(dsn, row_factory=tuple_row) as connection:
        return [row[0] for row in connection.execute("SELECT kafka_value FROM outbox ORDER BY id")]


def lease_row(dsn: str, name: str) -> dict[str, Any] | None:
    """The row as committed."""
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        return connection.execute("SELECT * FROM outbox_lease WHERE name = %s", (name,)).fetchone()


def top(dsn: str) -> tuple[int, int, str | None]:
    """Generation, sequence and position as committed."""
    row = lease_row(dsn, "reader")
    assert row is not None
    return row["generation"], row["sequence"], row["upstream_position"]


def end(dsn: str, *names: str) -> None:
    """Let leases expire: their end moves to where the clock has passed it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_lease SET expires_at = clock_timestamp() - interval '1 second' WHERE name = ANY(%s)",
            (list(names),),
        )


def wait_blocked(dsn: str, pid: int) -> None:
    """Until this session waits for a lock."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: connection.execute(query, (pid,)).fetchone() == (True,), what="a session that waits")
