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
from harvester.outbox.lease_steps import Statements, parameters
from harvester.outbox.leases import Course, Lease, Run, Stashed, checked_position
from harvester.outbox.targets import Target, begin, connection_of, require_alive
from harvester.record import OutboxRecord


class LeasedStasher:
    """Made by `Stasher.leased`. For one thread at a time; any connection to the database will do.

    What it raises beside the errors of `Stasher`: LeaseExpired, LeaseFenced, LeaseUnknown and SequenceGap. After each
    of them nothing was written, and the transaction can go on.
    """

    def __init__(self, lease: Lease, insertion: Callable[[psycopg.Connection[Any]], Insertion]) -> None:
        self._course = Course(lease)
        self._insertion = insertion
        self._statements = Statements()

    @property
    def lease(self) -> Lease:
        """The lease with the last number used: save this to go on from here. `position` is as it was at the start."""
        return self._course.lease

    @property
    def sequence(self) -> int:
        """The number of the last record that was stashed, or tried to be."""
        return self._course.sequence

    def seek(self, sequence: int) -> None:
        """The next record's number is the one after this: what came later was rolled back, or is to be sent again."""
        self._course.seek(sequence)

    def stash(self, target: Target, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; `position` is saved with it, None leaves the one before."""
        connection = connection_of(target)
        insertion = self._insertion(connection)
        row, position = insertion.parameters(record), checked_position(position)
        run = self._course.give(1)
        values = parameters(self._course.start, run, position, row, many=False)
        return self._stash(connection, insertion, run, values, many=False)[0]

    def stash_many(
        self, target: Target, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; `position` is that of the last one.

        Of no records at all nothing is saved, the position neither.
        """
        connection = connection_of(target)
        insertion = self._insertion(connection)
        batches, position = insertion.batches(records), checked_position(position)
        runs = [self._course.give(len(rows[0])) for rows in batches]
        stashed: list[Stashed] = []
        if len(batches) > 1:
            begin(connection)
        with connection.transaction() if len(batches) > 1 else nullcontext():
            for run, rows in zip(runs, batches, strict=True):
                where = position if run is runs[-1] else None
                values = parameters(self._course.start, run, where, rows, many=True)
                stashed += self._stash(connection, insertion, run, values, many=True)
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

    def _stash(
        self, connection: psycopg.Connection[Any], insertion: Insertion, run: Run, values: dict[str, Any], *, many: bool
    ) -> list[Stashed]:
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        if self._course.at is not None:
            values["at"] = self._course.at
            hopeful = self._statements.get(insertion, many=many, hopeful=True)
            if (row := cursor.execute(hopeful, values, prepare=True).fetchone()) is not None:
                return self._course.hoped(run, row)
        deciding = self._statements.get(insertion, many=many, hopeful=False)
        return self._course.decided(run, cursor.execute(deciding, values, prepare=True).fetchone())
