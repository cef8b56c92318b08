"""The schema: create, check and migrate (`init`), and examine it (`inspect`).

Everything `init` does happens in one transaction under an advisory lock, so it is done completely or not at all, and
concurrent runs are safe. It changes nothing in an existing outbox; one that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from harvester.errors import SchemaError
from harvester.outbox import archive as archives
from harvester.outbox.catalog import CATALOG_SQL, Facts, Relation, catalog_parameters, parse_catalog
from harvester.outbox.connection import database_errors, execute, fetch_row
from harvester.outbox.shape import (
    INIT_HINT,
    ColumnShape,
    OutboxShape,
    check_companions,
    check_place,
    outbox_shape,
    quarantine_mismatches,
)
from harvester.outbox.sql import ddl
from harvester.outbox.sql.stash_function import all_signatures, bodies, create_functions, drop_functions
from harvester.outbox.tables import OutboxTable

Connection = psycopg.Connection[Any]

# Creating a trigger waits for every writer, and all later writers wait behind it: give up soon.
LOCK_TIMEOUT_MS = 5_000


def init(
    connection: Connection,
    table: OutboxTable,
    *,
    notify: bool | None = None,
    functions: bool | None = None,
    value_type: ddl.KafkaType = "text",
    archive: bool = False,
    archive_retention: timedelta = timedelta(days=7),
) -> list[str]:
    """Create, check and migrate; returns what was done, in words, empty if there was nothing to do.

    `notify` creates (True) or removes (False) the wake-up trigger, `functions` the functions for writers in SQL; None
    leaves them as they are. `value_type` is the type of kafka_value in a new table. `archive` creates the archive and
    maintains its partitions; an existing archive is never removed. Raises SchemaError if a table does not fit or the
    schema is newer than this version, DatabaseUnavailable for a lost session or a lock that could not be obtained.
    """
    done: list[str] = []
    with database_errors(f"set up {table}"), locked(connection):
        facts = read_facts(connection, table)
        check_place(table, facts)
        if facts.outbox is None:
            connection.execute(ddl.create_outbox(table, value_type))
            done.append(f"created table {table.sql}")
            facts = read_facts(connection, table)
        shape = outbox_shape(table, facts)
        # The companions belong in the schema of the outbox, not in the first one of the search path.
        placed = OutboxTable(schema=shape.schema, name=table.name)
        _refuse_newer(connection, placed, facts)
        if facts.term is None:
            connection.execute(ddl.create_term(placed))
            done.append(f"created table {placed.term}, schema version {ddl.schema_version()}")
        if facts.quarantine is None:
            connection.execute(ddl.create_quarantine(placed, shape.key_type, shape.value_type))
            done.append(f"created table {placed.quarantine}")
        else:
            _retype(connection, placed, facts.quarantine, shape, done)
        if connection.execute(ddl.insert_term(placed)).rowcount and facts.term is not None:
            done.append(f"put the missing row back into {placed.term}")
        had_leases = _has_leases(connection, placed)
        try:
            with connection.transaction():
                before = _migrate(connection, placed)
        except psycopg.errors.UndefinedColumn:
            check_companions(table, read_facts(connection, table), shape)  # raises if one of the tables is not ours
            raise
        if before < ddl.schema_version() and facts.term is not None:
            done.append(f"migrated the schema from version {before} to {ddl.schema_version()}")
        _restore_leases(connection, placed)
        if not had_leases and _has_leases(connection, placed):
            done.append(f"created table {placed.lease}")
        _set_notify(connection, placed, table.channel, wanted=notify, present=shape.has_notify, done=done)
        done += set_functions(connection, placed, shape, wanted=functions)
        check_companions(table, read_facts(connection, table), shape)
        if archive:
            _keep_archive(connection, placed, archive_retention, done)
        if _refresh(connection, placed, shape):
            done.append("renewed the incarnation: ids of this outbox may start again")
    return done


def inspect(connection: Connection, table: OutboxTable, *, read_only: bool = False) -> OutboxShape:
    """Check everything the relay depends on; raises SchemaError with all problems.

    `read_only` requires no privilege but SELECT.
    """
    with database_errors(f"inspect {table}"):
        facts = read_facts(connection, table)
        shape = outbox_shape(table, facts)
        check_companions(table, facts, shape, read_only=read_only)
        version = _version(connection, table)
    if version is None:
        raise SchemaError(f"the table {table.term} is empty", hint=INIT_HINT)
    if version < ddl.schema_version():
        raise SchemaError(
            f"the schema of {table} has version {version}, but this harvester needs {ddl.schema_version()}",
            hint=INIT_HINT,
        )
    _refuse_version(table, version)
    return shape


def find_shape(connection: Connection, table: OutboxTable) -> OutboxShape | None:
    """The shape of the outbox itself, None if it does not exist; raises SchemaError if it does not fit."""
    with database_errors(f"inspect {table}"):
        facts = read_facts(connection, table)
        check_place(table, facts)
        return outbox_shape(table, facts) if facts.outbox is not None else None


def refresh_incarnation(connection: Connection, table: OutboxTable) -> bool:
    """Renew the incarnation if ids of the outbox may start again; returns whether it was renewed.

    That is the case if the outbox was dropped and recreated, or its sequence went back (TRUNCATE … RESTART IDENTITY, a
    restored copy). The sequence's highest value is recorded for the next time. Takes the term row's lock.
    """
    with database_errors(f"refresh the incarnation of {table}"):
        shape = outbox_shape(table, read_facts(connection, table))
        return _refresh(connection, table, shape)


def sql(
    table: OutboxTable,
    shape: OutboxShape | None = None,
    notify: bool = False,
    *,
    functions: bool = False,
    value_type: ddl.KafkaType = "text",
    archive: bool = False,
) -> str:
    """The schema as a psql script, in one transaction, that may be run repeatedly.

    Given the shape of an existing outbox, only its companions are created, with its types. The functions name their
    schema, `public` if none is known.
    """
    columns = shape or ddl.new_columns(value_type)
    statements = [
        "BEGIN",
        ddl.lock_statement(),
        *([ddl.create_outbox(table, value_type)] if shape is None else []),
        ddl.create_term(table),
        ddl.create_quarantine(table, columns.key_type, columns.value_type),
        ddl.insert_term(table),
        *(statement for migration in ddl.MIGRATIONS for statement in migration(table)),
        ddl.set_version(table),
        *(ddl.create_notify(table, table.channel) if notify else ()),
        *(archives.create_archive(table) if archive else ()),
    ]
    if functions:
        schema = shape.schema if shape else table.schema or "public"
        statements += create_functions(OutboxTable(schema, table.name), columns)
    return ";\n\n".join([*statements, "COMMIT"]) + ";\n"


def read_facts(connection: Connection, table: OutboxTable) -> Facts:
    """Read the catalog in one round trip; needs no privilege on the tables. Raises psycopg's errors."""
    # A cursor of a known class: the connection may belong to a host that has set its own factories.
    cursor = psycopg.Cursor(connection, row_factory=tuple_row)
    row = cursor.execute(CATALOG_SQL, catalog_parameters(table)).fetchone()
    if row is None:
        raise SchemaError(f"the catalog query returned nothing for {table}")
    return parse_catalog(row)


