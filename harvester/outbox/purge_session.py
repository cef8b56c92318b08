"""A shard's database session: purge, quarantine, and the check that this is the right database. Thin.

Each connection is compared with the database on which the leader took its term (P9, P35). A different server, timeline
or id space, or a term row older than the term, means that an id may stand for another row: nothing more is purged,
`server_changed` is called, and the supervisor ends this process. The id space may change under a connection, so each
statement checks it, and if one removes fewer rows than requested, the database is checked.

An id can be given out again without a trace in the id space: by `setval`, or by an explicit id. So a row is removed
only if it is the one that was read (P50): with the same xmin or, if it has been rewritten since, as the record that was
created at the same time (`RowVersions`). If another record has the id, `ids_given_again` is called.

Any method may raise psycopg.Error or OutboxError; `ready` makes the session usable again, or opens a new one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from struct import Struct
from uuid import UUID

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
from harvester.outbox.libpq import copy_rows, execute_prepared, prepare
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import queries, settle
from harvester.outbox.sql.queries import IdSpace, Row
from harvester.outbox.tables import OutboxTable
from harvester.record import RowVersions

_PURGE, _PURGE_BY_ID = b"harvester_purge", b"harvester_purge_by_id"
_ARRAY = Struct(">iiiii")  # dimensions, has NULLs, element type, elements, lower bound
_BIGINT_OID, _XID_OID = 20, 28
_LOCK_WAIT = "500ms"
_SILENCE_S = 15.0  # a purge takes milliseconds
_READ_IDS = 500  # at a time, since values may be large


@dataclass(frozen=True, slots=True)
class PoisonRow:
    """A record on its way to quarantine, and the term under which it may be moved.

    `origin`: the header under which it was sent, if it was: its number is missing in the topic (P25). `xmin` and
    `created_us` are those of its row as it was read (P50); xmin 0: unknown.
    """

    id: int
    error: str
    attempts: int
    first_failed_at: datetime
    term: int
    holder: str
    origin: bytes | None = None
    xmin: int = 0
    created_us: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What a record leaves behind in the archive when it is purged, and as a notice when it is quarantined ("": no
    notice).
    """

    archive: settle.Archive = "off"
    notice_topic: str = ""


