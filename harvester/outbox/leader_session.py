"""The leader's database session: the term row, marks and fetches, notifications. Thin.

`TermSession` has the operations on the term row; `MarkSession` adds what only a leader does. Each method executes one
statement in its own transaction, autocommit and READ COMMITTED (P3). Any method may raise psycopg.Error or OutboxError;
after that the session is unusable and `open` creates a new one. Whether a failed statement took effect is unknown then,
and nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from harvester.errors import ForeignLeader, SchemaError, TermLost
from harvester.outbox.archive import check_archive
from harvester.outbox.connection import (
    LENT,
    LENT_HINT,
    OutboxIdentity,
    connect,
    lends_backends,
    read_place,
    read_session,
    sequence_oid,
    server_identity,
)
from harvester.outbox.libpq import copy_durable_rows, copy_rows, wait_readable
from harvester.outbox.schema import inspect, refresh_incarnation
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import queries
from harvester.outbox.sql.queries import Row
from harvester.outbox.tables import OutboxTable

SILENCE_MARGIN_S = 5.0  # in addition to the server's statement timeout
_MOST_BYTES = 1 << 28  # of the rows of one statement
_LOOK_S = 0.25  # how long a look at the table may hold up marks
_LOCK_WAIT = "2s"  # for the term row, at a take-over

Session = tuple[int, str]  # pid, backend_start

# The scan goes by id, whatever the planner's statistics say: for an outbox they are usually out of date.
_SETTINGS = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off"


@dataclass(frozen=True, slots=True)
class Owner:
    """The leader group that owns an outbox, and the id of its Kafka cluster (P37); None: unknown."""

    group: str | None = None
    cluster: str | None = None

    def __str__(self) -> str:
        of_cluster = f" in Kafka cluster {self.cluster}" if self.cluster is not None else ""
        return f"leader group {self.group!r}{of_cluster}" if self.group is not None else f"any leader group{of_cluster}"

    def excludes(self, other: Owner) -> bool:
        """Whether the two are known to differ."""
        pairs = ((self.group, other.group), (self.cluster, other.cluster))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


ANYONE = Owner()


@dataclass(frozen=True, slots=True)
class TermRow:
    """The term table's row, as far as the relay needs it."""

    term: int
    holder: UUID | None
    outbox_id: UUID
    incarnation: UUID
    delivery: str  # of the term
    progress_topic: str | None  # of the last term that delivered exactly once
    kind: str = "harvester"  # of the holder; "drain": it has borrowed the term; "moved": it is from another group (P37)
    lent_to: str | None = None  # who has borrowed the term, or asks to: no one else may take it (P32)
    name: str | None = None  # of the holder
    leader_group: str | None = None
    kafka_cluster: str | None = None

    @property
    def owner(self) -> Owner:
        """The owner of the outbox."""
        return Owner(self.leader_group, self.kafka_cluster)


