"""The archive: what purges keep for audits, in a table partitioned by day (UTC).

Purges must never fail for lack of a partition: a DEFAULT one takes rows for which no day exists. `ArchiveKeeper`
creates days in advance, moves rows from the DEFAULT partition to their days, and drops days beyond the retention;
several keepers may run at once. The clock is the database's, as for `purged_at`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg

from harvester.errors import OutboxError, SchemaError
from harvester.outbox.connection import connect, database_errors, execute, fetch_row, one_line
from harvester.outbox.sql.ddl import lock_statement
from harvester.outbox.tables import OutboxTable

Connection = psycopg.Connection[Any]

DAYS_AHEAD = 3
# Dropping a day locks the whole archive, and every purge waits behind that lock: give up soon, try again tomorrow.
LOCK_TIMEOUT_MS = 2_000
SILENCE_S = 3_600.0  # of the server: a statement may read all of an archive, or move the rows of a day

_EVERY_S = 3600.0
_AGAIN_S = 60.0  # after the database was unreachable

_INIT_HINT = "run `harvester init` with the same configuration"


@dataclass(frozen=True, slots=True)
class KeeperRun:
    """What the keeper did and, as `problem`, what it could not do."""

    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    problem: str | None = None


def create_archive(table: OutboxTable) -> list[str]:
    """The table, its DEFAULT partition, and an index for looking up ids.

    With "ids", the columns from kafka_value on stay NULL, so that changing the setting changes no table. Key and value
    are the bytes that Kafka got, independent of changes of the outbox's types.
    """
    index = OutboxTable(None, table.name).beside("archive_id")
    return [
        f"""CREATE TABLE IF NOT EXISTS {table.archive} (
    id                  BIGINT NOT NULL,
    incarnation         UUID,
    purged_at           TIMESTAMP WITH TIME ZONE NOT NULL,
    create_time         TIMESTAMP WITH TIME ZONE,
    kafka_topic         TEXT,
    kafka_key           BYTEA,
    kafka_value         BYTEA,
    kafka_header_keys   TEXT[],
    kafka_header_values TEXT[],
    kafka_partition     INTEGER
) PARTITION BY RANGE (purged_at)""",
        f"CREATE INDEX IF NOT EXISTS {index} ON {table.archive} (id)",
        f"CREATE TABLE IF NOT EXISTS {_default(table)} PARTITION OF {table.archive} DEFAULT",
    ]


def exists(connection: Connection, table: OutboxTable) -> bool:
    """Whether a table with the archive's name exists."""
    with database_errors(f"look for {table.archive}"):
        return bool(fetch_row(connection, "SELECT to_regclass($1) IS NOT NULL", table.archive)[0])


def check_archive(connection: Connection, table: OutboxTable) -> None:
    """Raises SchemaError if purges could not write an archive."""
    with database_errors(f"inspect {table.archive}"):
        partitioned, may_insert, user = fetch_row(
            connection,
            "SELECT c.relkind = 'p', has_table_privilege(c.oid, 'INSERT'), quote_ident(current_user)"
            " FROM (SELECT to_regclass($1) AS oid) named LEFT JOIN pg_catalog.pg_class c ON c.oid = named.oid",
            table.archive,
        )
    if partitioned is None:
        raise SchemaError(f"there is no archive {table.archive} in this database", hint=_INIT_HINT)
    if not partitioned:
        raise SchemaError(
            f"{table.archive} is not partitioned, so it cannot be the archive", hint="rename it, then init"
        )
    if not may_insert:
        raise SchemaError(
            f"this database user may not write the archive {table.archive}",
            hint=f"let the owner run: GRANT INSERT ON {table.archive} TO {user}",
        )


def keep_archive(connection: Connection, table: OutboxTable, retention: timedelta) -> KeeperRun:
    """Create the partitions of today and the next days, and drop those that ended before the retention began.

    Requires ownership of the archive. What could not be done is in `problem`; the rest is done. Raises
    DatabaseUnavailable when the session is lost.
    """
    created: list[str] = []
    dropped: list[str] = []
    problems: list[str] = []
    with database_errors(f"keep the archive {table.archive}"):
        now: datetime = fetch_row(connection, "SELECT now()")[0]
        today = now.astimezone(UTC).date()
        existing = _partitions(connection, table)
        # Today last: where its rows are already in the DEFAULT partition, moving them may take long, and fail.
        for ahead in range(DAYS_AHEAD, -1, -1):
            day = today + timedelta(days=ahead)
            if not _covered(existing, day):
                with _step(connection, problems, f"make the partition of {day}"):
                    _create_day(connection, table, day)
                if _covered(_partitions(connection, table), day):
                    created.append(_day_name(table, day))
        oldest = now - retention
        for name, _, end in existing:
            if end <= oldest:
                with _step(connection, problems, f"drop {name}"):
                    connection.execute(f"DROP TABLE IF EXISTS {name}")
                    dropped.append(name)
        # Only the owner clears the DEFAULT partition; for other users this is not a problem to report.
        owns = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_catalog.pg_class WHERE oid = to_regclass($1)"
        if fetch_row(connection, owns, table.archive)[0]:
            with _step(connection, problems, f"clear {_default(table)}"):
                strays = f"{_default(table)} WHERE purged_at < $1"
                # Of a table that is published without a replica identity, a DELETE of nothing fails, too.
                if fetch_row(connection, f"SELECT EXISTS (SELECT FROM {strays})", oldest)[0]:
                    execute(connection, f"DELETE FROM {strays}", oldest)
    return KeeperRun(tuple(created), tuple(dropped), "; ".join(problems) or None)