class QuarantineOutcome(Enum):
    """The outcome of a quarantine statement."""

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
        ids_given_again: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._dsn, self._table, self._application, self._rules = dsn, table, application_name, rules
        self._opened, self._server_changed, self._ids_given_again = opened, server_changed, ids_given_again
        self._connection: psycopg.Connection | None = None
        self._prepared: dict[bytes, pq.abc.PGconn] = {}  # purge statements, with the connection that has prepared them
        self._shape: OutboxShape | None = None
        self._meant: OutboxIdentity | None = None  # the place on which the term was taken
        self._at: OutboxIdentity | None = None  # the place of the connection
        self._term = 0

    def expect(self, server: str | None, term: int | None) -> None:
        """The place on which the leader took its term: later sessions must be with it, or nothing is purged (P9)."""
        self._meant, self._term = OutboxIdentity.parse(server) if server else self._meant, term or self._term

    def log_in(self, dsn: str) -> None:
        """Use this DSN for new connections."""
        self._dsn = dsn

    def close(self) -> None:
        """End the session, if there is one."""
        if self._connection is not None:
            self._connection.close()

    def is_ready(self) -> bool:
        """True if the session is with the right database, and no statement was abandoned in it."""
        connection = self._connection
        if connection is None or connection.closed:
            return False
        at, meant = self._at, self._meant
        is_meant = at == meant or at is None or meant is None or at.why_not(meant) is None
        return is_meant and connection.info.transaction_status == pq.TransactionStatus.IDLE

    def ready(self) -> None:
        """Open a session with the right database, unless the present one can be used."""
        if self.is_ready():
            return
        self.close()
        connection = connect(self._dsn, application_name=self._application, silence_s=_SILENCE_S)
        try:
            # To plan a small purge takes the server as long as to run it. One plan for all does, provided that it uses
            # the index although the table was empty when it was made. A scan that cannot be avoided (the term has one
            # row) then counts as so costly that servers before version 18 would compile the statement each time.
            connection.execute(
                f"SET lock_timeout = '{_LOCK_WAIT}'; SET plan_cache_mode = force_generic_plan;"
                " SET enable_seqscan = off; SET jit = off"
            )
            self._check_server(connection)
            self._opened(*read_session(connection))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _check_server(self, connection: psycopg.Connection) -> None:
        """P9. Raises DatabaseUnavailable, and tells the supervisor, if this is not the right database."""
        meant = self._meant
        sequence = sequence_oid(inspect(connection, self._table).sequence) if meant is None else meant.space.sequence
        self._at = read_place(connection, self._table, str(sequence) + "::oid" if meant else str(sequence))
        term, _ = read_holder(connection, self._table)
        reason = why_another(self._at, term, meant, self._term)
        if reason is not None:
            self._server_changed(reason)
            raise DatabaseUnavailable(f"the database is a different one: {reason}")
        self._meant = meant or self._at

    def term(self) -> tuple[int, str | None]:
        """Term and holder as currently in the term row; raises SchemaError if there is none."""
        assert self._connection is not None
        return read_holder(self._connection, self._table)

    def progress_topic(self) -> str | None:
        """The id of the progress topic that the term row records, if any."""
        assert self._connection is not None
        row = self._connection.execute(f"SELECT progress_topic FROM {self._table.term}").fetchone()
        return row[0] if row is not None else None

    def delete(self, rows: RowVersions, incarnation: UUID | None = None) -> list[int]:
        """Delete these rows; returns the ids that other records now have, which are left alone.

        `incarnation`: the one of their records, for the archive; None: the current one. Raises
        psycopg.errors.LockNotAvailable if another session holds a lock on one of them for too long.
        """
        if self._purge(rows, incarnation) == len(rows.ids):
            return []
        assert self._connection is not None
        self._check_server(self._connection)
        same, others = self._written_anew(rows)
        if same.ids and self._purge(same, incarnation) < len(same.ids):
            raise DatabaseUnavailable(f"record {same.ids[0]}, or one after it, is rewritten repeatedly")
        return others

    def _purge(self, rows: RowVersions, incarnation: UUID | None) -> int:
        """Delete exactly these rows; returns how many there were.

        Uses libpq directly: a batch can be a few records, and psycopg's overhead would exceed the statement's cost.
        """
        assert self._connection is not None
        pgconn = self._connection.pgconn
        name, values = _PURGE_BY_ID, [bigint_array(rows.ids)]
        if rows.xmins:
            name, values = _PURGE, [*values, xid_array(rows.xmins)]
        if incarnation is not None:
            name += incarnation.bytes.hex().encode()
        if self._prepared.get(name) is not pgconn:
            statement = self._purge_sql(by_version=bool(rows.xmins), incarnation=incarnation)
            _succeed(prepare(pgconn, name, statement.encode(), _SILENCE_S))
            self._prepared[name] = pgconn
        result = execute_prepared(pgconn, name, values, _SILENCE_S)
        _succeed(result)
        return result.command_tuples or 0

    def delete_same(self, ids: Sequence[int], same: Callable[[list[Row]], RowVersions], incarnation: UUID) -> list[int]:
        """Delete the rows (ascending) that `same` chooses, and return their ids. `incarnation`: see `delete`.

        A row stays if an older one of its key stays: then both are published, in order (P49). `same` receives rows as
        returned by a mark, in portions. Raises like `delete`.
        """
        assert self._connection is not None
        shape, space = self._known_shape(), self._space()
        found_ids, xmins, created_us = list[int](), list[int](), list[int]()
        for at in range(0, len(ids), _READ_IDS):
            statement = queries.read_rows(self._table, shape, ids[at : at + _READ_IDS], space)
            part = same(copy_rows(self._connection, statement, _SILENCE_S))
            found_ids += part.ids
            xmins += part.xmins
            created_us += part.created_us
        chosen = RowVersions(found_ids, xmins, created_us)
        if not chosen.ids:
            return []
        found = self._connection.execute(queries.behind_others(self._table, shape), {"ids": list(chosen.ids)})
        chosen = chosen.without({row[0] for row in found})
        others = self.delete(chosen, incarnation) if chosen.ids else []
        return [record_id for record_id in chosen.ids if record_id not in others]

    def _purge_sql(self, *, by_version: bool, incarnation: UUID | None = None) -> str:
        archive = self._rules.archive
        shape = self._known_shape() if archive != "off" else None
        return settle.purge(self._table, archive, shape, self._space(), by_version=by_version, incarnation=incarnation)

    def _written_anew(self, rows: RowVersions) -> tuple[RowVersions, list[int]]:
        """For rows not found as they were read: the same records in their current versions, and the ids of other
        records.
        """
        if not rows.xmins:
            return RowVersions(()), []
        assert self._connection is not None
        found = self._connection.execute(settle.versions(self._table), {"ids": list(rows.ids)}).fetchall()
        return rows.compare({record_id: (xmin, created_us) for record_id, xmin, created_us in found})

    def refuse_other(self, record_id: int) -> None:
        """Another record has the id of a published one: ids have been given out again (P50).

        Raises DatabaseUnavailable, and tells the supervisor; not under another leader's term, whose marks rewrite rows.
        """
        assert self._connection is not None
        term, _ = read_holder(self._connection, self._table)
        if self._term and term != self._term:
            return
        reason = f"record {record_id} is not the one that was published: its id was given out again"
        self._ids_given_again(reason)
        raise DatabaseUnavailable(reason)

    def _space(self) -> IdSpace:
        assert self._meant is not None, "known once the session is ready"
        return self._meant.space

    def _known_shape(self) -> OutboxShape:
        assert self._connection is not None
        if self._shape is None:
            self._shape = inspect(self._connection, self._table)
        return self._shape

    def delete_unlocked(self, rows: RowVersions) -> tuple[list[int], list[int]]:
        """Delete the rows that nobody has locked; returns the ids of locked rows, and those of other records.

        A row that is being rewritten at this moment counts as locked.
        """
        assert self._connection is not None
        locked = self._purge_unlocked(rows)
        self._check_server(self._connection)
        same, others = self._written_anew(rows.without(set(locked)))
        if same.ids:
            locked += self._purge_unlocked(same)
            again, _ = self._written_anew(same.without(set(locked)))
            locked += again.ids
        return locked, others

    def _purge_unlocked(self, rows: RowVersions) -> list[int]:
        assert self._connection is not None
        by_version = bool(rows.xmins)
        statement = settle.purge_unlocked(
            self._table, self._rules.archive, self._known_shape(), self._space(), by_version=by_version
        )
        values = {"ids": list(rows.ids)} | ({"xmins": [str(xmin) for xmin in rows.xmins]} if by_version else {})
        return [row[0] for row in self._connection.execute(statement, values)]

    def quarantine(self, poison: PoisonRow) -> QuarantineOutcome:
        """Move one row to quarantine, fenced by the term it was dispatched under (P6).

        If another record is there under its id, raises DatabaseUnavailable and calls `ids_given_again`: it can go there
        under the next incarnation.
        """
        outcome = self._quarantine(poison, poison.xmin)
        if outcome is QuarantineOutcome.GONE and poison.xmin:
            same, others = self._written_anew(RowVersions((poison.id,), (poison.xmin,), (poison.created_us,)))
            if same.ids:
                return self._quarantine(poison, same.xmins[0])
            if others:
                self.refuse_other(poison.id)
        return outcome

    def _quarantine(self, poison: PoisonRow, xmin: int) -> QuarantineOutcome:
        assert self._connection is not None
        parameters = {
            "id": poison.id,
            "xmin": str(xmin) if xmin else None,
            "term": poison.term,
            "holder": poison.holder,
            "error": poison.error,
            "attempts": poison.attempts,
            "first_failed_at": poison.first_failed_at,
            "origin": poison.origin,
        }
        statement = settle.quarantine(self._table, self._known_shape(), self._rules.notice_topic, self._space())
        row = self._connection.execute(statement, parameters).fetchone()
        moved, fenced, taken = row if row is not None else (False, False, False)
        if moved:
            return QuarantineOutcome.MOVED
        if taken:
            reason = f"record {poison.id} cannot be quarantined: another one is there under its id, given out again"
            self._ids_given_again(reason)
            raise DatabaseUnavailable(reason)
        self._check_server(self._connection)
        return QuarantineOutcome.FENCED if fenced else QuarantineOutcome.GONE


def bigint_array(numbers: Sequence[int]) -> bytes:
    """A bigint[] in PostgreSQL's binary form: one dimension, no NULLs, lower bound 1.

    All elements are written at once, as 32-bit words. For a large batch this takes less than half the time of writing
    them one by one.
    """
    words = array("I", array("q", numbers).tobytes())
    halves = (words[::2], words[1::2])
    high, low = reversed(halves) if sys.byteorder == "little" else halves
    return _array(_BIGINT_OID, len(numbers), 8, high, low)


def xid_array(numbers: Sequence[int]) -> bytes:
    """The same as xid[]."""
    return _array(_XID_OID, len(numbers), 4, array("I", numbers))


def _array(oid: int, count: int, element_bytes: int, *words: array[int]) -> bytes:
    """`words`: the first words of all elements, then the second ones, …"""
    step = 1 + len(words)
    body = array("I", (element_bytes,)) * (step * count)
    for place, column in enumerate(words, 1):
        body[place::step] = column
    if sys.byteorder == "little":
        body.byteswap()
    return _ARRAY.pack(1, 0, oid, count, 1) + body.tobytes()


def _succeed(result: pq.abc.PGresult) -> None:
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise error_from_result(result, encoding="utf-8")
