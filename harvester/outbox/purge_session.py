"""A shard's database session: purge, quarantine, and the check that this is the database that was meant. Thin.

Each connection is compared with what the leader took its term on (P9, P35): another server, another timeline, another
id space, or a term row that is older than the term. There an id may stand for another row, so nothing is purged any
more, and `server_changed` is told; the supervisor ends this process. The id space may change under a connection, so
each statement holds it against what is meant, and one that removes fewer rows than asked leads to a check.

Any method may raise psycopg.Error or OutboxError; `ready` makes the session usable again, or a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from struct import Struct

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from harvester.errors import DatabaseUnavailable
from harvester.outbox.connection import (
    OutboxIdentity,
    connect,
    read_holder,
    read_place,
    read_session,
    sequence_oid,
    why_another,
)
from harvester.outbox.libpq import execute_prepared, prepare
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import settle
from harvester.outbox.sql.queries import IdSpace
from harvester.outbox.tables import OutboxTable

_PURGE = b"harvester_purge"
_ARRAY = Struct(">iiiii")  # dimensions, has NULLs, element type, elements, lower bound
_ELEMENT = Struct(">iq")  # length, value
_BIGINT_OID = 20
_LOCK_WAIT = "500ms"
_SILENCE_S = 15.0  # a purge takes milliseconds


@dataclass(frozen=True, slots=True)
class PoisonRow:
    """A record on its way to quarantine, and the term under which that may happen.

    `origin`: the header under which it was sent, if it was: its number is missing in the topic (P25).
    """

    id: int
    error: str
    attempts: int
    first_failed_at: datetime
    term: int
    holder: str
    origin: bytes | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What is left behind when a record leaves the outbox: by a purge, and by a quarantine ("" is no notice)."""

    archive: settle.Archive = "off"
    notice_topic: str = ""


class QuarantineOutcome(Enum):
    """What became of a quarantine statement."""

    MOVED = "moved"
    GONE = "gone"
    FENCED = "fenced"


class PurgeSession:
    """The session with which a shard purges and quarantines records."""

    def __init__(
        self,
        dsn: str,
        table: OutboxTable,
        application_name: str,
        rules: Rules,
        *,
        opened: Callable[[int, str], None] = lambda _pid, _started: None,
        server_changed: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._dsn, self._table, self._application, self._rules = dsn, table, application_name, rules
        self._opened, self._server_changed = opened, server_changed
        self._connection: psycopg.Connection | None = None
        self._prepared: pq.abc.PGconn | None = None  # the connection that knows the purge statement
        self._shape: OutboxShape | None = None
        self._meant: OutboxIdentity | None = None  # what the term was taken on
        self._at: OutboxIdentity | None = None  # what the connection is to
        self._term = 0

    def expect(self, server: str | None, term: int | None) -> None:
        """What the leader took its term on: sessions from now on must be with that, or nothing is purged (P9)."""
        self._meant, self._term = OutboxIdentity.parse(server) if server else self._meant, term or self._term

    def log_in(self, dsn: str) -> None:
        """Connect with this from now on."""
        self._dsn = dsn

    def close(self) -> None:
        """End the session, if there is one."""
        if self._connection is not None:
            self._connection.close()

    def ready(self) -> None:
        """Have a session with the database that is meant; one that was given up on in a statement is of no use."""
        connection = self._connection
        if connection is not None and not connection.closed:
            at, meant = self._at, self._meant
            is_meant = at == meant or at is None or meant is None or at.why_not(meant) is None
            if is_meant and connection.info.transaction_status == pq.TransactionStatus.IDLE:
                return
            connection.close()
        connection = connect(self._dsn, application_name=self._application, silence_s=_SILENCE_S)
        try:
            connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
            self._check_server(connection)
            self._opened(*read_session(connection))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _check_server(self, connection: psycopg.Connection) -> None:
        """P9. Raises DatabaseUnavailable, and tells the supervisor, when this is not the database that was meant."""
        meant = self._meant
        sequence = sequence_oid(inspect(connection, self._table).sequence) if meant is None else meant.space.sequence
        self._at = read_place(connection, self._table, str(sequence) + "::oid" if meant else str(sequence))
        term, _ = read_holder(connection, self._table)
        reason = why_another(self._at, term, meant, self._term)
        if reason is not None:
            self._server_changed(reason)
            raise DatabaseUnavailable(f"the database is another one than before: {reason}")
        self._meant = meant or self._at

    def term(self) -> tuple[int, str | None]:
        """Term and holder as the term row names them now; raises SchemaError when there is none."""
        assert self._connection is not None
        return read_holder(self._connection, self._table)

    def delete(self, ids: Sequence[int]) -> None:
        """Delete these rows (ascending); psycopg.errors.LockNotAvailable when somebody holds one of them for long.

        Through libpq itself: a batch can be a few records, and the way round costs more than the statement.
        """
        assert self._connection is not None
        pgconn = self._connection.pgconn
        if self._prepared is not pgconn:
            _succeed(prepare(pgconn, _PURGE, self._purge_sql().encode(), _SILENCE_S))
            self._prepared = pgconn
        result = execute_prepared(pgconn, _PURGE, [bigint_array(ids)], _SILENCE_S)
        _succeed(result)
        if (result.command_tuples or 0) < len(ids):
            self._check_server(self._connection)

    def _purge_sql(self) -> str:
        archive = self._rules.archive
        return settle.purge(self._table, archive, self._known_shape() if archive != "off" else None, self._space())

    def _space(self) -> IdSpace:
        assert self._meant is not None, "known since the session is ready"
        return self._meant.space

    def _known_shape(self) -> OutboxShape:
        assert self._connection is not None
        if self._shape is None:
            self._shape = inspect(self._connection, self._table)
        return self._shape

    def delete_unlocked(self, ids: Sequence[int]) -> list[int]:
        """Delete those that nobody has locked; returns the others."""
        assert self._connection is not None
        statement = settle.purge_unlocked(self._table, self._rules.archive, self._known_shape(), self._space())
        rows = self._connection.execute(statement, {"ids": list(ids)}).fetchall()
        self._check_server(self._connection)
        return [row[0] for row in rows]

    def quarantine(self, poison: PoisonRow) -> QuarantineOutcome:
        """Move one row to quarantine, fenced by the term it was dispatched under (P6)."""
        assert self._connection is not None
        parameters = {
            "id": poison.id,
            "term": poison.term,
            "holder": poison.holder,
            "error": poison.error,
            "attempts": poison.attempts,
            "first_failed_at": poison.first_failed_at,
            "origin": poison.origin,
        }
        statement = settle.quarantine(self._table, self._known_shape(), self._rules.notice_topic, self._space())
        row = self._connection.execute(statement, parameters).fetchone()
        moved, fenced = row if row is not None else (False, False)
        if moved:
            return QuarantineOutcome.MOVED
        self._check_server(self._connection)
        return QuarantineOutcome.FENCED if fenced else QuarantineOutcome.GONE


def bigint_array(ids: Sequence[int]) -> bytes:
    """A bigint[] in PostgreSQL's binary form: one dimension, no NULLs, lower bound 1."""
    return _ARRAY.pack(1, 0, _BIGINT_OID, len(ids), 1) + b"".join([_ELEMENT.pack(8, i) for i in ids])


def _succeed(result: pq.abc.PGresult) -> None:
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise error_from_result(result, encoding="utf-8")
