"""Looking at PostgreSQL: one session for reading, a second one for a moment to see through poolers. Thin."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import psycopg

from harvester.config import Config
from harvester.doctor import database_sql as queries
from harvester.doctor.facts import Clock, Connections, Database, Holder, Index, Pooling, Vacuum
from harvester.errors import SchemaError
from harvester.outbox.catalog import Facts
from harvester.outbox.connect import Connection, connect, database_errors, one_line, server_identity
from harvester.outbox.pooling import is_pooled, lends_backends
from harvester.outbox.schema import read_facts
from harvester.outbox.tables import OutboxTable
from harvester.outbox.term_session import ANYONE, Owner

T = TypeVar("T")

_APPLICATION = "harvester doctor"
_CLOCK_LOOKS = 5


def read_database(config: Config) -> Database:
    """Everything that this role may see. Raises DatabaseUnavailable; what is denied stands in `unread`."""
    with (
        closing(connect(config.dsn, application_name=_APPLICATION)) as connection,
        database_errors("look at the database"),
    ):
        return _read(config, connection)


def _read(config: Config, connection: Connection) -> Database:
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
    lease, archive, notices = part("beside", lambda: _beside(connection, placed), (False, "missing", False))
    oid = facts.outbox.oid if facts.outbox is not None else 0
    return Database(
        version=facts.server_version,
        settings=part("settings", lambda: _settings(connection), {}),
        clock=_clock(connection),
        sees_all=part("privileges", lambda: bool(_row(connection, queries.SEES_ALL)[0]), False),
        identity_known=server_identity(connection) is not None,
        catalog=facts,
        schema_version=part("schema version", lambda: _schema_version(connection, placed, facts), None),
        owner=part("leader group", lambda: _owner(connection, placed, facts), ANYONE),
        lease=lease,
        archive=archive if config.archive != "off" else None,
        notices=notices if config.poison.notice_topic else None,
        connections=part("connections", lambda: Connections(*_row(connection, queries.CONNECTIONS)), None),
        vacuum=part("vacuum", lambda: _vacuum(connection, oid), None),
        holders=part("holders", lambda: _holders(connection, oid), None),
        indexes=part("indexes", lambda: _indexes(connection, oid), ()),
        standbys=part("standbys", lambda: int(_row(connection, queries.STANDBYS)[0]), 0),
        topics=part("topics", lambda: _topics(connection, placed, facts), ()),
        # Last: it opens sessions of its own, which would be counted above as long as they are leaving.
        pooling=part("pooling", lambda: _pooling(connection, config.dsn), Pooling.NONE),
        unread=unread,
    )


def _row(connection: Connection, query: str, parameters: Any = None) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), parameters).fetchone()
    if row is None:
        raise SchemaError("no answer")
    return row


def _settings(connection: Connection) -> dict[str, str]:
    return dict(connection.execute(queries.SETTINGS, (list(queries.WANTED_SETTINGS),)).fetchall())


def _pooling(connection: Connection, dsn: str) -> Pooling:
    if lends_backends(connection, dsn, _APPLICATION):
        return Pooling.TRANSACTION
    return Pooling.SESSION if is_pooled(connection) else Pooling.NONE


def _clock(connection: Connection) -> Clock:
    best: Clock | None = None
    for _ in range(_CLOCK_LOOKS):
        before = time.time()
        theirs = float(_row(connection, "SELECT extract(epoch FROM clock_timestamp())::float8")[0])
        after = time.time()
        look = Clock(theirs - (before + after) / 2, (after - before) / 2)
        if best is None or look.uncertainty_s < best.uncertainty_s:
            best = look
    assert best is not None
    return best


def _schema_version(connection: Connection, table: OutboxTable, facts: Facts) -> int | None:
    if facts.term is None:
        return None
    row = connection.execute(f"SELECT schema_version FROM {table.term}".encode()).fetchone()
    return int(row[0]) if row is not None else None


def _owner(connection: Connection, table: OutboxTable, facts: Facts) -> Owner:
    if facts.term is None or not {"leader_group", "kafka_cluster"} <= facts.term.columns.keys():
        return ANYONE
    return Owner(*_row(connection, f"SELECT leader_group, kafka_cluster FROM {table.term}"))


def _beside(connection: Connection, table: OutboxTable) -> tuple[bool, str, bool]:
    names = {"lease": table.lease, "archive": table.archive, "outbox": table.sql}
    lease, archive, insert = _row(connection, queries.BESIDE, names)
    return bool(lease), str(archive), bool(insert)


def _vacuum(connection: Connection, oid: int) -> Vacuum | None:
    row = connection.execute(queries.VACUUM, (oid,)).fetchone()
    if row is None:
        return None
    options = dict(option.split("=", 1) for option in row[2])
    return Vacuum(live=row[0], dead=row[1], options=options, idle_s=row[3])


def _holders(connection: Connection, oid: int) -> tuple[Holder, ...]:
    return tuple(Holder(*row) for row in connection.execute(queries.HOLDERS, {"outbox": oid}))


def _indexes(connection: Connection, oid: int) -> tuple[Index, ...]:
    rows = connection.execute(queries.INDEXES, (oid,))
    return tuple(Index(name, valid, tuple(columns)) for name, valid, columns in rows)


def _topics(connection: Connection, table: OutboxTable, facts: Facts) -> tuple[str, ...]:
    """Which topics the rows at the head are for."""
    if facts.outbox is None or "kafka_topic" not in facts.outbox.columns:
        return ()
    query = f"""SELECT DISTINCT kafka_topic FROM (
        SELECT kafka_topic FROM {table.sql} ORDER BY id LIMIT {queries.HEAD_ROWS}) AS head ORDER BY 1"""
    return tuple(row[0] for row in connection.execute(query.encode()) if row[0] is not None)
