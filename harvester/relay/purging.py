"""The shard's database thread: purge what was acknowledged, quarantine what cannot be published.

One batch is whatever came in while the last statement ran, so batches grow by themselves under load. With many
shards each of them sees few acknowledgements at a time, and statements would be many and small; so a batch that is
less than half of what is in flight waits a moment for more, where there is enough in flight for that to be a backlog;
a shard that keeps up purges at once. Only when a statement's commit has come back does its callback run (P1, P2). A
purge is idempotent and unfenced; it is repeated, over a new connection if need be, until it succeeds: an acknowledged
record must leave the outbox. A row that somebody else has locked holds up its own key only: after a short wait the
others are deleted around it.

Each connection is compared with what the leader took its term on (P9): another server, another timeline, or a term row
that is older than the term. There an id may stand for another row, so nothing is purged any more, and the supervisor
is told; it ends this process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from struct import Struct

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from harvester.errors import DatabaseUnavailable, OutboxError
from harvester.outbox import settling
from harvester.outbox.connect import connect, one_line
from harvester.outbox.place import read_place, read_session
from harvester.outbox.polling import execute_prepared
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable


@dataclass(frozen=True, slots=True)
class Poison:
    """A record on its way to quarantine, and the term under which that may happen."""

    id: int
    error: str
    attempts: int
    first_failed_at: datetime
    term: int
    holder: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What is left behind when a record leaves the outbox: by a purge, and by a quarantine ("" is no notice)."""

    archive: settling.Archive = "off"
    notice_topic: str = ""


class Outcome(Enum):
    """What became of a quarantine statement."""

    MOVED = "moved"
    GONE = "gone"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Run on the purger's thread. `purged` gets ids whose DELETE has committed."""

    purged: Callable[[Sequence[int]], None]
    quarantined: Callable[[Poison, Outcome], None]
    trouble: Callable[[str | None], None]
    session: Callable[[int, str], None]  # a new connection: its pid and backend_start
    server_changed: Callable[[str], None]
    in_flight: Callable[[], int]
    died: Callable[[Exception], None]


_GATHER_FROM_RECORDS = 16
_PURGE = b"harvester_purge"
_ARRAY = Struct(">iiiii")  # dimensions, has NULLs, element type, elements, lower bound
_ELEMENT = Struct(">iq")  # length, value
_BIGINT_OID = 20
_GATHER_MAX_S = 0.02
_LOCK_WAIT = "500ms"
_SILENCE_S = 15.0  # a purge takes milliseconds


