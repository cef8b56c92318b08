"""The stashers for asyncpg; everything in `harvester.outbox.stasher` applies here too.

    async with connection.transaction():
        await connection.execute("UPDATE account SET …")
        await AsyncpgStasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

asyncpg commits each statement by itself unless told otherwise, so nobody would notice a forgotten transaction: it is an
error here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from harvester.errors import NoTransaction
from harvester.outbox.async_stasher import AsyncLeasedStasherBase, AsyncStasherBase
from harvester.outbox.lease_steps import AsyncFetch, not_apart
from harvester.outbox.leases import Lease
from harvester.outbox.sql.insert import Style

Connection: TypeAlias = asyncpg.Connection | PoolConnectionProxy


class AsyncpgStasher(AsyncStasherBase[Connection, Connection, Connection]):
    """Writes records into one outbox on asyncpg connections, including pooled ones; keep one for the program's
    lifetime.

    The table's columns are looked up once per connection, at its first use. `lease_time`: see `harvester.Stasher`.
    """

    _driver_errors = asyncpg.PostgresError

    def leased(self, lease: Lease) -> AsyncpgLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return AsyncpgLeasedStasher(lease, self)

    def _cache(self, connection: Connection) -> tuple[MutableMapping[Any, Any], Any]:
        # A pool wraps its connections again for each user.
        return self._insertions, connection._con if isinstance(connection, PoolConnectionProxy) else connection

    def _style(self, connection: Connection) -> Style:
        return Style.DOLLAR

    def _encoding(self, connection: Connection) -> str:
        return "utf-8"  # the only one that asyncpg supports

    async def _connection(self, target: Connection) -> Connection:
        if not target.is_in_transaction():
            raise NoTransaction(
                f"a record for {self.table} must be written within a transaction",
                hint="write it within the `async with connection.transaction():` that makes the change",
            )
        return target

    def _fetching(self, connection: Connection, prepare: bool | None = None) -> AsyncFetch:
        return lambda statement, values: connection.fetch(statement, *values)

    def _savepoint(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        savepoint: AbstractAsyncContextManager[object] = connection.transaction()
        return savepoint

    @asynccontextmanager
    async def _apart(self, source: Connection) -> AsyncIterator[Connection]:
        if source.is_in_transaction():
            raise not_apart()
        async with source.transaction():
            yield source


class AsyncpgLeasedStasher(AsyncLeasedStasherBase[Connection, Connection, Connection]):
    """Made by `AsyncpgStasher.leased`; see `harvester.LeasedStasher`. One task at a time."""

    @asynccontextmanager
    async def transaction(self, connection: Connection) -> AsyncIterator[None]:
        """A transaction, or a savepoint within one, that takes its numbers back unless it commits."""
        with self._taken_back() as outcome:
            async with connection.transaction():
                yield
                await connection.execute("SELECT")  # fails after an error that was caught, as COMMIT does not
            outcome.committed = True