@contextmanager
def locked(connection: Connection) -> Iterator[None]:
    """A transaction that excludes others of its kind; it waits at most LOCK_TIMEOUT_MS for table locks."""
    outermost = connection.info.transaction_status == TransactionStatus.IDLE
    with connection.transaction():
        if outermost:
            # A snapshot from before the wait for the lock would not show what the other `init` has done.
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute(ddl.lock_statement())
        before = _scalar(connection, "SELECT current_setting('lock_timeout')")
        connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        yield
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (before,))


def _retype(connection: Connection, table: OutboxTable, found: Relation, shape: OutboxShape, done: list[str]) -> None:
    for column, theirs, ours in quarantine_mismatches(found, shape):
        kind: ddl.KafkaType = "bytea" if ours == "bytea" else "text"
        connection.execute(ddl.retype_quarantine(table, column, kind))
        done.append(f"changed {column} of {table.quarantine} from {theirs} to {ours}, as in the outbox")


def _migrate(connection: Connection, table: OutboxTable) -> int:
    """Run the missing migrations; returns the previous version."""
    version = _version(connection, table) or 1
    if version < ddl.schema_version():
        for migration in ddl.MIGRATIONS[version - 1 :]:
            for statement in migration(table):
                connection.execute(statement)
        connection.execute(ddl.set_version(table))
    return version


