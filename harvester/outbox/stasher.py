"""The stashers: write outbox rows inside the transaction they belong to; with a lease, each row once.

    with connection.transaction():
        connection.execute("UPDATE account SET …")
        Stasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

The row commits and rolls back with that transaction. On an autocommit connection outside a transaction, the row commits
by itself: then nothing ties it to any other change.

A bad record is refused (RecordRejected) before anything is sent, so the transaction can continue. Errors from
PostgreSQL itself are raised as psycopg raises them, since the caller must handle the transaction.

A leased stasher writes each record once, however often it is stashed (docs/adr/0013-leases.md):

    lease = stasher.lease(connection, "orders-reader")
    writer = stasher.leased(lease)
    for offset, order in upstream.read_from(lease.position):
        with writer.transaction(connection):
            writer.stash(connection, OutboxRecord("orders", order.customer, order.text), position=str(offset))

A record's number, the upstream position and the row commit together or not at all, so whoever takes the lease next
knows exactly which records have been written. Repeated numbers write nothing.

Under REPEATABLE READ and SERIALIZABLE, a step that meets a newer commit of its lease's row fails the transaction with
psycopg's SerializationFailure, as any UPDATE does: repeat the whole transaction; `transaction` has taken the numbers
back. Transactions of one lease wait for each other, so a lease is for one stream of records; use several names for
several streams, always in the same order if one transaction uses more than one.
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
TargetT = TypeVar("TargetT")  # what callers pass to write
SourceT = TypeVar("SourceT")  # what callers pass to take leases


class StasherBase(StasherCore, Generic[TargetT, SourceT, C]):
    """The methods of all blocking stashers; a subclass connects them to a driver."""

    def stash(self, target: TargetT, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError, NoTransaction or a driver error."""
        connection = self._connection(target)
        return self._run(connection, [insert_one(self._insertion(connection), record)])[0]

    def stash_many(self, target: TargetT, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order; returns their ids, which ascend in that order. All are checked first.

        One statement for every few thousand records; all or none are written, even on autocommit connections.
        """
        connection = self._connection(target)
        return self._run(connection, insert_many(self._insertion(connection), records))

    def lease(self, target: SourceT, name: str) -> Lease:
        """Take a lease of one name, like `lease_many`."""
        return self.lease_many(target, [name])[0]

    def lease_many(self, target: SourceT, names: Iterable[str]) -> list[Lease]:
        """Take leases for `leased`, in the order of the names; commits by itself, so no transaction may be open.

        A known name keeps its id, last number and position, whether or not its last lease has expired, and gets the
        next generation and a new lease time: a writer that continues under the previous generation is fenced once its
        open transaction, if any, has ended (which this call waits for). Expired leases under which nothing was written
        are removed.
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
        """Run batches one after the other; either all of them take effect or none."""
        fetch = self._fetching(connection, prepare)
        with self._savepoint(connection) if len(batches) > 1 else nullcontext():
            return [done for steps in batches for done in perform(steps, fetch)]

    def _connection(self, target: TargetT) -> C:
        raise NotImplementedError

    def _fetching(self, connection: C, prepare: bool | None = None) -> Fetch:
        """How statements are executed; `prepare`: the same ones will be repeated."""
        raise NotImplementedError

    def _savepoint(self, connection: C) -> AbstractContextManager[object]:
        raise NotImplementedError

    def _apart(self, source: SourceT) -> AbstractContextManager[C]:
        """Begins a transaction of its own."""
        raise NotImplementedError


class LeasedStasherBase(Numbered, Generic[TargetT, SourceT, C]):
    """The methods of all blocking stashers that number their records. For one thread at a time.

    In addition to its stasher's errors it raises LeaseExpired, LeaseFenced, LeaseUnknown and SequenceGap. With each of
    these, nothing was written, and the transaction can continue.
    """

    def __init__(self, lease: Lease, stasher: StasherBase[TargetT, SourceT, C]) -> None:
        super().__init__(lease)
        self._stasher = stasher

    def stash(self, target: TargetT, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record if its number is next; saves `position` with it, None keeps the previous one."""
        connection = self._stasher._connection(target)
        steps = self._one(self._stasher._insertion(connection), record, position)
        return self._stasher._run(connection, [steps], prepare=True)[0]

    def stash_many(
        self, target: TargetT, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, skipping those already written; `position` is that of the last one.

        With no records nothing is saved, not even the position.
        """
        connection = self._stasher._connection(target)
        batches = self._many(self._stasher._insertion(connection), records, position)
        return self._stasher._run(connection, batches, prepare=True)


class Stasher(StasherBase[Target, Target, psycopg.Connection[Any]]):
    """Writes records into one outbox with psycopg. Safe to share between threads; keep one for the program's lifetime.

    The table's columns are looked up once per connection, at its first use; reconnect after changing the table. A
    cursor that is passed in is not used itself: its results remain.

    `lease_time` is the duration of leases taken here; using a lease in the second half of its time renews it.
    """

    def prepare(self, target: Target) -> PreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        return PreparedStasher(self, self._connection(target))

    def leased(self, lease: Lease) -> LeasedStasher:
        """A stasher that numbers its records under this lease, either a new one or a saved `Lease(id, generation, …)`.

        With the database's current generation, it continues; with the next one (`Lease.raised`), its first record
        raises the database's generation and fences the holder of the previous one. The database cannot detect two
        stashers that start from the same saved lease at once: if that can happen, take a lease by name.
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
    """Made by `Stasher.prepare`; use it on that connection's thread and no longer than the connection."""

    def __init__(self, stasher: Stasher, connection: psycopg.Connection[Any]) -> None:
        self._stasher, self._connection, self._insertion = stasher, connection, stasher._insertion(connection)

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises the same errors as `Stasher.stash`."""
        return self._stasher._run(self._connection, [insert_one(self._insertion, record)], prepare=True)[0]


class LeasedStasher(LeasedStasherBase[Target, Target, psycopg.Connection[Any]]):
    """Made by `Stasher.leased`. For one thread at a time; works with any connection to the database."""

    @contextmanager
    def transaction(self, target: Target) -> Iterator[psycopg.Transaction]:
        """A transaction, or a savepoint within one, that takes its numbers back unless it commits.

        That includes a commit whose answer never arrived. The records of such a transaction must be stashed again
        before any others: they keep their numbers, and those already written are recognised as repeats.
        """
        connection = self._stasher._connection(target)
        with self._taken_back() as outcome:
            with connection.transaction() as transaction:
                yield transaction
                require_alive(connection)
            outcome.committed = transaction.status is psycopg.Transaction.Status.COMMITTED


AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def brings_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether to fetch. In a pipeline this is not known yet; only statements that return rows are executed there."""
    return cursor.description is not None or cursor.connection.pgconn.pipeline_status != PipelineStatus.OFF


def begins_with_a_statement(connection: AnyConnection) -> bool:
    """Whether the caller's transaction has yet to begin, with its first statement.

    In that case a statement must precede `connection.transaction()`; otherwise psycopg makes that the outermost
    transaction and commits at its end, although the caller has yet to commit or roll back.
    """
    return not connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE


def require_idle(connection: AnyConnection) -> None:
    """Raises LeaseError for a connection in a transaction or pipeline."""
    idle = connection.info.transaction_status == TransactionStatus.IDLE
    if not idle or connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise not_apart()


def require_alive(connection: AnyConnection) -> None:
    """Raises psycopg's error for a transaction in which an error has occurred.

    PostgreSQL answers its COMMIT with a rollback and without an error.
    """
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise psycopg.errors.InFailedSqlTransaction(
            "this transaction has failed, even if the exception was caught: nothing of it is committed"
        )
