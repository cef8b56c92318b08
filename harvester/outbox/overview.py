"""What the database alone shows about a harvester: who leads, what waits, what was given up.

Needs no running harvester and disturbs none: plain reads, and counting stops at a limit. `BacklogWatch` queries
periodically on its own session, so that nobody waits for it. An outbox has no index on the key, so `read_key` is slow
on a large table: the connection's statement timeout limits that.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from harvester.errors import OutboxError
from harvester.outbox.connection import connect, database_errors, fetch_row, one_line
from harvester.outbox.leader_session import Owner
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable
from harvester.status import Backlog

Connection = psycopg.Connection[Any]

COUNT_BOUND = 100_000
HEAD_ROWS = 1_000
BACKLOG_ROWS = 500  # at the head; with fewer, skew does not show
_FEW_KEYS = 40  # limit a backlog to less than 20,000 records/s, at least once
# A row's age in seconds; NULL if create_time is `infinity` or `-infinity`.
AGE_S = "CASE WHEN isfinite(create_time) THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END"


@dataclass(frozen=True, slots=True)
class QuarantineOverview:
    """Records that were given up. Counting `records` stops at a limit; then `capped` is true."""

    records: int
    capped: bool
    newest_at: datetime | None
    newest_error: str | None


@dataclass(frozen=True, slots=True)
class KeySkew:
    """For the rows with a key at the outbox's head: their number, and how many keys would share them evenly."""

    rows: int
    keys: float  # 1 ÷ the sum of the squares of the keys' shares

    @property
    def is_few(self) -> bool:
        """Whether the backlog consists of few keys, which matters if a key's records go one at a time (at least
        once).
        """
        return self.rows >= BACKLOG_ROWS and self.keys < _FEW_KEYS


@dataclass(frozen=True, slots=True)
class Overview:
    """The state at one moment. `term` is 0 and `holder` None until a harvester has led for the first time.

    `holder` took the latest term: the database does not know whether it is still alive.
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
    quarantine: QuarantineOverview


def read_overview(connection: Connection, table: OutboxTable) -> Overview:
    """Read everything that `harvester status` shows, with SELECT only; raises SchemaError like `inspect`."""
    shape = inspect(connection, table, read_only=True)
    with database_errors(f"read the state of {table}"):
        names = (
            "schema_version",
            "outbox_id",
            "incarnation",
            "delivery",
            "term",
            "holder",
            "holder_name",
            "acquired_at",
        )
        row = fetch_row(connection, f"SELECT leader_group, kafka_cluster, {', '.join(names)} FROM {table.term}")
        return Overview(
            shape=shape,
            owner=Owner(*row[:2]),
            backlog=_backlog(connection, table, COUNT_BOUND),
            quarantine=_quarantine(connection, table),
            **dict(zip(names, row[2:], strict=True)),
        )


def read_backlog(connection: Connection, table: OutboxTable, *, bound: int = COUNT_BOUND) -> Backlog:
    """The numbers of rows in the outbox and in quarantine, up to `bound`, and the age of the outbox's first row."""
    with database_errors(f"count the rows of {table}"):
        counted = f"SELECT count(*) FROM (SELECT FROM {table.quarantine} LIMIT {bound}) AS bounded"
        return replace(_backlog(connection, table, bound), quarantine=fetch_row(connection, counted)[0])


def _backlog(connection: Connection, table: OutboxTable, bound: int) -> Backlog:
    count, age_s = fetch_row(
        connection,
        f"""SELECT (SELECT count(*) FROM (SELECT FROM {table.sql} LIMIT {bound + 1}) AS bounded),
        (SELECT {AGE_S} FROM {table.sql} ORDER BY id LIMIT 1)""",
    )
    backlog = Backlog(records=min(count, bound), capped=count > bound, oldest_age_s=_age(age_s))
    return replace(backlog, advice=_advice(connection, table)) if count >= BACKLOG_ROWS else backlog


def _advice(connection: Connection, table: OutboxTable) -> str | None:
    if fetch_row(connection, f"SELECT delivery FROM {table.term}")[0] == "exactly-once":
        return None
    skew = read_skew(connection, table)
    if skew is None or not skew.is_few:
        return None
    return f'few keys carry the backlog (as {skew.keys:,.0f} would): delivery = "exactly-once" is faster'


def read_skew(connection: Connection, table: OutboxTable) -> KeySkew | None:
    """None if no row at the head has a key."""
    query = f"""SELECT sum(rows)::bigint, (sum(rows) ^ 2 / sum(rows ^ 2))::float8 FROM (
        SELECT count(*) AS rows FROM (
            SELECT kafka_key::text AS key FROM {table.sql} ORDER BY id LIMIT {HEAD_ROWS}) AS head
        WHERE key IS NOT NULL GROUP BY key) AS keys"""
    rows, keys = fetch_row(connection, query)
    return KeySkew(rows, keys) if rows else None


def _quarantine(connection: Connection, table: OutboxTable) -> QuarantineOverview:
    # Sorting the whole table could take long; beyond the limit, the newest of the counted rows has to do.
    count, newest_at, error = fetch_row(
        connection,
        f"""WITH bounded AS MATERIALIZED (
            SELECT quarantined_at, error FROM {table.quarantine} LIMIT {COUNT_BOUND + 1}
        ), newest AS (SELECT * FROM bounded ORDER BY quarantined_at DESC LIMIT 1)
        SELECT (SELECT count(*) FROM bounded), (SELECT quarantined_at FROM newest), (SELECT error FROM newest)""",
    )
    return QuarantineOverview(min(count, COUNT_BOUND), count > COUNT_BOUND, newest_at, error)


