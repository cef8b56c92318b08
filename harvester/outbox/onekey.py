"""What the database tells of one key: its rows in the outbox, and its records in quarantine.

There is no index on an outbox's key, so a large table takes long to look through: the statement timeout of the
connection bounds that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.connect import database_errors
from harvester.outbox.overview import AGE_S, COUNT_BOUND
from harvester.outbox.schema import inspect
from harvester.outbox.tables import OutboxTable


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows of a key. `rows` and `quarantined` stop counting at a bound; for `rows` `capped` says so."""

    rows: int
    capped: bool
    oldest_id: int | None
    oldest_age_s: float | None
    quarantined: int
    newest_error: str | None


def read_key(
    connection: psycopg.Connection[Any], table: OutboxTable, key: bytes, *, bound: int = COUNT_BOUND
) -> KeyRows:
    """What stands of this key, whose bytes are as Kafka would get them. Raises OutboxError and psycopg.Error."""
    shape = inspect(connection, table)
    given = "$1::bytea" if shape.key_type == "bytea" else "convert_from($1::bytea, 'UTF8')"
    query = f"""WITH rows AS MATERIALIZED (
        SELECT id, create_time FROM {table.sql} WHERE kafka_key = {given} LIMIT {bound + 1}
    ), oldest AS (SELECT * FROM rows ORDER BY id LIMIT 1), dead AS MATERIALIZED (
        SELECT quarantined_at, error FROM {table.quarantine} WHERE kafka_key = {given} LIMIT {bound}
    )
    SELECT (SELECT count(*) FROM rows), (SELECT id FROM oldest),
        (SELECT {AGE_S} FROM oldest),
        (SELECT count(*) FROM dead), (SELECT error FROM dead ORDER BY quarantined_at DESC LIMIT 1)"""
    with database_errors(f"look for a key in {table}"):
        found = psycopg.RawCursor(connection, row_factory=tuple_row).execute(query, (key,)).fetchone()
    assert found is not None, "the query gives one row"
    count, oldest_id, age_s, quarantined, error = found
    age_s = None if age_s is None else max(0.0, age_s)  # a writer's clock may be ahead
    return KeyRows(min(count, bound), count > bound, oldest_id, age_s, quarantined, error)
