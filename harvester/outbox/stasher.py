"""The stashers: write outbox rows inside the transaction they belong to; under a lease, each row once.

    with connection.transaction():
        connection.execute("UPDATE account SET …")
        Stasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

The row commits and rolls back with that transaction. On an autocommit connection outside a transaction the row
commits by itself: nothing then ties it to any other change.

A bad record is refused (RecordRejected) before anything is sent, so the transaction can go on. What PostgreSQL itself
refuses is raised as psycopg raises it, since the transaction is the caller's to handle.

A leased stasher writes each record once, however often it is stashed (docs/adr/0013-leases.md):

    lease = stasher.lease(connection, "orders-reader")
    writer = stasher.leased(lease)
    for offset, order in upstream.read_from(lease.position):
        with writer.transaction(connection):
            writer.stash(connection, OutboxRecord("orders", order.customer, order.text), position=str(offset))

A record's number, the upstream position and the row commit together or not at all, so whoever takes the lease next
knows exactly which records are there. Numbers that come again write nothing.

Under REPEATABLE READ and SERIALIZABLE a step that meets a newer commit of its lease's row ends the transaction with
psycopg's SerializationFailure, as any UPDATE does: repeat the transaction whole; `transaction` has taken the numbers
back. Transactions of one lease wait for each other, so a lease is for one stream of records; take several names for
several streams, and use them in the same order where one transaction uses more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from harvester.outbox.lease_steps import (
    Fetch,
    Numbered,
    Rows,
    StasherCore,
    Steps,
    insert_many,
    insert_one,
    not_apart,
    perform,
)
from harvester.outbox.leases import Lease, Stashed
from harvester.outbox.sql.insert import Insertion
from harvester.record import OutboxRecord

Target = psycopg.Connection[Any] | psycopg.Cursor[Any]

R = TypeVar("R")
C = TypeVar("C")  # what statements are executed on
TargetT = TypeVar("TargetT")  # what callers write over
SourceT = TypeVar("SourceT")  # what leases are taken over


class StasherBase(StasherCore, Generic[TargetT, SourceT, C]):
    """The methods of all blocking stashers; a subclass connects them to a driver."""

    def stash(self, target: TargetT, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError, NoTransaction or a driver error."""
        connection = self._connection(target)
        return self._run(connection, [insert_one(self._insertion(connection), record)])[0]

    def stash_many(self, target: TargetT, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order; returns their ids, which grow in that order. All are checked first.

        One statement for every few thousand records; all or none are written, on autocommit connections too.
        """
        connection = self._connection(target)
        return self._run(connection, insert_many(self._insertion(connection), records))

    def lease(self, target: SourceT, name: str) -> Lease:
        """Take a lease of one name, as `lease_many` does."""
        return self.lease_many(target, [name])[0]

    def lease_many(self, target: SourceT, names: Iterable[str]) -> list[Lease]:
        """Take leases for `leased`, in the order of the names; commits by itself, so no transaction may be open.

        A name that is known keeps its id, last number and position, whether or not its last lease has ended, and gets
        the next generation and a new time: whoever goes on under the generation before is fenced, once any open
        transaction of his has ended (which this waits for). Ended leases under which nothing was written are removed.
        """
        with self._missing_table_named(), self._apart(target) as connection:
            return perform(self._take(connection, names), self._fetching(connection))

    def _insertion(self, connection: C) -> Insertion:
        cache, key = self._cache(connection)
        if key not in cache:
            cache[key] = perform(self._look_up(connection), self._fetching(connection))
        insertion: Insertion = cache[key]
        return insertion

    def _run(self, connection: C, batches: Sequence[Steps[list[R]]], *, prepare: bool | None = None) -> list[R]:
        """Run batches, one after the other; all or none of them have an effect."""
        fetch = self._fetching(connection, prepare)
        with self._savepoint(connection) if len(batches) > 1 else nullcontext():
            return [done for steps in batches for done in perform(steps, fetch)]

    def _connection(self, target: TargetT) -> C:
        raise NotImplementedError

    def _fetching(self, connection: C, prepare: bool | None = None) -> Fetch:
        """How statements are executed; `prepare`: the same ones will come again."""
        raise NotImplementedError

    def _savepoint(self, connection: C) -> AbstractContextManager[object]:
        raise NotImplementedError

    def _apart(self, source: SourceT) -> AbstractContextManager[C]:
        """Begins a transaction of its own."""
        raise NotImplementedError


class LeasedStasherBase(Numbered, Generic[TargetT, SourceT, C]):
    """The methods of every blocking stasher that numbers its records. For one thread at a time.

    What it raises beside the errors of its stasher: LeaseExpired, LeaseFenced, LeaseUnknown and SequenceGap. After each
    of them nothing was written, and the transaction can go on.
    """

    def __init__(self, lease: Lease, stasher: StasherBase[TargetT, SourceT, C]) -> None:
        super().__init__(lease)
        self._stasher = stasher

    def stash(self, target: TargetT, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; `position` is saved with it, None leaves the one before."""
        connection = self._stasher._connection(target)
        steps = self._one(self._stasher._insertion(connection), record, position)
        return self._stasher._run(connection, [steps], prepare=True)[0]

    def stash_many(
        self, target: TargetT, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; `position` is that of the last one.

        Of no records at all nothing is saved, the position neither.
        """
        connection = self._stasher._connection(target)
        batches = self._many(self._stasher._insertion(connection), records, position)
        return self._stasher._run(connection, batches, prepare=True)


class Stasher(StasherBase[Target, Target, psycopg.Connection[Any]]):
    """Writes records into one outbox over psycopg. Safe to share between threads; keep one for the program's life.

    The table's columns are looked up once per connection, with its first use; after a change of the table
    connect again. A cursor that is passed in is not used itself: its results stay as they are.

    `lease_time` is how long leases last that are taken here; use renews them in the second half of their time.
    """

    def prepare(self, target: Target) -> PreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        return PreparedStasher(self, self._connection(target))

    def leased(self, lease: Lease) -> LeasedStasher:
        """A stasher that numbers its records under this lease, be it a new one or a saved `Lease(id, generation, …)`.

        With the generation that the database has, it goes on; with the one after (`Lease.raised`), its first record
        raises the database's and fences whoever has the one before. Two that start from the same saved lease at once
        are no concern of the database: take a lease by name where that can be.
        """
        return LeasedStasher(lease, self)

    def _connection(self, target: Target) -> psycopg.Connection[Any]:
        if isinstance(target, psycopg.Connection):
            return target
        if isinstance(target, psycopg.Cursor):
            return target.connection
        raise TypeError(f"a psycopg Connection or Cursor is needed, not {type(target).__name__} (see AsyncStasher)")

    def _fetching(self, connection: psycopg.Connection[Any], prepare: bool | None = None) -> Fetch:
        def fetch(statement: str, values: Any) -> Rows:
            # Of a known class: the connection's own factories may be for dictionaries or another placeholder style.
            cursor = psycopg.Cursor(connection, row_factory=tuple_row).execute(statement, values, prepare=prepare)
            return cursor.fetchall() if brings_rows(cursor) else ()

        return fetch

    @contextmanager
    def _savepoint(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        if begins_with_a_statement(connection):
            psycopg.Cursor(connection).execute("SELECT")
        with connection.transaction():
            yield

    @contextmanager
    def _apart(self, source: Target) -> Iterator[psycopg.Connection[Any]]:
        connection = self._connection(source)
        require_idle(connection)
        with connection.transaction():
            yield connection


class PreparedStasher:
    """Made by `Stasher.prepare`; use it with that connection's thread and no longer than the connection."""

    def __init__(self, stasher: Stasher, connection: psycopg.Connection[Any]) -> None:
        self._stasher, self._connection, self._insertion = stasher, connection, stasher._insertion(connection)

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises as `Stasher.stash`."""
        return self._stasher._run(self._connection, [insert_one(self._insertion, record)], prepare=True)[0]


class LeasedStasher(LeasedStasherBase[Target, Target, psycopg.Connection[Any]]):
    """Made by `Stasher.leased`. For one thread at a time; any connection to the database will do."""

    @contextmanager
    def transaction(self, target: Target) -> Iterator[psycopg.Transaction]:
        """A transaction, or a savepoint within one, whose end without a commit takes the numbers back, too.

        That includes a commit whose answer never came. The records of such a transaction have to be stashed again
        before any others: their numbers are theirs, and those that are there are found to be repeats.
        """
        connection = self._stasher._connection(target)
        with self._taken_back() as outcome:
            with connection.transaction() as transaction:
                yield transaction
                require_alive(connection)
            outcome.committed = transaction.status is psycopg.Transaction.Status.COMMITTED


AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def brings_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether to fetch. Within a pipeline nobody knows yet; there only statements that bring rows are executed."""
    return cursor.description is not None or cursor.connection.pgconn.pipeline_status != PipelineStatus.OFF


def begins_with_a_statement(connection: AnyConnection) -> bool:
    """Whether the caller's transaction has yet to begin, with its first statement.

    A statement has to come before `connection.transaction()` then, or psycopg makes that the outermost transaction and
    commits at its end, although the caller's own is still to be committed or rolled back by him.
    """
    return not connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE


def require_idle(connection: AnyConnection) -> None:
    """Raises LeaseError for a connection within a transaction or pipeline."""
    idle = connection.info.transaction_status == TransactionStatus.IDLE
    if not idle or connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise not_apart()


def require_alive(connection: AnyConnection) -> None:
    """Raises psycopg's error for a transaction that an error has ended.

    PostgreSQL answers its COMMIT with a rollback and without an error.
    """
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise psycopg.errors.InFailedSqlTransaction(
            "an error has ended this transaction, whatever became of the exception: nothing of it is committed"
        )
