"""The inbox: an application's effect, the consumed offset and the seen ids in one transaction.

    inbox = Inbox(connection, "billing")
    position = inbox.open("orders", 3)      # on assignment; read from position.offset
    with inbox.record(message) as effect:
        if effect.is_new:
            effect.cursor.execute("UPDATE …")

Each transaction first locks the rows of its partitions and compares generation and version with what is known here
(protocol P26). A newer generation means another owner: InboxFenced. A newer version means that the copy here is old:
the transaction is rolled back, and the next one reads the row once it is locked. Errors of PostgreSQL come as psycopg
raises them; after any of them, also after a commit whose end is unknown, the row is read before it is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from harvester.errors import InboxError, InboxFenced
from harvester.idempotence.inbox_sql import Statements
from harvester.idempotence.partition import Message
from harvester.idempotence.seen import SeenIds
from harvester.idempotence.transaction import Batch, Effect, Group, Position, Transaction
from harvester.origin import HEADER

Connection = psycopg.Connection[Any]
Cursor = psycopg.Cursor[Any]
TRIES = 20  # each time another owner of the same generation was quicker
_BUSY = (TransactionStatus.ACTIVE, TransactionStatus.INTRANS, TransactionStatus.INERROR)


class Pool(Protocol):
    """What lends connections; psycopg_pool.ConnectionPool is one."""

    def connection(self) -> AbstractContextManager[Connection]: ...


class Inbox:
    """For one consumer of a group. Not safe for several threads at once, as its consumer is not.

    `connection`: one that is in no transaction, or a pool. `header`: the name under which the relay sends origins.
    `max_intervals` bounds what a partition remembers above the relay's low water: the lowest ids are forgotten
    beyond that, with a warning, and would be taken again if they came again. `idle_timeout_s` ends a transaction
    whose client does nothing for so long (a frozen process), so that a successor does not wait for its lock for ever.
    """

    def __init__(
        self,
        connection: Connection | Pool,
        group: str,
        *,
        table: str = "harvester_inbox",
        header: str = HEADER,
        max_intervals: int = 20_000,
        idle_timeout_s: float = 60.0,
    ) -> None:
        self._source = connection
        self._sql = Statements(table)
        self._group = Group(group, header, max_intervals, idle_timeout_s)

    def create_table(self) -> None:
        """Make the table if it is not there; several may do that at once."""
        with self._connection() as connection, connection.transaction():
            connection.execute(self._sql.lock_creation)
            connection.execute(self._sql.create)

    def open(self, topic: str, partition: int, generation: int | None = None) -> Position:
        """Own a partition from now on, and learn where to read on.

        A `generation` grows with each owner and is refused, with InboxFenced, when a newer one is known. Without it
        the next one is taken, so that the last to open owns the partition.
        """
        place = (topic, partition)
        with self._connection() as connection, connection.transaction():
            cursor = _cursor(connection)
            row = cursor.execute(self._sql.open, self._group.opening(place, generation)).fetchone()
            if row is None:
                newer = cursor.execute(self._sql.generation, self._group.row(place)).fetchone()
                raise InboxFenced(topic, partition, ours=generation or 0, theirs=newer[0] if newer else 0)
        return self._group.opened(place, row)

    def close(self, topic: str, partition: int) -> None:
        """Forget a partition here, on revocation; its row stays."""
        self._group.close((topic, partition))

    def seen(self, topic: str, partition: int) -> SeenIds:
        """A copy of what an open partition has seen, as far as is known here."""
        return self._group.partition((topic, partition)).seen.copy()

    @contextmanager
    def record(self, message: Message) -> Iterator[Effect[Cursor]]:
        """One record in one transaction; see `batch`."""
        with self.batch([message]) as batch:
            yield Effect(batch)

    @contextmanager
    def batch(self, messages: Sequence[Message]) -> Iterator[Batch[Cursor]]:
        """Records of any open partitions in one transaction, committed at the end of the block.

        What the block raises is raised, and nothing is done; consume the same records again then. Raises
        InboxFenced; InboxError for what cannot be taken.
        """
        transaction = Transaction(self._group, messages)
        written = committed = False
        try:
            with self._connection() as connection, self._locked(connection, transaction):
                yield Batch(connection.cursor(), transaction.judge())
                changes = transaction.write()
                if changes is not None:
                    _cursor(connection).execute(self._sql.write, changes)
                written = True
            committed = written  # not when the block raised psycopg.Rollback, which ends here
        finally:
            transaction.end(committed=committed)

    def forget(self, incarnation: UUID) -> int:
        """Drop the ids of an incarnation that will not come again, in all rows of the group; returns how many had any.

        One transaction. Its records count as new afterwards, but for those below the position.
        """
        with self._connection() as connection, connection.transaction():
            rows = _cursor(connection).execute(self._sql.stored, {"group": self._group.name}).fetchall()
            changes = self._group.forgetting(rows, incarnation)
            for change in changes:
                connection.execute(self._sql.replace_seen, change)
        return len(changes)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        source = self._source
        with nullcontext(source) if isinstance(source, psycopg.Connection) else source.connection() as connection:
            refuse_busy(connection)
            yield connection

    @contextmanager
    def _locked(self, connection: Connection, transaction: Transaction) -> Iterator[None]:
        """A transaction that holds the rows, all as they are known here."""
        locked = False
        for _ in range(TRIES):
            with connection.transaction():
                try:
                    rows = _cursor(connection).execute(self._sql.lock, transaction.locking()).fetchall()
                except psycopg.errors.SerializationFailure as error:  # REPEATABLE READ says it this way
                    raise psycopg.Rollback from error
                if not transaction.take(rows):
                    raise psycopg.Rollback
                locked = True
                yield
            if locked:
                return
        raise outpaced()


def table_sql(table: str = "harvester_inbox") -> str:
    """The statement that makes the inbox's table, for people who migrate with their own tools."""
    return Statements(table).create.as_string(None) + ";\n"


def refuse_busy(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """A transaction of the inbox inside another would not end with its block."""
    if connection.info.transaction_status in _BUSY:
        raise InboxError(
            "the connection is in a transaction already",
            hint="give the inbox a connection of its own (autocommit=True is simplest), or end that one first",
        )


def outpaced() -> InboxError:
    """The error for an owner that never gets the row as it knew it."""
    return InboxError(
        f"others write the same rows all the time ({TRIES} tries)",
        hint="give each owner of a partition a generation of its own, or work at READ COMMITTED",
    )


def _cursor(connection: Connection) -> psycopg.Cursor[tuple[Any, ...]]:
    # Of a known class: the application may have set factories of its own.
    return psycopg.Cursor(connection, row_factory=tuple_row)
