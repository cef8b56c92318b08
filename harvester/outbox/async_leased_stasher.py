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
from harvester.outbox.lease_steps import Numbered, Steps, async_perform
from harvester.outbox.leases import Lease, Stashed
from harvester.outbox.targets import AsyncTarget, async_begin, async_connection_of, require_alive
from harvester.record import OutboxRecord


class AsyncLeasedStasher(Numbered):
    """Made by `AsyncStasher.leased`; see `LeasedStasher`."""

    def __init__(self, lease: Lease, insertion: Callable[[psycopg.AsyncConnection[Any]], Awaitable[Insertion]]) -> None:
        super().__init__(lease)
        self._insertion = insertion
        self._turn = asyncio.Lock()

    async def stash(self, target: AsyncTarget, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; see `LeasedStasher.stash`."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        steps = self._one(insertion, record, position, hopeful=not _is_pipelined(connection))
        return (await self._stash(connection, steps))[0]

    async def stash_many(
        self, target: AsyncTarget, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; see `LeasedStasher.stash_many`."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        batches = self._many(insertion, records, position, hopeful=not _is_pipelined(connection))
        stashed: list[Stashed] = []
        if len(batches) > 1:
            await async_begin(connection)
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for steps in batches:
                stashed += await self._stash(connection, steps)
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

    async def _stash(self, connection: psycopg.AsyncConnection[Any], steps: Steps[list[Stashed]]) -> list[Stashed]:
        async def fetch(statement: str, values: Any) -> list[tuple[Any, ...]]:
            cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
            await cursor.execute(statement, values, prepare=True)
            return await cursor.fetchall()

        # A hopeful step finds the lease where the one before it has left it, so they take turns; the connection has one
        # statement at a time anyway. In a pipeline all are under way together.
        async with nullcontext() if _is_pipelined(connection) else self._turn:
            return await async_perform(steps, fetch)


def _is_pipelined(connection: psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.pipeline_status != PipelineStatus.OFF
