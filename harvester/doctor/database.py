"""Reads what the doctor needs to know about PostgreSQL: in one session, with a brief second one to detect poolers.

All statements only read, and work from PostgreSQL 13 on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import psycopg

from harvester.config import Config
from harvester.doctor.facts import Clock, Connections, DatabaseFacts, Holder, Index, Pooling, Vacuum
from harvester.errors import SchemaError
from harvester.outbox.catalog import Facts
from harvester.outbox.connection import (
    Connection,
    connect,
    database_errors,
    fetch_row,
    is_pooled,
    lends_backends,
    one_line,
    server_identity,
)
from harvester.outbox.leader_session import ANYONE, Owner
from harvester.outbox.overview import HEAD_ROWS, KeySkew, read_skew
from harvester.outbox.schema import read_facts
from harvester.outbox.sql.grants import notice_columns
from harvester.outbox.tables import OutboxTable

# The values after RESET: our session has set some of these for itself.
SETTINGS = "SELECT name, coalesce(reset_val, '') FROM pg_catalog.pg_settings WHERE name = ANY(%s)"
WANTED_SETTINGS = (
    "autovacuum", "track_counts", "autovacuum_vacuum_threshold", "autovacuum_vacuum_scale_factor", "fsync",
    "full_page_writes", "synchronous_commit", "synchronous_standby_names", "server_version",
    "idle_in_transaction_session_timeout", "max_prepared_transactions",
)  # fmt: skip

# The view's own rule for who may see other roles' activity.
SEES_ALL = "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"

# A role that does not see everything sees only user and database of other roles' sessions, with NULL as their type: all
# sessions that have both are counted then. That may count a parallel worker, but never mistakes a full server for an
# empty one.
CONNECTIONS = """
WITH sessions AS (
    SELECT datid, usesysid FROM pg_catalog.pg_stat_activity
    WHERE backend_type = 'client backend'
       OR (backend_type IS NULL AND datid IS NOT NULL AND usesysid IS NOT NULL)
)
SELECT (SELECT count(*) FROM sessions),
       current_setting('max_connections')::int,
       current_setting('superuser_reserved_connections')::int
           + coalesce(current_setting('reserved_connections', true), '0')::int,
       r.rolconnlimit,
       (SELECT count(*) FROM sessions WHERE usesysid = r.oid),
       d.datconnlimit,
       (SELECT count(*) FROM sessions WHERE datid = d.oid)
FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
WHERE r.rolname = current_user AND d.datname = current_database()
"""

# n_dead_tup and when it was last reduced.
VACUUM = """
SELECT greatest(c.reltuples, s.n_live_tup, 0)::float8, coalesce(s.n_dead_tup, 0), coalesce(c.reloptions, '{}'),
       extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float8
FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_stat_user_tables s ON s.relid = c.oid
WHERE c.oid = %s
"""

# Everything with a snapshot of this database; walreceiver sessions of standbys with hot_standby_feedback; slots that
# hold back rows of tables (catalog_xmin only holds the catalog's); prepared transactions. Also sessions that wrote to
# the outbox long ago and are still open: their ids are open (P10). Since when others have written is NULL for a role
# that does not see everything.
HOLDERS = """
SELECT 'transaction', format('%%s (pid %%s, %%s)', coalesce(nullif(application_name, ''), usename), pid, state),
       extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_catalog.pg_stat_activity
WHERE backend_xmin IS NOT NULL AND backend_type = 'client backend' AND datname = current_database()
    AND pid <> pg_backend_pid()
UNION ALL
SELECT 'writer', format('%%s (pid %%s, %%s)', coalesce(nullif(a.application_name, ''), a.usename), a.pid, a.state),
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
WHERE l.relation = %(outbox)s AND l.mode = 'RowExclusiveLock' AND l.granted AND a.pid <> pg_backend_pid()
    AND a.xact_start IS NOT NULL
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
UNION ALL
SELECT 'prepared', gid, extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT 'slot', slot_name || CASE WHEN active THEN '' ELSE ' (inactive)' END, NULL
FROM pg_catalog.pg_replication_slots WHERE xmin IS NOT NULL AND NOT active
ORDER BY 3 DESC NULLS FIRST
LIMIT 50
"""

STANDBYS = "SELECT count(*) FROM pg_catalog.pg_stat_replication"

INDEXES = """
SELECT c.relname, i.indisvalid,
       ARRAY(SELECT a.attname FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey))
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %s
ORDER BY c.relname
"""

# to_regclass, then privileges: neither fails for a missing table. The last parameter: the columns of a notice.
BESIDE = """
SELECT to_regclass($1) IS NOT NULL,
       CASE WHEN to_regclass($2) IS NULL THEN 'missing'
            WHEN (SELECT relkind <> 'p' FROM pg_catalog.pg_class WHERE oid = to_regclass($2)) THEN 'plain'
            WHEN has_table_privilege(to_regclass($2)::oid, 'INSERT') THEN 'ready'
            ELSE 'denied' END,
       (SELECT bool_and(has_column_privilege(to_regclass($3)::oid, name, 'INSERT')) FROM unnest($4::text[]) AS name)
