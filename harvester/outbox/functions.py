"""Makes, replaces and removes the functions for writers, within the transaction of `init`."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.function_sql import all_signatures, bodies, create_functions, drop_functions
from harvester.outbox.shape import ColumnShape
from harvester.outbox.tables import OutboxTable


def set_functions(
    connection: psycopg.Connection[Any], table: OutboxTable, shape: ColumnShape, *, wanted: bool | None
) -> list[str]:
    """Make (True) or remove (False) the functions; None leaves them as they are. Returns what was done, in words."""
    if wanted is None:
        return []
    found = {name: source for name in all_signatures(table) if (source := _source(connection, name)) is not None}
    wanted_sources = bodies(table, shape) if wanted else {}
    if found == wanted_sources:
        return []
    statements = create_functions(table, shape) if wanted else drop_functions(found)
    for statement in statements:
        psycopg.RawCursor(connection).execute(statement.encode())
    changed = [name for name in wanted_sources or found if found.get(name) != wanted_sources.get(name)]
    done = "removed" if not wanted else "replaced" if found else "created"
    return [f"{done} the function {name.split('(')[0]}" for name in changed]


def _source(connection: psycopg.Connection[Any], name: str) -> str | None:
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    query = "SELECT prosrc FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure($1)"
    row = cursor.execute(query, (name,)).fetchone()
    return str(row[0]) if row is not None else None