def _has_leases(connection: Connection, table: OutboxTable) -> bool:
    return bool(fetch_row(connection, "SELECT to_regclass($1) IS NOT NULL", table.lease)[0])


def _restore_leases(connection: Connection, table: OutboxTable) -> None:
    """Recreate the table of leases if it was dropped after its migration."""
    if ddl.exactly_once in ddl.MIGRATIONS and not _has_leases(connection, table):
        for statement in ddl.create_leases(table):
            connection.execute(statement)


def _set_notify(
    connection: Connection,
    table: OutboxTable,
    channel: str,
    *,
    wanted: bool | None,
    present: bool,
    done: list[str],
) -> None:
    if wanted is None or wanted == present:
        return
    statements = ddl.create_notify(table, channel) if wanted else [ddl.drop_notify(table, channel)]
    for statement in statements:
        connection.execute(statement)
    function = ddl.notify_function(table)
    if wanted:
        done.append(f"created the notify trigger on {table.sql}, and its function {function}")
    else:
        done.append(f"removed the notify trigger on {table.sql}; its function {function} stays")


def _keep_archive(connection: Connection, table: OutboxTable, retention: timedelta, done: list[str]) -> None:
    if not archives.exists(connection, table):
        for statement in archives.create_archive(table):
            connection.execute(statement)
        done.append(f"created table {table.archive}")
    archives.check_archive(connection, table)
    kept = archives.keep_archive(connection, table, retention)
    done.extend(f"created partition {name}" for name in kept.created)
    done.extend(f"dropped partition {name}" for name in kept.dropped)
    if kept.problem:
        done.append(kept.problem)


def _refresh(connection: Connection, table: OutboxTable, shape: OutboxShape) -> bool:
    if shape.sequence is None:
        return False
    return bool(_scalar(connection, ddl.refresh_statement(table, shape.sequence, shape.oid)))


def _version(connection: Connection, table: OutboxTable) -> int | None:
    version = _scalar(connection, f"SELECT schema_version FROM {table.term}")
    return int(version) if version is not None else None


def _refuse_newer(connection: Connection, table: OutboxTable, facts: Facts) -> None:
    if facts.term is not None and "schema_version" in facts.term.columns:
        _refuse_version(table, _version(connection, table))


def _refuse_version(table: OutboxTable, version: int | None) -> None:
    if version is not None and version > ddl.schema_version():
        raise SchemaError(
            f"the schema of {table} has version {version}, but this harvester only supports {ddl.schema_version()}",
            hint="use a newer harvester: one has migrated the database",
        )


def _scalar(connection: Connection, query: str) -> Any:
    row = execute(connection, query).fetchone()
    return row[0] if row is not None else None


def set_functions(connection: Connection, table: OutboxTable, shape: ColumnShape, *, wanted: bool | None) -> list[str]:
    """Create (True) or remove (False) the functions; None leaves them as they are. Returns what was done, in words."""
    if wanted is None:
        return []
    query = (
        "SELECT name, p.prosrc FROM unnest($1::text[]) AS name"
        " JOIN pg_catalog.pg_proc p ON p.oid = pg_catalog.to_regprocedure(name)"
    )
    found = dict(execute(connection, query, all_signatures(table)).fetchall())
    wanted_sources = bodies(table, shape) if wanted else {}
    if found == wanted_sources:
        return []
    statements = create_functions(table, shape) if wanted else drop_functions(found)
    for statement in statements:
        execute(connection, statement)
    changed = [name for name in wanted_sources or found if found.get(name) != wanted_sources.get(name)]
    done = "removed" if not wanted else "replaced" if found else "created"
    return [f"{done} the function {name.split('(')[0]}" for name in changed]
