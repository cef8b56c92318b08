"""The stasher for psycopg's asyncio connections; everything said in `stasher` holds here too."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.async_leased_stasher import AsyncLeasedStasher
from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.insertion import Insertion
from harvester.outbox.lease_steps import async_perform, no_table, take
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease
from harvester.outbox.placeholders import Style
from harvester.outbox.shape import column_shape
from harvester.outbox.tables import OutboxTable
from harvester.outbox.targets import AsyncTarget, async_begin, async_connection_of, require_idle
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
