"""Makes, replaces and removes the function `outbox_stash`, within the transaction of `init`."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.function_sql import body, create_function, drop_function, signature, signatures
from harvester.outbox.shape import ColumnShape
from harvester.outbox.tables import OutboxTable


def set_function(
    connection: psycopg.Connection[Any], table: OutboxTable, shape: ColumnShape, *, wanted: bool | None
) -> list[str]:
    """Make (True) or remove (False) the function; None leaves it as it is. Returns what was done, in words."""
    if wanted is None:
        return []
    there = {name: source for name in signatures(table) if (source := _source(connection, name)) is not None}
    if wanted:
        if there == {signature(table, shape.key_type, shape.value_type): body(table, shape)}:
            return []
        statements, done = create_function(table, shape), "replaced" if there else "created"
    else:
        if not there:
            return []
        statements, done = drop_function(table), "removed"
    for statement in statements:
        psycopg.RawCursor(connection).execute(statement.encode())
    return [f"{done} the function {table.beside('stash')}"]


def _source(connection: psycopg.Connection[Any], name: str) -> str | None:
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    query = "SELECT prosrc FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure($1)"
    row = cursor.execute(query, (name,)).fetchone()
    return str(row[0]) if row is not None else None