_EVERY_S = 1.0
_REST = 20  # times the duration of the last look
_FORGOTTEN_AFTER_S = 15.0
_SILENT_S = 10.0  # the longest look: a statement and its timeout
_NOT_ASKED = "has not been asked yet"
_STOP_WITHIN_S = 6.0  # a running statement ends by its own timeout


class BacklogWatch:
    """Looks once a second while someone is interested; rests, without a session, when nobody has asked for a while.

    Every look checks that the database answers. Slow counts are made less often: they take at most a twentieth of the
    time.
    """

    def __init__(self, dsn: str, table: OutboxTable, application_name: str) -> None:
        self._dsn, self._table, self._application = dsn, table, application_name
        self._asked_at = 0.0
        self._latest: Backlog | None = None
        self._silence: str | None = _NOT_ASKED
        self._answered_at = -math.inf
        self._looked = threading.Event()  # since it last began to ask
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def latest(self) -> Backlog | None:
        """The latest figures; None while there are none. Calling this keeps the watch awake."""
        self._asked_at = time.monotonic()
        with self._lock:
            if not self._ended.is_set() and (self._thread is None or not self._thread.is_alive()):
                self._looked.clear()
                thread = threading.Thread(target=self._run, name="harvester-backlog", daemon=True)
                with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread once the main thread has ended
                    thread.start()
                    self._thread = thread
        return self._latest

    def silence(self, within_s: float) -> str | None:
        """Why the database does not answer; None if it does. `within_s` is the time for the first look after a rest.

        Calling this keeps the watch awake.
        """
        self.latest()
        self._looked.wait(within_s)
        silent_s = time.monotonic() - self._answered_at
        if self._silence is None and silent_s > _SILENT_S:
            return f"has not answered for {silent_s:.0f} s"
        return self._silence

    def log_in(self, dsn: str) -> None:
        """Use this DSN for new connections."""
        self._dsn = dsn

    def stop(self) -> None:
        """End the watch and wait for it."""
        self._ended.set()
        with self._lock:
            if self._thread is not None:
                self._thread.join(_STOP_WITHIN_S)

    def _run(self) -> None:
        connection: psycopg.Connection | None = None
        count_at = 0.0
        while not self._ended.is_set() and time.monotonic() - self._asked_at < _FORGOTTEN_AFTER_S:
            try:
                if connection is None or connection.closed:
                    connection = connect(self._dsn, application_name=self._application, silence_s=_STOP_WITHIN_S)
                    connection.execute("SET statement_timeout = '5s'")
                connection.execute("SELECT")
                self._silence, self._answered_at = None, time.monotonic()
                self._looked.set()
                if self._answered_at >= count_at:
                    self._latest = read_backlog(connection, self._table)
                    # The count reads past all dead rows at the head; an abandoned transaction keeps these indefinitely.
                    counted_at = time.monotonic()
                    count_at = counted_at + _REST * (counted_at - self._answered_at)
            except (psycopg.Error, OutboxError) as error:
                self._latest = None  # the relay's own sessions report what is wrong
                answers = connection is not None and not connection.closed  # it may refuse statements, but answers
                if answers:
                    self._answered_at = time.monotonic()
                    count_at = self._answered_at + _REST * _EVERY_S
                else:
                    self._silence = one_line(error)
                    self._looked.set()
            self._ended.wait(_EVERY_S)
        if connection is not None:
            connection.close()
        self._latest, self._silence = None, _NOT_ASKED


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows of a key, as in `KeyStatus`; None if the database did not answer."""

    rows: int | None = None
    capped: bool = False
    oldest_id: int | None = None
    oldest_age_s: float | None = None
    quarantined: int | None = None
    newest_error: str | None = None


def read_key(connection: Connection, table: OutboxTable, key: bytes) -> KeyRows:
    """The rows of this key, given as Kafka would get it. Raises OutboxError and psycopg.Error."""
    shape = inspect(connection, table)
    given = "$1::bytea" if shape.key_type == "bytea" else "convert_from($1::bytea, 'UTF8')"
    query = f"""WITH rows AS MATERIALIZED (
        SELECT id, create_time FROM {columns.published(table, shape)} o
        WHERE kafka_key = {given} LIMIT {COUNT_BOUND + 1}
    ), oldest AS (SELECT * FROM rows ORDER BY id LIMIT 1), dead AS MATERIALIZED (
        SELECT quarantined_at, error FROM {table.quarantine} WHERE kafka_key = {given} LIMIT {COUNT_BOUND}
    )
    SELECT (SELECT count(*) FROM rows), (SELECT id FROM oldest),
        (SELECT {AGE_S} FROM oldest),
        (SELECT count(*) FROM dead), (SELECT error FROM dead ORDER BY quarantined_at DESC LIMIT 1)"""
    with database_errors(f"look for a key in {table}"):
        count, oldest_id, age_s, quarantined, error = fetch_row(connection, query, key)
    return KeyRows(min(count, COUNT_BOUND), count > COUNT_BOUND, oldest_id, _age(age_s), quarantined, error)


def _age(age_s: float | None) -> float | None:
    # If a writer sets create_time itself, its clock may be ahead of the server's.
    return None if age_s is None else max(0.0, age_s)
