"""What the database alone tells about a harvester: who leads, what waits, what was given up.

Needs no running harvester and disturbs none: plain reads, and counting stops at a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.connect import database_errors
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_session import Owner
from harvester.status import Backlog

Connection = psycopg.Connection[Any]

COUNT_BOUND = 100_000
# How old a row is, in seconds; NULL where create_time is `infinity` or `-infinity`.
AGE_S = "CASE WHEN isfinite(create_time) THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Records that were given up. `records` stops counting at a bound; then `capped` is true."""

    records: int
    capped: bool
    newest_at: datetime | None
    newest_error: str | None


@dataclass(frozen=True, slots=True)
class Overview:
    """One moment's view. `term` is 0 and `holder` None until a harvester has led for the first time.

    `holder` is who took the latest term: the database does not know whether it still lives.
    """

    shape: OutboxShape
    schema_version: int
    outbox_id: UUID
    incarnation: UUID
    delivery: str
    term: int
    holder: UUID | None
    holder_name: str | None
    acquired_at: datetime | None
    owner: Owner
    backlog: Backlog
    quarantine: Quarantine


def read_overview(connection: Connection, table: OutboxTable, *, bound: int = COUNT_BOUND) -> Overview:
    """Everything that `harvester status` shows; raises SchemaError where `inspect` does."""
    shape = inspect(connection, table)
    with database_errors(f"read the state of {table}"):
        row = _row(
            connection,
            "SELECT schema_version, outbox_id, incarnation, delivery, term, holder, holder_name, acquired_at,"
            f" leader_group, kafka_cluster FROM {table.term}",
        )
        return Overview(
            shape=shape,
            schema_version=row[0],
            outbox_id=row[1],
            incarnation=row[2],
            delivery=row[3],
            term=row[4],
            holder=row[5],
            holder_name=row[6],
            acquired_at=row[7],
            owner=Owner(row[8], row[9]),
            backlog=_backlog(connection, table, bound),
            quarantine=_quarantine(connection, table, bound),
        )


def read_backlog(connection: Connection, table: OutboxTable, *, bound: int = COUNT_BOUND) -> Backlog:
    """How many rows stand in the outbox and in quarantine, up to `bound`, and the age of the outbox's first."""
    with database_errors(f"count the rows of {table}"):
        counted = f"SELECT count(*) FROM (SELECT FROM {table.quarantine} LIMIT {bound}) AS bounded"
        return replace(_backlog(connection, table, bound), quarantine=_row(connection, counted)[0])


def _backlog(connection: Connection, table: OutboxTable, bound: int) -> Backlog:
    count, age_s = _row(
        connection,
        f"""SELECT (SELECT count(*) FROM (SELECT FROM {table.sql} LIMIT {bound + 1}) AS bounded),
        (SELECT {AGE_S} FROM {table.sql} ORDER BY id LIMIT 1)""",
    )
    # A writer's clock may be ahead of the server's, where it writes create_time itself.
    age_s = None if age_s is None else max(0.0, age_s)
    return Backlog(records=min(count, bound), capped=count > bound, oldest_age_s=age_s)


def _quarantine(connection: Connection, table: OutboxTable, bound: int) -> Quarantine:
    # Sorting the whole table could be long; beyond the bound the newest of the counted ones has to do.
    count, newest_at, error = _row(
        connection,
        f"""WITH bounded AS MATERIALIZED (
            SELECT quarantined_at, error FROM {table.quarantine} LIMIT {bound + 1}
        ), newest AS (SELECT * FROM bounded ORDER BY quarantined_at DESC LIMIT 1)
        SELECT (SELECT count(*) FROM bounded), (SELECT quarantined_at FROM newest), (SELECT error FROM newest)""",
    )
    return Quarantine(records=min(count, bound), capped=count > bound, newest_at=newest_at, newest_error=error)


def _row(connection: Connection, query: str) -> tuple[Any, ...]:
    row = psycopg.Cursor(connection, row_factory=tuple_row).execute(query).fetchone()
    assert row is not None, "every query here gives one row"
    return row
