"""The stashers: write outbox rows inside the transaction they belong to; under a lease, each row once.

    with connection.transaction():
        connection.execute("UPDATE account SET …")
        Stasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

The row commits and rolls back with that transaction. On an autocommit connection outside a transaction the row
commits by itself: nothing then ties it to any other change.

A bad record is refused (RecordRejected) before anything is sent, so the transaction can go on. What PostgreSQL itself
refuses is raised as psycopg raises it, since the transaction is the caller's to handle.

The leased stasher: each record is written once, however often it is stashed (docs/adr/0013-leases.md).

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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.lease_steps import Numbered, Steps, no_table, perform, take
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease, Stashed
from harvester.outbox.shape import column_shape
from harvester.outbox.sql.insert import Insertion, Style
from harvester.outbox.tables import OutboxTable
from harvester.outbox.targets import Target, begin, connection_of, require_alive, require_idle
from harvester.record import OutboxRecord


class Stasher:
    """Writes records into one outbox. Safe to share between threads; keep one for the life of the program.

    The table's columns are looked up once per connection, with its first use; after a change of the table
    connect again. A cursor that is passed in is not used itself: its results stay as they are.

    `lease_time` is how long leases last that are taken here; use renews them in the second half of their time.
    """

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time
        self._insertions: WeakKeyDictionary[psycopg.Connection[Any], Insertion] = WeakKeyDictionary()

    def stash(self, target: Target, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError or psycopg's errors."""
        connection = connection_of(target)
        insertion = self._insertion(connection)
        parameters = insertion.parameters(record)
        return insertion.one_id(_cursor(connection).execute(insertion.one_sql, parameters).fetchone())

    def stash_many(self, target: Target, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order; returns their ids, which grow in that order. All are checked first.

        One statement for every few thousand records; all or none are written, on autocommit connections too.
        """
        connection = connection_of(target)
        insertion = self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        if len(batches) > 1:
            begin(connection)
        with connection.transaction() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                rows = _cursor(connection).execute(insertion.many_sql, parameters).fetchall()
                ids += insertion.many_ids(rows, parameters)
        return ids

    def prepare(self, target: Target) -> PreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        connection = connection_of(target)
        return PreparedStasher(connection, self._insertion(connection))

    def lease(self, target: Target, name: str) -> Lease:
        """A lease of one name; see `lease_many`."""
        return self.lease_many(target, [name])[0]

    def lease_many(self, target: Target, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names, for `leased`; commits by itself, so the connection has to be idle.

        A name that is known keeps its id, last number and position, whether or not its last lease has ended, and gets
        the next generation and a new time: whoever goes on under the generation before is fenced, once any open
        transaction of his has ended (which this waits for). Ended leases under which nothing was written are removed.
        """
        connection = connection_of(target)
        require_idle(connection)
        cursor = _cursor(connection)

        def fetch(statement: str, values: Any) -> list[tuple[Any, ...]]:
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description is not None else []

        try:
            with connection.transaction():
                return perform(take(self.table, names, self.lease_time, Style.PSYCOPG), fetch)
        except psycopg.Error as error:
            if (missing := no_table(self.table, error)) is not None:
                raise missing from error
            raise

    def leased(self, lease: Lease) -> LeasedStasher:
        """A stasher that numbers its records under this lease, be it a new one or a saved `Lease(id, generation, …)`.

        With the generation that the database has, it goes on; with the one after (`Lease.raised`), its first record
        raises the database's and fences whoever has the one before. Two that start from the same saved lease at once
        are no concern of the database: take a lease by name where that can be.
        """
        return LeasedStasher(lease, self._insertion)

    def _insertion(self, connection: psycopg.Connection[Any]) -> Insertion:
        insertion = self._insertions.get(connection)
        if insertion is None:
            row = _cursor(connection).execute(CATALOG_SQL, catalog_parameters(self.table)).fetchone()
            assert row is not None, "the query has no condition on its one row"
            shape = column_shape(self.table, parse_catalog(row))
            insertion = Insertion.build(self.table, shape, connection.info.encoding)
            self._insertions[connection] = insertion
        return insertion


class PreparedStasher:
    """Made by `Stasher.prepare`; use it with that connection's thread and no longer than the connection."""

    def __init__(self, connection: psycopg.Connection[Any], insertion: Insertion) -> None:
        self._cursor = _cursor(connection)
        self._insertion = insertion

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises as `Stasher.stash`."""
        parameters = self._insertion.parameters(record)
        answer = self._cursor.execute(self._insertion.one_sql, parameters, prepare=True)
        return self._insertion.one_id(answer.fetchone())


def _cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    # Of a known class: the connection's own factories may be for dictionaries or another placeholder style.
    return psycopg.Cursor(connection, row_factory=tuple_row)


class LeasedStasher(Numbered):
    """Made by `Stasher.leased`. For one thread at a time; any connection to the database will do.

    What it raises beside the errors of `Stasher`: LeaseExpired, LeaseFenced, LeaseUnknown and SequenceGap. After each
    of them nothing was written, and the transaction can go on.
    """

    def __init__(self, lease: Lease, insertion: Callable[[psycopg.Connection[Any]], Insertion]) -> None:
        super().__init__(lease)
        self._insertion = insertion

    def stash(self, target: Target, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; `position` is saved with it, None leaves the one before."""
        connection = connection_of(target)
        insertion = self._insertion(connection)
        return self._stash(connection, self._one(insertion, record, position))[0]

    def stash_many(
        self, target: Target, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; `position` is that of the last one.

        Of no records at all nothing is saved, the position neither.
        """
        connection = connection_of(target)
        insertion = self._insertion(connection)
        batches = self._many(insertion, records, position)
        stashed: list[Stashed] = []
        if len(batches) > 1:
            begin(connection)
        with connection.transaction() if len(batches) > 1 else nullcontext():
            for steps in batches:
                stashed += self._stash(connection, steps)
        return stashed

    @contextmanager
    def transaction(self, target: Target) -> Iterator[psycopg.Transaction]:
        """A transaction, or a savepoint within one, whose end without a commit takes the numbers back, too.

        That includes a commit whose answer never came. The records of such a transaction have to be stashed again
        before any others: their numbers are theirs, and those that are there are found to be repeats.
        """
        connection, before, committed = connection_of(target), self.sequence, False
        try:
            with connection.transaction() as transaction:
                yield transaction
                require_alive(connection)
            committed = transaction.status is psycopg.Transaction.Status.COMMITTED
        finally:
            if not committed:
                self.seek(before)

    def _stash(self, connection: psycopg.Connection[Any], steps: Steps[list[Stashed]]) -> list[Stashed]:
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        return perform(steps, lambda statement, values: cursor.execute(statement, values, prepare=True).fetchall())
