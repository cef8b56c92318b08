"""The stashers for asyncio; everything in `stasher` applies here too.

A leased stasher numbers a record before it sends the statement, and awaits the answer afterwards. So stashes may be
gathered, and within a pipeline they are under way together; if one fails, all behind it fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.pq import PipelineStatus
from psycopg.rows import tuple_row

from harvester.outbox.lease_steps import (
    AsyncFetch,
    Numbered,
    Rows,
    StasherCore,
    Steps,
    async_perform,
    insert_many,
    insert_one,
)
from harvester.outbox.leases import Lease, Stashed
from harvester.outbox.sql.insert import Insertion
from harvester.outbox.stasher import begins_with_a_statement, brings_rows, require_alive, require_idle
from harvester.record import OutboxRecord

AsyncTarget = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]

R = TypeVar("R")
C = TypeVar("C")
TargetT = TypeVar("TargetT")
SourceT = TypeVar("SourceT")


class AsyncStasherBase(StasherCore, Generic[TargetT, SourceT, C]):
    """The methods of all stashers for asyncio; a subclass connects them to a driver."""

    async def stash(self, target: TargetT, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError, NoTransaction or a driver error."""
        connection = await self._connection(target)
        return (await self._run(connection, [insert_one(await self._insertion(connection), record)]))[0]

    async def stash_many(self, target: TargetT, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which ascend in that order. All are checked first."""
        connection = await self._connection(target)
        return await self._run(connection, insert_many(await self._insertion(connection), records))

    async def lease(self, target: SourceT, name: str) -> Lease:
        """Take a lease of one name, like `lease_many`."""
        return (await self.lease_many(target, [name]))[0]

    async def lease_many(self, target: SourceT, names: Iterable[str]) -> list[Lease]:
        """Take leases for `leased`, in a transaction of their own; see `harvester.Stasher.lease_many`."""
        with self._missing_table_named():
            async with self._apart(target) as connection:
                return await async_perform(self._take(connection, names), self._fetching(connection))

    async def _insertion(self, connection: C) -> Insertion:
        cache, key = self._cache(connection)
        if key not in cache:
            cache[key] = await async_perform(self._look_up(connection), self._fetching(connection))
        insertion: Insertion = cache[key]
        return insertion

    async def _run(self, connection: C, batches: Sequence[Steps[list[R]]], *, prepare: bool | None = None) -> list[R]:
        """Run batches one after the other; either all of them take effect or none."""
        fetch = self._fetching(connection, prepare)
        async with self._savepoint(connection) if len(batches) > 1 else nullcontext():
            return [done for steps in batches for done in await async_perform(steps, fetch)]

    async def _connection(self, target: TargetT) -> C:
        raise NotImplementedError

    def _fetching(self, connection: C, prepare: bool | None = None) -> AsyncFetch:
        """How statements are executed; `prepare`: the same ones will be repeated."""
        raise NotImplementedError

    def _savepoint(self, connection: C) -> AbstractAsyncContextManager[object]:
        raise NotImplementedError

    def _apart(self, source: SourceT) -> AbstractAsyncContextManager[C]:
        """Begins a transaction of its own."""
        raise NotImplementedError


class AsyncLeasedStasherBase(Numbered, Generic[TargetT, SourceT, C]):
    """The methods of all asyncio stashers that number their records; raises the same errors as `LeasedStasher`."""

    def __init__(self, lease: Lease, stasher: AsyncStasherBase[TargetT, SourceT, C]) -> None:
        super().__init__(lease)
        self._stasher = stasher

    async def stash(self, target: TargetT, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record if its number is next; saves `position` with it, None keeps the previous one."""
        connection = await self._stasher._connection(target)
        insertion = await self._stasher._insertion(connection)
        steps = self._one(insertion, record, position, hopeful=self._in_turn(connection))
        return (await self._run(connection, [steps]))[0]

    async def stash_many(
        self, target: TargetT, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, skipping those already written; `position` is that of the last one.

        With no records nothing is saved, not even the position.
        """
        connection = await self._stasher._connection(target)
        insertion = await self._stasher._insertion(connection)
        batches = self._many(insertion, records, position, hopeful=self._in_turn(connection))
        return await self._run(connection, batches)

    def _in_turn(self, connection: C) -> bool:
        """Whether each step ends before the next one begins."""
        return True

    async def _run(self, connection: C, batches: Sequence[Steps[list[Stashed]]]) -> list[Stashed]:
        return await self._stasher._run(connection, batches, prepare=True)


class AsyncStasher(AsyncStasherBase[AsyncTarget, AsyncTarget, psycopg.AsyncConnection[Any]]):
    """Writes records into one outbox over AsyncConnection; see `Stasher`."""

    async def prepare(self, target: AsyncTarget) -> AsyncPreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        connection = await self._connection(target)
        return AsyncPreparedStasher(self, connection, await self._insertion(connection))

    def leased(self, lease: Lease) -> AsyncLeasedStasher:
        """A stasher that numbers its records under this lease; see `Stasher.leased`."""
        return AsyncLeasedStasher(lease, self)

    async def _connection(self, target: AsyncTarget) -> psycopg.AsyncConnection[Any]:
        if isinstance(target, psycopg.AsyncConnection):
            return target
        if isinstance(target, psycopg.AsyncCursor):
            return target.connection
        raise TypeError(
            f"a psycopg AsyncConnection or AsyncCursor is needed, not {type(target).__name__} (see Stasher)"
        )

    def _fetching(self, connection: psycopg.AsyncConnection[Any], prepare: bool | None = None) -> AsyncFetch:
        async def fetch(statement: str, values: Any) -> Rows:
            cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
            await cursor.execute(statement, values, prepare=prepare)
            return await cursor.fetchall() if brings_rows(cursor) else ()

        return fetch

    @asynccontextmanager
    async def _savepoint(self, connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
        if begins_with_a_statement(connection):
            await psycopg.AsyncCursor(connection).execute("SELECT")
        async with connection.transaction():
            yield

    @asynccontextmanager
    async def _apart(self, source: AsyncTarget) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        connection = await self._connection(source)
        require_idle(connection)
        async with connection.transaction():
            yield connection


class AsyncPreparedStasher:
    """Made by `AsyncStasher.prepare`; use it for one call at a time and no longer than the connection."""

    def __init__(self, stasher: AsyncStasher, connection: psycopg.AsyncConnection[Any], insertion: Insertion) -> None:
        self._stasher, self._connection, self._insertion = stasher, connection, insertion

    async def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises the same errors as `AsyncStasher.stash`."""
        return (await self._stasher._run(self._connection, [insert_one(self._insertion, record)], prepare=True))[0]


class AsyncLeasedStasher(AsyncLeasedStasherBase[AsyncTarget, AsyncTarget, psycopg.AsyncConnection[Any]]):
    """Made by `AsyncStasher.leased`; see `LeasedStasher`."""

    def __init__(self, lease: Lease, stasher: AsyncStasher) -> None:
        super().__init__(lease, stasher)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self, target: AsyncTarget) -> AsyncIterator[psycopg.AsyncTransaction]:
        """A transaction that takes its numbers back unless it commits; see `LeasedStasher.transaction`."""
        connection = await self._stasher._connection(target)
        with self._taken_back() as outcome:
            async with connection.transaction() as transaction:
                yield transaction
                require_alive(connection)
            outcome.committed = transaction.status is psycopg.AsyncTransaction.Status.COMMITTED

    def _in_turn(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        return connection.pgconn.pipeline_status == PipelineStatus.OFF

    async def _run(
        self, connection: psycopg.AsyncConnection[Any], batches: Sequence[Steps[list[Stashed]]]
    ) -> list[Stashed]:
        # A hopeful step expects the lease as the previous one left it, so steps take turns; the connection executes one
        # statement at a time anyway. In a pipeline all are under way together.
        async with self._turn if self._in_turn(connection) else nullcontext():
            return await super()._run(connection, batches)