def _create_day(connection: Connection, table: OutboxTable, day: date) -> None:
    """Created separately and then attached: unlike CREATE … PARTITION OF, this does not block purges into other
    days.
    """
    if _covered(_partitions(connection, table), day):
        return  # another keeper was faster
    name, default = _day_name(table, day), _default(table)
    start, end = _start(day), _start(day + timedelta(days=1))
    connection.execute(f"CREATE TABLE IF NOT EXISTS {name} (LIKE {table.archive} INCLUDING DEFAULTS)")
    strays = f"{default} WHERE purged_at >= $1 AND purged_at < $2"
    if fetch_row(connection, f"SELECT EXISTS (SELECT FROM {strays})", start, end)[0]:
        connection.execute(f"LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE")
        execute(
            connection,
            f"WITH moved AS (DELETE FROM {strays} RETURNING *) INSERT INTO {name} SELECT * FROM moved",
            start,
            end,
        )
    bounds = f"FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
    connection.execute(f"ALTER TABLE {table.archive} ATTACH PARTITION {name} FOR VALUES {bounds}")


@contextmanager
def _step(connection: Connection, problems: list[str], what: str) -> Iterator[None]:
    """A separate transaction with a limit on waiting, one keeper at a time; failures are noted."""
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
            connection.execute(lock_statement())
            yield
    except psycopg.Error as error:
        if connection.closed or connection.broken:
            raise
        problems.append(f"could not {what}: {one_line(error)}")


def _partitions(connection: Connection, table: OutboxTable) -> list[tuple[str, datetime, datetime]]:
    """Name (quoted for SQL text), start and end of each day, without the DEFAULT partition."""
    rows = execute(
        connection,
        r"""SELECT b.name, b.bound[1]::timestamptz, b.bound[2]::timestamptz FROM (
            SELECT format('%I.%I', n.nspname, c.relname) AS name,
                   regexp_match(pg_get_expr(c.relpartbound, c.oid),
                                'FROM \(''([^'']*)''\) TO \(''([^'']*)''\)') AS bound
            FROM pg_catalog.pg_inherits i
            JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE i.inhparent = to_regclass($1)
        ) b WHERE b.bound IS NOT NULL ORDER BY 2""",
        table.archive,
    )
    return [(name, low, high) for name, low, high in rows.fetchall()]


def _covered(partitions: list[tuple[str, datetime, datetime]], day: date) -> bool:
    return any(low <= _start(day) < high for _, low, high in partitions)


def _start(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _day_name(table: OutboxTable, day: date) -> str:
    return table.beside(f"archive_{day:%Y%m%d}")


def _default(table: OutboxTable) -> str:
    return table.beside("archive_default")


class ArchiveKeeper(threading.Thread):
    """Maintains the archive immediately and then every hour; several harvesters may do so at the same time.

    `problem` receives what the keeper could not do, in words, and None when nothing is wrong.
    """

    def __init__(
        self,
        dsn: str,
        table: OutboxTable,
        retention: timedelta,
        application_name: str,
        problem: Callable[[str | None], None],
    ) -> None:
        super().__init__(name="harvester-archive", daemon=True)
        self._dsn, self._table, self._retention = dsn, table, retention
        self._application, self._problem = application_name, problem
        self._ended = threading.Event()

    def log_in(self, dsn: str) -> None:
        """Uses this for new connections."""
        self._dsn = dsn

    def stop(self) -> None:
        """End the thread without waiting for it."""
        self._ended.set()

    def run(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                self._problem(self._keep())
                wait_s = _EVERY_S
            except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it no day gets a partition
                self._problem(one_line(error) if isinstance(error, psycopg.Error | OutboxError) else repr(error))
                wait_s = _AGAIN_S

    def _keep(self) -> str | None:
        connection = connect(self._dsn, application_name=self._application, silence_s=SILENCE_S)
        try:
            check_archive(connection, self._table)
            return keep_archive(connection, self._table, self._retention).problem
        finally:
            connection.close()