class TermSession:
    """A session that reads and changes the term row."""

    def __init__(self, dsn: str, table: OutboxTable, application_name: str, statement_timeout_s: float) -> None:
        self._dsn, self.table, self._application = dsn, table, application_name
        self._statement_timeout_s = statement_timeout_s
        self._connection: psycopg.Connection | None = None
        self._heard = False  # a notification arrived together with an answer
        self.shape: OutboxShape | None = None
        self.place: OutboxIdentity | None = None  # of this connection
        self.session: Session | None = None
        self.term_is_locked = False  # at the last attempt to take it

    @property
    def is_open(self) -> bool:
        """Whether a session exists that has not failed."""
        return self._connection is not None and not self._connection.closed and not self._connection.broken

    def open(self) -> None:
        """Connect, check the tables, listen for the optional trigger's notifications."""
        self.close()
        silence_s = self._statement_timeout_s + SILENCE_MARGIN_S
        connection = connect(self._dsn, application_name=self._application, silence_s=silence_s)
        try:
            self._limit_statements(connection)
            connection.execute(_SETTINGS)
            self.session = read_session(connection)
            self.shape = inspect(connection, self.table)
            self.place = read_place(connection, self.table, sequence_oid(self.shape.sequence))
            if self.shape.has_notify:
                # Otherwise notifications that arrive with an answer are kept forever, and wake nothing.
                connection.add_notify_handler(self._hear)
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.table.channel)))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _limit_statements(self, connection: psycopg.Connection) -> None:
        connection.execute(f"SET statement_timeout = {int(self._statement_timeout_s * 1000)}")

    def log_in(self, dsn: str) -> None:
        """Use this DSN for new connections."""
        self._dsn = dsn

    def _hear(self, _: psycopg.Notify) -> None:
        self._heard = True

    def close(self) -> None:
        """End the session, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read_term(self) -> TermRow:
        """The term row; raises SchemaError if there is none."""
        row = self._open().execute(queries.read_term(self.table)).fetchone()
        if row is None:
            raise SchemaError(f"{self.table.term} has no row", hint="run `harvester init`")
        return TermRow(*row)

    def check_owner(self, row: TermRow, ours: Owner) -> None:
        """Raise ForeignLeader if the outbox belongs to another leader group or Kafka cluster (P37)."""
        if row.owner.excludes(ours):
            raise ForeignLeader(self.table, theirs=str(row.owner), ours=str(ours))

    def identity(self) -> str:
        """Identifies this outbox, as distinct from clones and restored copies: server, database, table."""
        connection = self._open()
        server = server_identity(connection)
        row = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        database = row[0] if row is not None else 0
        return f"{server[0] if server else 0}/{database}/{self.read_term().outbox_id}"

    def refuse_pooler(self) -> None:
        """Raises SchemaError if sessions are not exclusively ours, as P1, P7 and LISTEN require."""
        if lends_backends(self._open(), self._dsn, self._application):
            raise SchemaError(LENT, hint=LENT_HINT)

    def check_archive(self) -> None:
        """Raises SchemaError if purges could not write the archive."""
        check_archive(self._open(), self.table)

    def take_term(
        self,
        expected: int,
        seen: int,
        holder: UUID,
        name: str,
        ours: Sequence[Session] = (),
        owner: Owner = ANYONE,
        went_back: bool = False,
    ) -> int | None:
        """Compare and set (P8): the new term, or None if the row's term was not `expected`, or another owner's.

        `went_back`: the incarnation is renewed with it, since the row, or the ids, have gone back (P9).

        The predecessor's sessions are ended first, and again if one of them still locks the row (P7); `ours` are those
        of our own shards.
        """
        connection = self._open()
        values = {
            "expected": expected,
            "seen": seen,
            "holder": holder,
            "name": name,
            "sessions": self._named(ours),
            "group": owner.group,
            "cluster": owner.cluster,
            "went_back": went_back,
        }
        own = {"expected": expected, "own": [pid for pid, _ in ours]}
        connection.execute(queries.end_sessions(self.table), own)
        connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
        self.term_is_locked = False
        try:
            row = connection.execute(queries.take_term(self.table), values).fetchone()
        except psycopg.errors.LockNotAvailable:
            self.term_is_locked = True
            connection.execute(queries.end_sessions(self.table), own)
            return None
        finally:
            if not connection.broken:
                connection.execute("SET lock_timeout = 0")
        return row[0] if row is not None else None

    def move(self, row: TermRow, owner: Owner) -> bool:
        """Give the outbox to this group and cluster (P37); False if the term row has changed since it was read."""
        values = {"term": row.term, "holder": row.holder, "group": owner.group, "cluster": owner.cluster}
        return self._open().execute(queries.move(self.table), values).fetchone() is not None

    def want_term(self, name: str, patience_s: float) -> bool:
        """Ask for the term, for `patience_s` (P32); False while another borrower asks for it."""
        values = {"name": name, "patience_s": patience_s}
        return self._open().execute(queries.want_term(self.table), values).fetchone() is not None

    def borrow_term(
        self, expected: int, seen: int, holder: UUID, name: str, lease_s: float, owner: Owner = ANYONE
    ) -> tuple[int, datetime] | None:
        """The new term and the end of its lease; None if the row has changed, or the term is lent (P32)."""
        connection = self._open()
        values = {
            "expected": expected, "seen": seen, "holder": holder, "name": name, "lease_s": lease_s,
            "sessions": self._named(()), "group": owner.group, "cluster": owner.cluster,
        }  # fmt: skip
        connection.execute(queries.end_sessions(self.table), {"expected": expected, "own": []})
        row = connection.execute(queries.borrow_term(self.table), values).fetchone()
        return (row[0], row[1]) if row is not None else None

    def renew_loan(self, term: int, holder: UUID, lease_s: float) -> datetime:
        """Extend the lease; returns its end, by the database's clock. Raises TermLost."""
        values = {"lease_s": lease_s, "term": term, "holder": holder}
        row = self._open().execute(queries.renew_loan(self.table), values).fetchone()
        if row is None:
            raise TermLost(f"term {term} of this drain has ended: another process has taken it")
        until: datetime = row[0]
        return until

    def end_loan(self, term: int, holder: UUID) -> None:
        """Others need no longer wait for the end of the lease; the term stays unreleased."""
        self._open().execute(queries.end_loan(self.table), {"term": term, "holder": holder})

    def forget_wish(self, name: str) -> None:
        """Withdraw `want_term`."""
        self._open().execute(queries.forget_wish(self.table), {"name": name})

    def note_delivery(
        self, term: int, holder: UUID, delivery: str, progress_topic: str | None, kind: str = "harvester"
    ) -> None:
        """What the previous term left behind is settled; from now on the row describes this term's delivery."""
        values = {
            "delivery": delivery, "kind": kind, "progress_topic": progress_topic, "term": term, "holder": holder,
        }  # fmt: skip
        self._open().execute(queries.note_delivery(self.table), values)

    def release(self, term: int, holder: UUID) -> None:
        """Nothing of this term is on the wire or unpurged any more: its successor need not wait."""
        self._open().execute(queries.release(self.table), {"term": term, "holder": holder})

    def register(self, term: int, holder: UUID, others: Sequence[Session]) -> None:
        """Record our sessions, this one and `others`, in the term row, so that a successor can end them (P7)."""
        values = {"sessions": self._named(others), "term": term, "holder": holder}
        self._open().execute(queries.register(self.table), values)

    def _named(self, others: Sequence[Session]) -> Jsonb:
        sessions = [self.session, *others] if self.session is not None else others
        return Jsonb([{"pid": pid, "started": started} for pid, started in filter(None, sessions)])

    def renew_incarnation(self) -> bool:
        """Renew the incarnation if ids may have started again since the last leader; returns whether it did.

        That is the case on a different server or timeline, or in a different table (P9).
        """
        connection = self._open()
        renewed = refresh_incarnation(connection, self.table)
        known = self.place.server if self.place is not None else None
        identifier, timeline = known if known is not None else (None, None)
        values = {"identifier": identifier, "timeline": timeline}
        row = connection.execute(queries.note_server(self.table), values).fetchone()
        return renewed or bool(row is not None and row[0])

    def _open(self) -> psycopg.Connection:
        if self._connection is None:
            self.open()
        assert self._connection is not None
        return self._connection


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds a RowExclusiveLock on the outbox, and the state of its sequence.

    `transactions`: 64-bit transaction ids by virtual transaction id; None: it has none yet.

    `sequence_file` changes when the sequence is restarted (TRUNCATE … RESTART IDENTITY), not when it is called.
    `wanted_by`: who asks for the term (P32). `table`: the oid of the table that now has the outbox's name.
    """

    transactions: dict[str, int | None]
    last_value: int | None
    sequence_file: int | None
    wanted_by: str | None = None
    table: int | None = None

    def are_in(self, space: queries.IdSpace) -> bool:
        """Whether ids are still those of this space."""
        return self.table == space.table and (not space.sequence or self.sequence_file == space.file)


class MarkSession(TermSession):
    """A leader's session: marks and fetches rows, and waits for notifications."""

    def __init__(self, dsn: str, table: OutboxTable, application_name: str, statement_timeout_s: float) -> None:
        super().__init__(dsn, table, application_name, statement_timeout_s)
        self.over: tuple[int, ...] = ()  # ended transactions that made the last mark return nothing

    def mark(
        self,
        *,
        term: int,
        holder: UUID,
        leader_id: UUID | None,
        limit: int,
        high: int | None,
        gaps: Sequence[tuple[int, int]],
        kept: tuple[int, ...] = (),
        watched: tuple[int, ...] = (),
        checks_term: bool = True,
    ) -> list[Row]:
        """The next rows, sorted by id: those in the gaps, then those above `high`; None: from the head.

        No rows are returned if one of the `watched` transactions has ended: `over` then names those. The rows are
        marked in the table with `leader_id`; None: nothing is written. If the fence (P8) is the reason for an empty
        result, it raises TermLost, given `checks_term`.

        Rows beyond `_MOST_BYTES` come without their raw tuple, to be fetched later: until a mark has shown how large
        rows are, nothing else bounds the memory that they take.
        """
        connection, shape, fence = self._open(), self._shape(), self._fence(term, holder, watched)
        if leader_id is None:
            statement = queries.mark_in_memory(self.table, shape, fence=fence, limit=limit, high=high, gaps=gaps)
        else:
            statement = queries.mark_in_table(
                self.table, shape, fence=fence, leader_id=leader_id, limit=limit, high=high, gaps=gaps, kept=kept
            )
        # The commit of a writing mark is durable, and with it everything committed before.
        copy = copy_durable_rows if leader_id is None else copy_rows
        rows = copy(connection, statement, self._statement_timeout_s + SILENCE_MARGIN_S, _MOST_BYTES)
        self.over = ()
        if not rows and (checks_term or watched):
            self.over = self._check_term(term, holder, watched)
        return rows

    def fetch(self, *, term: int, holder: UUID, ids: tuple[int, ...]) -> list[Row]:
        """Those of these rows that exist, sorted by id, bounded like those of `mark`. Raises TermLost like it."""
        statement = queries.fetch(self.table, self._shape(), fence=self._fence(term, holder), ids=ids)
        rows = copy_durable_rows(self._open(), statement, self._statement_timeout_s + SILENCE_MARGIN_S, _MOST_BYTES)
        if not rows:
            self._check_term(term, holder)
        return rows

    def _fence(self, term: int, holder: UUID, watched: tuple[int, ...] = ()) -> queries.Fence:
        return queries.Fence(term, holder, self.place.space if self.place is not None else None, watched)

    def ids_between(self, low: int, high: int) -> list[int] | None:
        """Every id from `low` to `high`; None if they cannot be read within `_LOOK_S`.

        Even few may take long, since the way to them leads past dead rows that vacuum may not remove.
        """
        connection = self._open()
        statement = queries.ids_between(self.table, low, high)
        connection.execute(f"SET statement_timeout = {int(min(_LOOK_S, self._statement_timeout_s) * 1000)}")
        try:
            return [row[0] for row in connection.execute(statement, binary=True)]
        except psycopg.errors.QueryCanceled:
            return None
        finally:
            if not connection.broken:
                self._limit_statements(connection)

    def holders(self) -> Holders:
        """Who could still fill a gap (P10)."""
        shape = self._shape()
        row = self._open().execute(queries.holders(self.table, shape.oid, shape.sequence)).fetchone()
        assert row is not None
        transactions = {name: _whole(number, row[4]) for name, number in (row[0] or {}).items()}
        return Holders(transactions, row[1], row[2], row[3], row[5])

    def read_bookmark(self) -> tuple[int, list[int]] | None:
        """Where a scan may begin: a highest id, and ranges below it as alternating low and high; None: at the head."""
        sequence = self._shape().sequence
        if sequence is None:
            return None
        row = self._open().execute(queries.read_bookmark(self.table, sequence)).fetchone()
        return (row[0], row[1]) if row is not None else None

    def save_bookmark(self, term: int, holder: UUID, high: int, open_ids: Sequence[int]) -> None:
        """Save where a scan may begin, if the term is still ours."""
        sequence = self._shape().sequence
        if sequence is not None:
            values = {"term": term, "holder": holder, "high": high, "open": list(open_ids)}
            self._open().execute(queries.save_bookmark(self.table, sequence), values)

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
        found, self._heard = self._heard, False
        while self._connection.pgconn.notifies():
            found = True
        return found

    def _check_term(self, term: int, holder: UUID, watched: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Raises TermLost; returns the watched transactions that have ended."""
        row = self._open().execute(queries.check_term(self.table, watched)).fetchone()
        if row is None or row[:2] != (term, holder):
            found = self.read_term()
            raise TermLost(
                f"term {term} of this harvester has ended: the term row has term {found.term} of {found.holder}"
            )
        return tuple(row[2])

    def _shape(self) -> OutboxShape:
        assert self.shape is not None, "open() sets it"
        return self.shape


def _whole(number: int | None, following: int) -> int | None:
    """The 64-bit transaction id with these low 32 bits that is nearest to the next one to be given out."""
    if number is None:
        return None
    half = 1 << 31
    return following + (number - following + half) % (2 * half) - half
