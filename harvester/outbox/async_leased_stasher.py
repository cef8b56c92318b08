"""The leased stasher for psycopg's asyncio connections; everything said in `leased_stasher` holds here too.

A record takes its number before its statement is on its way, and answers are awaited afterwards. So stashes may be
gathered, and within a pipeline they are under way together; one that fails fails all behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus
from psycopg.rows import tuple_row

from harvester.outbox.insertion import Insertion
from harvester.outbox.lease_steps import Statements, parameters
from harvester.outbox.leases import Course, Lease, Run, Stashed, checked_position
from harvester.outbox.targets import AsyncTarget, async_begin, async_connection_of, require_alive
from harvester.record import OutboxRecord


class AsyncLeasedStasher:
    """Made by `AsyncStasher.leased`; see `LeasedStasher`."""

    def __init__(self, lease: Lease, insertion: Callable[[psycopg.AsyncConnection[Any]], Awaitable[Insertion]]) -> None:
        self._course = Course(lease)
        self._insertion = insertion
        self._statements = Statements()
        self._turn = asyncio.Lock()

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

    async def stash(self, target: AsyncTarget, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; see `LeasedStasher.stash`."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        row, position = insertion.parameters(record), checked_position(position)
        run = self._course.give(1)
        values = parameters(self._course.start, run, position, row, many=False)
        return (await self._stash(connection, insertion, run, values, many=False))[0]

    async def stash_many(
        self, target: AsyncTarget, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; see `LeasedStasher.stash_many`."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        batches, position = insertion.batches(records), checked_position(position)
        runs = [self._course.give(len(rows[0])) for rows in batches]
        stashed: list[Stashed] = []
        if len(batches) > 1:
            await async_begin(connection)
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for run, rows in zip(runs, batches, strict=True):
                where = position if run is runs[-1] else None
                values = parameters(self._course.start, run, where, rows, many=True)
                stashed += await self._stash(connection, insertion, run, values, many=True)
        return stashed

    @asynccontextmanager
    async def transaction(self, target: AsyncTarget) -> AsyncIterator[psycopg.AsyncTransaction]:
        """A transaction whose end without a commit takes the numbers back, too; see `LeasedStasher.transaction`."""
        connection, before, committed = async_connection_of(target), self.sequence, False
        try:
            async with connection.transaction() as transaction:
                yield transaction
                require_alive(connection)
            committed = transaction.status is psycopg.AsyncTransaction.Status.COMMITTED
        finally:
            if not committed:
                self.seek(before)

    async def _stash(
        self,
        connection: psycopg.AsyncConnection[Any],
        insertion: Insertion,
        run: Run,
        values: dict[str, Any],
        *,
        many: bool,
    ) -> list[Stashed]:
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            # Of those that are under way together only the first could find the lease where it was seen last.
            return await self._decide(connection, insertion, run, values, many=many)
        async with self._turn:  # for the same reason; the connection has one statement at a time anyway
            if self._course.at is not None:
                values["at"] = self._course.at
                hopeful = self._statements.get(insertion, many=many, hopeful=True)
                cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
                await cursor.execute(hopeful, values, prepare=True)
                if (row := await cursor.fetchone()) is not None:
                    return self._course.hoped(run, row)
            return await self._decide(connection, insertion, run, values, many=many)

    async def _decide(
        self,
        connection: psycopg.AsyncConnection[Any],
        insertion: Insertion,
        run: Run,
        values: dict[str, Any],
        *,
        many: bool,
    ) -> list[Stashed]:
        deciding = self._statements.get(insertion, many=many, hopeful=False)
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        await cursor.execute(deciding, values, prepare=True)
        return self._course.decided(run, await cursor.fetchone())