class Purger(threading.Thread):
    """See the module's text."""

    def __init__(
        self, dsn: str, table: OutboxTable, name: str, backoff_s: float, rules: Rules, callbacks: Callbacks
    ) -> None:
        super().__init__(name="purger", daemon=True)
        self._dsn, self._table, self._application = dsn, table, name
        self._backoff_s, self._rules = backoff_s, rules
        self._callbacks = callbacks
        self._acked: deque[int] = deque()
        self._poison: deque[tuple[Poison, float]] = deque()  # and when to try it
        self._work = threading.Event()
        self._enough = threading.Event()
        self._ended = threading.Event()
        self._connection: psycopg.Connection | None = None
        self._prepared: pq.abc.PGconn | None = None  # the connection that knows the purge statement
        self._shape: OutboxShape | None = None
        self._server: str | None = None  # what the term was taken on
        self._at: str | None = None  # what the connection is to
        self._term = 0
        self._troubled = self._poison_troubled = False
        self.connected = threading.Event()

    def expect(self, server: str | None, term: int | None) -> None:
        """What the leader took its term on: connections from now on must be to that, or nothing is purged (P9)."""
        self._server, self._term = server or self._server, term or self._term

    def purge(self, record_id: int) -> None:
        """Delete this row at the next `kick`; safe from any thread, cheap."""
        self._acked.append(record_id)

    def kick(self) -> None:
        """There is something to purge."""
        if not self._work.is_set():
            self._work.set()
        if self._is_worth_a_statement():
            self._enough.set()

    def _is_worth_a_statement(self) -> bool:
        in_flight = self._callbacks.in_flight()
        return in_flight < _GATHER_FROM_RECORDS or 2 * len(self._acked) >= in_flight

    def quarantine(self, poison: Poison) -> None:
        """Move this row to quarantine; safe from any thread."""
        self._poison.append((poison, 0.0))
        self._work.set()

    def stop(self) -> None:
        """End the thread once what is running has ended."""
        self._ended.set()
        self._work.set()
        self._enough.set()

    def run(self) -> None:
        """The thread."""
        try:
            if self._attempt(self._connect):
                self.connected.set()
            while not self._ended.is_set():
                self._work.wait(self._until_next_poison_s())
                self._gather()
                batch = sorted(self._acked.popleft() for _ in range(len(self._acked)))  # one order for all who lock
                if batch:
                    self._purge(batch)
                self._settle_poison()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would settle
            self._callbacks.died(error)
        finally:
            if self._connection is not None:
                self._connection.close()

    def _purge(self, batch: list[int]) -> None:
        locked: list[int] = []

        def delete() -> None:
            try:
                self._delete(batch)
            except psycopg.errors.LockNotAvailable:
                locked[:] = self._delete_around(batch)

        if not self._attempt(delete):
            return
        if locked:
            self._callbacks.trouble(f"database: another session holds a lock on record {locked[0]}")
            self._troubled = True
            self._acked.extend(locked)
            self._work.set()
            skipped = set(locked)
            batch = [record_id for record_id in batch if record_id not in skipped]
        self._callbacks.purged(batch)

    def _gather(self) -> None:
        """Wait a moment for a batch that is worth a statement."""
        self._enough.clear()
        if not self._is_worth_a_statement():
            self._enough.wait(_GATHER_MAX_S)
        self._work.clear()

    def _settle_poison(self) -> None:
        """Try each record that is due once: one that cannot be moved must not keep the others from being purged."""
        now = time.monotonic()
        for _ in range(len(self._poison)):
            poison, due = self._poison.popleft()
            if due > now:
                self._poison.append((poison, due))
                continue
            try:
                self._connect()
                outcome = self._move(poison)
            except (psycopg.Error, OutboxError) as error:
                self._callbacks.trouble(f"quarantine: record {poison.id} cannot be moved: {one_line(error)}")
                self._poison_troubled = True
                self._poison.append((poison, now + self._backoff_s))
                continue
            if self._poison_troubled:
                self._poison_troubled = False
                self._callbacks.trouble(None)
            self._callbacks.quarantined(poison, outcome)

    def _until_next_poison_s(self) -> float | None:
        if not self._poison:
            return None
        return max(0.0, min(due for _, due in self._poison) - time.monotonic())

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Run it until it succeeds (True) or the thread is to end (False)."""
        while not self._ended.is_set():
            try:
                self._connect()
                action()
            except (psycopg.Error, OutboxError) as error:
                self._drop_if_busy()
                self._troubled = True
                self._callbacks.trouble(f"database: {one_line(error)}")
                self._ended.wait(self._backoff_s)
            else:
                if self._troubled:
                    self._troubled = False
                    self._callbacks.trouble(None)
                return True
        return False

    def _drop_if_busy(self) -> None:
        """A session that was given up on in the middle of a statement is of no use any more."""
        connection = self._connection
        if connection is not None and connection.info.transaction_status != pq.TransactionStatus.IDLE:
            connection.close()

    def _connect(self) -> None:
        if self._connection is not None and not self._connection.closed:
            meant = self._server is None or self._at is None or self._at == self._server
            if meant and not self._connection.broken:
                return
            self._connection.close()
        connection = connect(self._dsn, application_name=self._application, silence_s=_SILENCE_S)
        try:
            connection.execute(f"SET lock_timeout = '{_LOCK_WAIT}'")
            self._check_server(connection)
            self._callbacks.session(*read_session(connection))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _check_server(self, connection: psycopg.Connection) -> None:
        """P9. Raises DatabaseUnavailable, and tells the supervisor, when this is not the database that was meant."""
        server, term = read_place(connection, self._table)
        self._at = server
        reason = None
        if self._server is not None and server is not None and server != self._server:
            reason = f"it is server {server}, the term was taken on {self._server}"
        elif term < self._term:
            reason = f"its term is {term}, ours is {self._term}: it has gone back in time"
        elif self._server is None:
            self._server = server
        if reason is not None:
            self._callbacks.server_changed(reason)
            raise DatabaseUnavailable(f"the database is another one than before: {reason}")

    def _delete(self, ids: list[int]) -> None:
        """Through libpq itself: a batch can be a few records, and the way round costs more than the statement."""
        assert self._connection is not None
        pgconn = self._connection.pgconn
        if self._prepared is not pgconn:
            _succeed(pgconn.prepare(_PURGE, self._purge_sql().encode()))
            self._prepared = pgconn
        result = execute_prepared(pgconn, _PURGE, [bigint_array(ids)], _SILENCE_S)
        _succeed(result)
        if (result.command_tuples or 0) < len(ids):
            self._check_server(self._connection)

    def _purge_sql(self) -> str:
        archive = self._rules.archive
        return settling.purge(self._table, archive, self._known_shape() if archive != "off" else None)

    def _known_shape(self) -> OutboxShape:
        assert self._connection is not None
        if self._shape is None:
            self._shape = inspect(self._connection, self._table)
        return self._shape

    def _delete_around(self, ids: list[int]) -> list[int]:
        """Delete those that nobody has locked; returns the others."""
        assert self._connection is not None
        statement = settling.purge_unlocked(self._table, self._rules.archive, self._known_shape())
        rows = self._connection.execute(statement, {"ids": ids}).fetchall()
        return [row[0] for row in rows]

    def _move(self, poison: Poison) -> Outcome:
        assert self._connection is not None
        parameters = {
            "id": poison.id,
            "term": poison.term,
            "holder": poison.holder,
            "error": poison.error,
            "attempts": poison.attempts,
            "first_failed_at": poison.first_failed_at,
        }
        statement = settling.quarantine(self._table, self._known_shape(), self._rules.notice_topic)
        row = self._connection.execute(statement, parameters).fetchone()
        moved, fenced = row if row is not None else (False, False)
        if moved:
            return Outcome.MOVED
        return Outcome.FENCED if fenced else Outcome.GONE


def bigint_array(ids: Sequence[int]) -> bytes:
    """A bigint[] in PostgreSQL's binary form: one dimension, no NULLs, lower bound 1."""
    return _ARRAY.pack(1, 0, _BIGINT_OID, len(ids), 1) + b"".join([_ELEMENT.pack(8, i) for i in ids])


def _succeed(result: pq.abc.PGresult) -> None:
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise error_from_result(result, encoding="utf-8")
