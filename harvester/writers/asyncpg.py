"""The stashers for asyncpg: what is said in `harvester.outbox.stasher` and `leased_stasher` holds here too.

    async with connection.transaction():
        await connection.execute("UPDATE account SET …")
        await AsyncpgStasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

asyncpg commits each statement by itself unless told otherwise, so a transaction that was forgotten would be noticed by
nobody: it is an error here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from harvester.errors import NoTransaction
from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.lease_steps import Numbered, async_perform, no_table, take
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease, Stashed
from harvester.outbox.shape import column_shape
from harvester.outbox.sql.insert import Insertion, Style, rewritten
from harvester.outbox.tables import OutboxTable
from harvester.outbox.targets import not_apart
from harvester.record import OutboxRecord

Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy


class AsyncpgStasher:
    """Writes records into one outbox over connections of asyncpg, pooled ones too; keep one for the program's life.

    The table's columns are looked up once per connection, with its first use. `lease_time` as for
    `harvester.Stasher`.
    """

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time
        self._insertions: WeakKeyDictionary[asyncpg.Connection, Insertion] = WeakKeyDictionary()

    async def stash(self, connection: Connection, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises NoTransaction, RecordRejected, SchemaError or asyncpg's errors."""
        insertion = await self._insertion(connection)
        row = await connection.fetchrow(insertion.one_sql, *insertion.parameters(record))
        return insertion.one_id(row)

    async def stash_many(self, connection: Connection, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order. All are checked first."""
        insertion = await self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                ids += insertion.many_ids(await connection.fetch(insertion.many_sql, *parameters), parameters)
        return ids

    async def lease(self, connection: Connection, name: str) -> Lease:
        """A lease of one name; see `lease_many`."""
        return (await self.lease_many(connection, [name]))[0]

    async def lease_many(self, connection: Connection, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names, in a transaction of their own; see `harvester.Stasher.lease_many`."""
        if connection.is_in_transaction():
            raise not_apart()
        try:
            async with connection.transaction():
                steps = take(self.table, names, self.lease_time, Style.DOLLAR)
                return await async_perform(steps, lambda text, values: connection.fetch(text, *values))
        except asyncpg.PostgresError as error:
            if (missing := no_table(self.table, error)) is not None:
                raise missing from error
            raise

    def leased(self, lease: Lease) -> AsyncpgLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return AsyncpgLeasedStasher(lease, self._insertion)

    async def _insertion(self, connection: Connection) -> Insertion:
        if not connection.is_in_transaction():
            raise NoTransaction(
                f"a record for {self.table} was to be written outside of a transaction",
                hint="write it within the `async with connection.transaction():` that makes the change",
            )
        # A pool wraps its connections anew for each user of theirs.
        known: Any = connection._con if isinstance(connection, PoolConnectionProxy) else connection
        insertion = self._insertions.get(known)
        if insertion is None:
            parameters = catalog_parameters(self.table)
            query = rewritten(CATALOG_SQL, Style.DOLLAR, parameters)
            row = await connection.fetchrow(query, *parameters.values())
            assert row is not None, "the query has no condition on its one row"
            shape = column_shape(self.table, parse_catalog(tuple(row)))
            insertion = Insertion.build(self.table, shape, "utf-8", Style.DOLLAR)  # the only one that asyncpg speaks
            self._insertions[known] = insertion
        return insertion


class AsyncpgLeasedStasher(Numbered):
    """Made by `AsyncpgStasher.leased`; see `harvester.LeasedStasher`. One task at a time."""

    def __init__(self, lease: Lease, insertion: Callable[[Connection], Awaitable[Insertion]]) -> None:
        super().__init__(lease)
        self._insertion = insertion

    async def stash(self, connection: Connection, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; `position` is saved with it, None leaves the one before."""
        steps = self._one(await self._insertion(connection), record, position)
        return (await async_perform(steps, lambda text, values: connection.fetch(text, *values)))[0]

    async def stash_many(
        self, connection: Connection, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; `position` is that of the last one."""
        batches = self._many(await self._insertion(connection), records, position)
        stashed: list[Stashed] = []
        async with connection.transaction() if len(batches) > 1 else nullcontext():
            for steps in batches:
                stashed += await async_perform(steps, lambda text, values: connection.fetch(text, *values))
        return stashed

    @asynccontextmanager
    async def transaction(self, connection: Connection) -> AsyncIterator[None]:
        """A transaction, or a savepoint within one, that takes the numbers back if it does not commit."""
        before, committed = self.sequence, False
        try:
            async with connection.transaction():
                yield
            committed = True
        finally:
            if not committed:
                self.seek(before)
