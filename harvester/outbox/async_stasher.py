"""The stashers for psycopg's asyncio connections; everything said in `stasher` holds here too.

The leased stasher for psycopg's asyncio connections; everything said in `leased_stasher` holds here too. A record
takes its number before its statement is on its way, and answers are awaited afterwards. So stashes may be gathered,
and within a pipeline they are under way together; one that fails fails all behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import PipelineStatus
from psycopg.rows import tuple_row

from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.lease_steps import Numbered, Steps, async_perform, no_table, take
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease, Stashed
from harvester.outbox.shape import column_shape
from harvester.outbox.sql.insert import Insertion, Style
from harvester.outbox.tables import OutboxTable
from harvester.outbox.targets import AsyncTarget, async_begin, async_connection_of, require_alive, require_idle
from harvester.record import OutboxRecord


class AsyncStasher:
    """Writes records into one outbox over AsyncConnection; see `Stasher`."""

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time
        self._insertions: WeakKeyDictionary[psycopg.AsyncConnection[Any], Insertion] = WeakKeyDictionary()

    async def stash(self, target: AsyncTarget, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError or psycopg's errors."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        parameters = insertion.parameters(record)
        cursor = await _cursor(connection).execute(insertion.one_sql, parameters)
        return insertion.one_id(await cursor.fetchone())

    async def stash_many(self, target: AsyncTarget, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order."""
        connection = async_connection_of(target)
        insertion = await self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        if len(batches) > 1:
            await async_begin(connection)
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                cursor = await _cursor(connection).execute(insertion.many_sql, parameters)
                ids += insertion.many_ids(await cursor.fetchall(), parameters)
        return ids

    async def prepare(self, target: AsyncTarget) -> AsyncPreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        connection = async_connection_of(target)
        return AsyncPreparedStasher(connection, await self._insertion(connection))

    async def lease(self, target: AsyncTarget, name: str) -> Lease:
        """A lease of one name; see `Stasher.lease_many`."""
        return (await self.lease_many(target, [name]))[0]

    async def lease_many(self, target: AsyncTarget, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names; see `Stasher.lease_many`."""
        connection = async_connection_of(target)
        require_idle(connection)
        cursor = _cursor(connection)

        async def fetch(statement: str, values: Any) -> list[tuple[Any, ...]]:
            await cursor.execute(statement, values)
            return await cursor.fetchall() if cursor.description is not None else []

        try:
            async with connection.transaction():
                return await async_perform(take(self.table, names, self.lease_time, Style.PSYCOPG), fetch)
        except psycopg.Error as error:
            if (missing := no_table(self.table, error)) is not None:
                raise missing from error
            raise

    def leased(self, lease: Lease) -> AsyncLeasedStasher:
        """A stasher that numbers its records under this lease; see `Stasher.leased`."""
        return AsyncLeasedStasher(lease, self._insertion)

    async def _insertion(self, connection: psycopg.AsyncConnection[Any]) -> Insertion:
        insertion = self._insertions.get(connection)
        if insertion is None:
            cursor = await _cursor(connection).execute(CATALOG_SQL, catalog_parameters(self.table))
            row = await cursor.fetchone()
            assert row is not None, "the query has no condition on its one row"
            shape = column_shape(self.table, parse_catalog(row))
            insertion = Insertion.build(self.table, shape, connection.info.encoding)
            self._insertions[connection] = insertion
        return insertion


class AsyncPreparedStasher:
    """Made by `AsyncStasher.prepare`; use it one call at a time and no longer than the connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], insertion: Insertion) -> None:
        self._cursor = _cursor(connection)
        self._insertion = insertion

    async def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises as `AsyncStasher.stash`."""
        parameters = self._insertion.parameters(record)
        await self._cursor.execute(self._insertion.one_sql, parameters, prepare=True)
        return self._insertion.one_id(await self._cursor.fetchone())


def _cursor(connection: psycopg.AsyncConnection[Any]) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    return psycopg.AsyncCursor(connection, row_factory=tuple_row)


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