"""


T = TypeVar("T")

_APPLICATION = "harvester doctor"
_CLOCK_LOOKS = 5


def read_database(config: Config) -> DatabaseFacts:
    """Everything that this role may see; `unread` lists what is denied. Raises DatabaseUnavailable."""
    with (
        closing(connect(config.dsn, application_name=_APPLICATION, may_be_lent=True)) as connection,
        database_errors("look at the database"),
    ):
        return _read(config, connection)


def _read(config: Config, connection: Connection) -> DatabaseFacts:
    table, unread = config.table, dict[str, str]()

    def part(name: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except (psycopg.Error, SchemaError) as error:
            if connection.closed:
                raise
            unread[name] = one_line(error)
            return otherwise

    facts = read_facts(connection, table)
    placed = OutboxTable(facts.outbox.schema, table.name) if facts.outbox is not None else table
    untold: tuple[str | None, str | None] = (None, None)
    delivery, progress_topic = part("delivery", lambda: _delivery(connection, placed, facts), untold)
    lease, archive, notices = part("beside", lambda: _beside(connection, placed, facts), (False, "missing", False))
    oid = facts.outbox.oid if facts.outbox is not None else 0
    return DatabaseFacts(
        version=facts.server_version,
        settings=part("settings", lambda: dict(connection.execute(SETTINGS, (list(WANTED_SETTINGS),)).fetchall()), {}),
        clock=_clock(connection),
        sees_all=part("privileges", lambda: bool(fetch_row(connection, SEES_ALL)[0]), False),
        identity_known=server_identity(connection) is not None,
        catalog=facts,
        schema_version=part("schema version", lambda: _schema_version(connection, placed, facts), None),
        owner=part("leader group", lambda: _owner(connection, placed, facts), ANYONE),
        delivery=delivery,
        progress_topic=progress_topic,
        lease=lease,
        archive=archive if config.archive != "off" else None,
        notices=notices if config.poison.notice_topic else None,
        connections=part("connections", lambda: Connections(*fetch_row(connection, CONNECTIONS)), None),
        vacuum=part("vacuum", lambda: _vacuum(connection, oid), None),
        holders=part("holders", lambda: _holders(connection, oid), None),
        indexes=part("indexes", lambda: _indexes(connection, oid), ()),
        standbys=part("standbys", lambda: int(fetch_row(connection, STANDBYS)[0]), 0),
        skew=part("keys", lambda: _skew(connection, placed, facts), None),
        topics=part("topics", lambda: _topics(connection, placed, facts), ()),
        # Last: it opens sessions, which would be counted above while they are closing.
        pooling=part("pooling", lambda: _pooling(connection, config.dsn), Pooling.NONE),
        unread=unread,
    )


def _pooling(connection: Connection, dsn: str) -> Pooling:
    if lends_backends(connection, dsn, _APPLICATION):
        return Pooling.TRANSACTION
    return Pooling.SESSION if is_pooled(connection) else Pooling.NONE


def _clock(connection: Connection) -> Clock:
    looks = []
    for _ in range(_CLOCK_LOOKS):
        before = time.time()
        theirs = float(fetch_row(connection, "SELECT extract(epoch FROM clock_timestamp())::float8")[0])
        after = time.time()
        looks.append(Clock(theirs - (before + after) / 2, (after - before) / 2))
    return min(looks, key=lambda look: look.uncertainty_s)


def _schema_version(connection: Connection, table: OutboxTable, facts: Facts) -> int | None:
    if facts.term is None:
        return None
    row = connection.execute(f"SELECT schema_version FROM {table.term}".encode()).fetchone()
    return int(row[0]) if row is not None else None


def _owner(connection: Connection, table: OutboxTable, facts: Facts) -> Owner:
    if facts.term is None or not {"leader_group", "kafka_cluster"} <= facts.term.columns.keys():
        return ANYONE
    row = connection.execute(f"SELECT leader_group, kafka_cluster FROM {table.term}".encode()).fetchone()
    return Owner(*row) if row is not None else ANYONE


def _delivery(connection: Connection, table: OutboxTable, facts: Facts) -> tuple[str | None, str | None]:
    if facts.term is None or not {"delivery", "progress_topic"} <= facts.term.columns.keys():
        return None, None
    row = connection.execute(f"SELECT delivery, progress_topic FROM {table.term}".encode()).fetchone()
    return (row[0], row[1]) if row is not None else (None, None)


def _beside(connection: Connection, table: OutboxTable, facts: Facts) -> tuple[bool, str, bool]:
    written = notice_columns(facts.outbox.columns) if facts.outbox is not None else []
    lease, archive, insert = fetch_row(connection, BESIDE, table.lease, table.archive, table.sql, written)
    return bool(lease), str(archive), bool(insert)


def _vacuum(connection: Connection, oid: int) -> Vacuum | None:
    row = connection.execute(VACUUM, (oid,)).fetchone()
    if row is None:
        return None
    options = dict(option.split("=", 1) for option in row[2])
    return Vacuum(live=row[0], dead=row[1], options=options, idle_s=row[3])


def _holders(connection: Connection, oid: int) -> tuple[Holder, ...]:
    return tuple(Holder(*row) for row in connection.execute(HOLDERS, {"outbox": oid}))


def _indexes(connection: Connection, oid: int) -> tuple[Index, ...]:
    rows = connection.execute(INDEXES, (oid,))
    return tuple(Index(name, valid, tuple(columns)) for name, valid, columns in rows)


def _topics(connection: Connection, table: OutboxTable, facts: Facts) -> tuple[str, ...]:
    """The topics of the rows at the head."""
    if facts.outbox is None or "kafka_topic" not in facts.outbox.columns:
        return ()
    query = f"""SELECT DISTINCT kafka_topic FROM (
        SELECT kafka_topic FROM {table.sql} ORDER BY id LIMIT {HEAD_ROWS}) AS head ORDER BY 1"""
    return tuple(row[0] for row in connection.execute(query.encode()) if row[0] is not None)


def _skew(connection: Connection, table: OutboxTable, facts: Facts) -> KeySkew | None:
    if facts.outbox is None or "kafka_key" not in facts.outbox.columns:
        return None
    return read_skew(connection, table)
