"""The leased stasher: each record is written once, however often it is stashed (docs/adr/0013-leases.md).

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
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.insertion import Insertion
from harvester.outbox.lease_steps import Numbered, Steps, perform
from harvester.outbox.leases import Lease, Stashed
from harvester.outbox.targets import Target, begin, connection_of, require_alive
from harvester.record import OutboxRecord


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
