"""The inbox for `psycopg.AsyncConnection`: the same table, the same calls, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from harvester.errors import InboxFenced
from harvester.idempotence.inbox import TRIES, outpaced, refuse_busy
from harvester.idempotence.inbox_sql import Statements
from harvester.idempotence.partition import Message
from harvester.idempotence.seen import SeenIds
from harvester.idempotence.transaction import Batch, Effect, Group, Position, Transaction
from harvester.origin import HEADER

Connection = psycopg.AsyncConnection[Any]
Cursor = psycopg.AsyncCursor[Any]


class AsyncPool(Protocol):
    """What lends connections; psycopg_pool.AsyncConnectionPool is one."""

    def connection(self) -> AbstractAsyncContextManager[Connection]: ...


class AsyncInbox:
    """See `Inbox`. One task at a time: the records of a partition are taken one after the other."""

    def __init__(
        self,
        connection: Connection | AsyncPool,
        group: str,
        *,
        table: str = "harvester_inbox",
        header: str = HEADER,
        max_intervals: int = 20_000,
        idle_timeout_s: float = 60.0,
    ) -> None:
        self._source = connection
        self._sql = Statements(table)
        self._group = Group(group, header, max_intervals, idle_timeout_s)

    async def create_table(self) -> None:
        """As `Inbox.create_table`."""
        async with self._connection() as connection, connection.transaction():
            await connection.execute(self._sql.lock_creation)
            await connection.execute(self._sql.create)

    async def open(self, topic: str, partition: int, generation: int | None = None) -> Position:
        """As `Inbox.open`."""
        place = (topic, partition)
        async with self._connection() as connection, connection.transaction():
            cursor = _cursor(connection)
            await cursor.execute(self._sql.open, self._group.opening(place, generation))
            row = await cursor.fetchone()
            if row is None:
                await cursor.execute(self._sql.generation, self._group.row(place))
                newer = await cursor.fetchone()
                raise InboxFenced(topic, partition, ours=generation or 0, theirs=newer[0] if newer else 0)
        return self._group.opened(place, row)

    def close(self, topic: str, partition: int) -> None:
        """As `Inbox.close`."""
        self._group.close((topic, partition))

    def seen(self, topic: str, partition: int) -> SeenIds:
        """As `Inbox.seen`."""
        return self._group.partition((topic, partition)).seen.copy()

    @asynccontextmanager
    async def record(self, message: Message) -> AsyncIterator[Effect[Cursor]]:
        """As `Inbox.record`."""
        async with self.batch([message]) as batch:
            yield Effect(batch)

    @asynccontextmanager
    async def batch(self, messages: Sequence[Message]) -> AsyncIterator[Batch[Cursor]]:
        """As `Inbox.batch`."""
        transaction = Transaction(self._group, messages)
        written = committed = False
        try:
            async with self._connection() as connection, self._locked(connection, transaction):
                yield Batch(connection.cursor(), transaction.judge())
                changes = transaction.write()
                if changes is not None:
                    await _cursor(connection).execute(self._sql.write, changes)
                written = True
            committed = written
        finally:
            transaction.end(committed=committed)

    async def forget(self, incarnation: UUID) -> int:
        """As `Inbox.forget`."""
        async with self._connection() as connection, connection.transaction():
            cursor = _cursor(connection)
            await cursor.execute(self._sql.stored, {"group": self._group.name})
            changes = self._group.forgetting(await cursor.fetchall(), incarnation)
            for change in changes:
                await connection.execute(self._sql.replace_seen, change)
        return len(changes)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        source = self._source
        given = nullcontext(source) if isinstance(source, psycopg.AsyncConnection) else source.connection()
        async with given as connection:
            refuse_busy(connection)
            yield connection

    @asynccontextmanager
    async def _locked(self, connection: Connection, transaction: Transaction) -> AsyncIterator[None]:
        locked = False
        for _ in range(TRIES):
            async with connection.transaction():
                cursor = _cursor(connection)
                try:
                    await cursor.execute(self._sql.lock, transaction.locking())
                except psycopg.errors.SerializationFailure as error:
                    raise psycopg.Rollback from error
                if not transaction.take(await cursor.fetchall()):
                    raise psycopg.Rollback
                locked = True
                yield
            if locked:
                return
        raise outpaced()


def _cursor(connection: Connection) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    return psycopg.AsyncCursor(connection, row_factory=tuple_row)
