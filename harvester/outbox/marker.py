"""The leader's database session: term, marks, resets, wake-up. Thin: one statement a method, errors passed on.

Marks are autocommit, READ COMMITTED, one statement a transaction (P3). Any method may raise psycopg.Error or
OutboxError; after that the session is unusable and `open` makes a new one. Whether a failed statement took effect
is not known then, and nobody here guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import psycopg
from psycopg import sql

from harvester.errors import SchemaError, TermLost
from harvester.outbox import queries
from harvester.outbox.connect import connect, server_identity
from harvester.outbox.copying import Row, copy_rows, wait_readable
from harvester.outbox.schema import inspect, refresh_incarnation
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable

_SILENCE_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class TermRow:
    """The term table's row, as far as the relay needs it."""

    term: int
    holder: UUID | None
    outbox_id: UUID
    incarnation: UUID


class MarkSession:
    """See the module's text."""

    def __init__(self, dsn: str, table: OutboxTable, application_name: str, statement_timeout_s: float) -> None:
        self._dsn, self.table, self._application = dsn, table, application_name
        self._statement_timeout_s = statement_timeout_s
        self._connection: psycopg.Connection | None = None
        self.shape: OutboxShape | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a session that has not failed."""
        return self._connection is not None and not self._connection.closed and not self._connection.broken

    def open(self) -> None:
        """Connect, check the tables, listen for the optional trigger's notifications."""
        self.close()
        connection = connect(self._dsn, application_name=self._application)
        try:
            connection.execute(
                sql.SQL("SET statement_timeout = {}").format(sql.Literal(int(self._statement_timeout_s * 1000)))
            )
            self.shape = inspect(connection, self.table)
            if self.shape.has_notify:
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.table.channel)))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        """End the session, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read_term(self) -> TermRow:
        """The term row; raises SchemaError when there is none."""
        row = self._open().execute(queries.read_term(self.table)).fetchone()
        if row is None:
            raise SchemaError(f"{self.table.term} has no row", hint="run `harvester init`")
        return TermRow(term=row[0], holder=row[1], outbox_id=row[2], incarnation=row[3])

    def identity(self) -> str:
        """What tells this outbox from any other, clones and restored copies included: server, database, table."""
        connection = self._open()
        server = server_identity(connection)
        row = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        database = row[0] if row is not None else 0
        return f"{server[0] if server else 0}/{database}/{self.read_term().outbox_id}"

    def take_term(self, expected: int, seen: int, holder: UUID, name: str) -> int | None:
        """Compare and set (P8): the new term, or None when the row's term was not `expected`."""
        row = (
            self._open()
            .execute(
                queries.take_term(self.table), {"expected": expected, "seen": seen, "holder": holder, "name": name}
            )
            .fetchone()
        )
        return row[0] if row is not None else None

    def renew_incarnation(self) -> bool:
        """Notice that ids may have started again since the last leader (design section 2)."""
        return refresh_incarnation(self._open(), self.table)

    def mark(
        self,
        *,
        term: int,
        holder: UUID,
        leader_id: UUID,
        limit: int,
        closed_keys: frozenset[bytes],
        closed_slices: str | None,
        kept: tuple[int, ...] = (),
    ) -> list[Row]:
        """Take rows from the head, sorted by id. Raises TermLost when there are none because of the fence (P8)."""
        connection = self._open()
        assert self.shape is not None
        excluded = queries.exclusions(self.shape, closed_keys, closed_slices, kept)
        statement = queries.mark_in_table(
            self.table, self.shape, term=term, holder=holder, leader_id=leader_id, limit=limit, excluded=excluded
        )
        rows = copy_rows(connection, statement, self._statement_timeout_s + _SILENCE_MARGIN_S)
        if not rows:
            self._check_term(term, holder)
        return rows

    def reset(self, *, term: int, holder: UUID, leader_id: UUID, ids: tuple[int, ...]) -> None:
        """Give rows back."""
        self._open().execute(queries.reset(self.table, term=term, holder=holder, leader_id=leader_id, ids=ids))

    def wait(self, timeout_s: float, wake_fd: int) -> bool:
        """Wait until a notification arrives, `wake_fd` is readable or the time is up. True: a notification."""
        connection = self._connection
        if connection is None:
            wait_readable([wake_fd], timeout_s)
            return False
        pgconn = connection.pgconn
        if self._notified():
            return True
        if pgconn.socket in wait_readable([pgconn.socket, wake_fd], timeout_s):
            pgconn.consume_input()
        return self._notified()

    def _notified(self) -> bool:
        assert self._connection is not None
        found = False
        while self._connection.pgconn.notifies():
            found = True
        return found

    def _check_term(self, term: int, holder: UUID) -> None:
        row = self.read_term()
        if row.term != term or row.holder != holder:
            raise TermLost(f"term {term} of this harvester has ended: the term row says {row.term} of {row.holder}")

    def _open(self) -> psycopg.Connection:
        if self._connection is None:
            self.open()
        assert self._connection is not None
        return self._connection
