"""Adopts and abandons tables, each in one transaction under the lock of `init`."""

from __future__ import annotations

from typing import Any

import psycopg

from harvester.errors import SchemaError
from harvester.outbox.connection import database_errors, execute
from harvester.outbox.schema import LOCK_TIMEOUT_MS, locked, read_facts
from harvester.outbox.shape import outbox_shape
from harvester.outbox.sql import adoption
from harvester.outbox.sql.adoption import AdoptedTable, Route
from harvester.outbox.sql.ddl import lock_statement
from harvester.outbox.tables import OutboxTable

_LOOK = """SELECT n.nspname, c.relname, c.relkind::text, ARRAY(
    SELECT ARRAY[a.attname::text, format_type(a.atttypid, NULL)] FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = pg_catalog.to_regclass($1)"""


def statements(connection: psycopg.Connection[Any], table: OutboxTable, source: str, route: Route | None) -> list[str]:
    """The statements that `adopt` executes; `source` is a name as in SQL. Raises SchemaError."""
    with database_errors(f"look at {source}"):
        shape = outbox_shape(table, read_facts(connection, table))
        row = execute(connection, _LOOK, source).fetchone()
    if row is None:
        raise SchemaError(
            f"there is no table {source} in this database", hint="name the table whose rows are to become records"
        )
    schema, name, kind, columns = row
    placed, found = OutboxTable(shape.schema, table.name), OutboxTable(schema, name)
    if route is None:
        return adoption.abandon(placed, found)
    return adoption.adopt(placed, shape, AdoptedTable(found, kind, dict(columns)), route)


def script(connection: psycopg.Connection[Any], table: OutboxTable, source: str, route: Route | None) -> str:
    """The same for psql, as `adopt` does it: in one transaction, so that no row comes between two triggers."""
    locks = [lock_statement(), f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"]
    return ";\n\n".join(["BEGIN", *locks, *statements(connection, table, source, route), "COMMIT"]) + ";\n"


def adopt(connection: psycopg.Connection[Any], table: OutboxTable, source: str, route: Route | None) -> None:
    """From now on each new row of `source` also becomes a record; a table adopted before gets the new route.

    Without a route, new rows are no longer captured; those waiting in the outbox are still published. Waits for the
    table's writers, but no longer than `init` would. Raises SchemaError, DatabaseUnavailable.
    """
    with database_errors(f"adopt {source}"), locked(connection):
        for statement in statements(connection, table, source, route):
            execute(connection, statement)
