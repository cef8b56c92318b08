"""The inbox: an application's effect, the consumed offset and the seen ids in one transaction.

    inbox = Inbox(connection, "billing")
    position = inbox.open("orders", 3)      # on assignment; read from position.offset
    with inbox.record(message) as effect:
        if effect.is_new:
            effect.cursor.execute("UPDATE …")

Each transaction first locks the rows of its partitions and compares generation and version with the local copy
(protocol P26). A newer generation means another owner: InboxFenced. A newer version means that the local copy is old:
the transaction is rolled back, and the next one reads the row once it is locked. After any error, including a commit
with unknown outcome, the row is read before it is trusted.

PostgreSQL's errors are raised as psycopg raises them, with one exception: when the session is lost, or none can be had,
the record is not to blame. A pool has another session soon (InboxUnavailable); a single connection never works again
(InboxError). Both are psycopg.OperationalError, too.

`AsyncInbox` does the same with `psycopg.AsyncConnection`; the common part is in `partition`.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from harvester.claim_check import ClaimChecks, StoreSettings
from harvester.errors import InboxError, InboxFenced, InboxUnavailable
from harvester.idempotence.partition import Batch, Effect, InboxTransaction, Message, OpenPartitions, Position
from harvester.idempotence.seen import SeenIds
from harvester.origin import HEADER

ADVISORY_LOCK = 0x69_6E_62_6F_78  # "inbox"
_FIRST_GENERATION = sql.SQL("(extract(epoch FROM clock_timestamp()) * 1000000)::bigint - 10000000000000000")


class InboxStatements:
    """The statements for one table, `name` or `schema.name` as is (case-sensitive), with psycopg's named parameters."""

    def __init__(self, table: str) -> None:
        plain = sql.Identifier(*table.split("."))
        name = sql.Identifier(*table.replace("%", "%%").split("."))  # with parameters, a per cent sign is special
        self.exists = sql.SQL("SELECT pg_catalog.to_regclass({}) IS NOT NULL").format(plain.as_string(None))
        self.lock_creation = sql.SQL("SELECT pg_catalog.pg_advisory_xact_lock({})").format(sql.Literal(ADVISORY_LOCK))
        # Rows change constantly and no index covers the changing columns: free space on the page keeps updates within
        # it.
        self.create = sql.SQL("""CREATE TABLE IF NOT EXISTS {} (
    consumer_group TEXT NOT NULL,
    topic          TEXT NOT NULL,
    partition      INTEGER NOT NULL,
    next_offset    BIGINT,
    version        BIGINT NOT NULL DEFAULT 0,
    generation     BIGINT NOT NULL,
    seen           BYTEA NOT NULL,
    updated_at     TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic, partition)
) WITH (fillfactor = 50)""").format(plain)
        # Opening counts as a change, so that holders of a copy of the row notice. Without a token, a new row begins
        # with a number that no previously deleted row has reached: it is based on microseconds, and opening takes
        # longer than one. Until 2286 it is negative, so that tokens, which are offsets, are above it.
        self.open = sql.SQL("""INSERT INTO {} AS i (consumer_group, topic, partition, generation, seen)
VALUES (%(group)s, %(topic)s, %(partition)s, coalesce(%(generation)s::bigint, {first}), %(seen)s)
ON CONFLICT (consumer_group, topic, partition) DO UPDATE
SET generation = coalesce(%(generation)s::bigint, i.generation + 1), version = i.version + 1, updated_at = now()
WHERE %(generation)s::bigint IS NULL OR i.generation <= %(generation)s::bigint
RETURNING i.generation, i.version, i.next_offset, i.seen""").format(name, first=_FIRST_GENERATION)
        self.generation = sql.SQL("""SELECT generation FROM {}
WHERE consumer_group = %(group)s AND topic = %(topic)s AND partition = %(partition)s""").format(name)
        # In key order, so that two batches never deadlock. The setting ends with the transaction. The seen ids are
        # long, and sent only if the row is not known.
        self.lock = sql.SQL("""SELECT i.topic, i.partition, i.generation, i.version, i.next_offset,
    CASE WHEN w.version IS NULL THEN i.seen END, set_config('idle_in_transaction_session_timeout', %(idle)s, true)
FROM {} AS i JOIN unnest(%(topics)s::text[], %(partitions)s::int[], %(versions)s::bigint[])
    AS w (topic, partition, version) ON i.topic = w.topic AND i.partition = w.partition
WHERE i.consumer_group = %(group)s
ORDER BY i.topic, i.partition FOR UPDATE OF i""").format(name)
        self.write = sql.SQL("""UPDATE {} AS i
SET next_offset = w.next_offset, seen = w.seen, version = i.version + 1, updated_at = now()
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(offsets)s::bigint[], %(seen)s::bytea[])
    AS w (topic, partition, next_offset, seen)
WHERE i.consumer_group = %(group)s AND i.topic = w.topic AND i.partition = w.partition""").format(name)
        self.stored = sql.SQL("""SELECT topic, partition, seen FROM {}
WHERE consumer_group = %(group)s ORDER BY topic, partition FOR UPDATE""").format(name)
        self.replace_seen = sql.SQL("""UPDATE {} SET seen = %(seen)s, version = version + 1, updated_at = now()
WHERE consumer_group = %(group)s AND topic = %(topic)s AND partition = %(partition)s""").format(name)


Connection = psycopg.Connection[Any]
Cursor = psycopg.Cursor[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
AsyncCursor = psycopg.AsyncCursor[Any]
S = TypeVar("S")
TRIES = 20  # failed attempts, each because another owner of the same generation was faster
_BUSY = (TransactionStatus.ACTIVE, TransactionStatus.INTRANS, TransactionStatus.INERROR)


class Pool(Protocol):
    """Something that lends connections; psycopg_pool.ConnectionPool is one."""

    def connection(self) -> AbstractContextManager[Connection]: ...


class AsyncPool(Protocol):
    """Something that lends connections; psycopg_pool.AsyncConnectionPool is one."""

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection]: ...


class InboxBase(Generic[S]):
    """The parts of both inboxes that need no database."""

    def __init__(
        self,
        connection: S,
        group: str,
        *,
        table: str = "harvester_inbox",
        header: str = HEADER,
        max_intervals: int = 20_000,
        idle_timeout_s: float = 60.0,
        claim_check: StoreSettings | Mapping[str, str] | None = None,
    ) -> None:
        self._source = connection
        self._claim_checks = None if claim_check is None else ClaimChecks(claim_check)
        self._sql = InboxStatements(table)
        self._group = OpenPartitions(group, header, max_intervals, idle_timeout_s)

    def close(self, topic: str, partition: int) -> None:
        """Forget a partition locally, on revocation; its row stays."""
        self._group.close((topic, partition))

    def seen(self, topic: str, partition: int) -> SeenIds:
        """A copy of the ids seen in an open partition, as far as known locally."""
        return self._group.partition((topic, partition)).seen.copy()


class Inbox(InboxBase[Connection | Pool]):
    """For one consumer of a group. Like its consumer, it must not be used by several threads at once.

    `connection`: one that is not in a transaction, or a pool. `header`: the name under which the relay sends origins.
    `max_intervals` limits what a partition remembers above the relay's low watermark: beyond that the lowest ids are
    forgotten, with a warning, and would be accepted again. `idle_timeout_s` ends a transaction whose client is idle for
    this long (a frozen process), so that a successor does not wait for its lock forever. `claim_check`: the store for
    values too large for Kafka, as StoreSettings or a mapping of its fields. Messages of a batch, and `Effect.message`,
    then have their values, which are fetched before the rows are locked. If one is missing or changed, `value()` raises
    the error; an empty block skips such a record.
    """

    def create_table(self) -> None:
        """Create the table if it is missing; safe to run concurrently. Only that needs the privilege to create it."""
        with self._connection() as connection, connection.transaction():
            row = _cursor(connection).execute(self._sql.exists).fetchone()
            if row is None or not row[0]:
                connection.execute(self._sql.lock_creation)
                connection.execute(self._sql.create)

    def open(self, topic: str, partition: int, generation: int | None = None) -> Position:
        """Own a partition from now on; returns where to read on.

        A `generation` must grow with each owner; it is refused with InboxFenced if a newer one is known. By default the
        next one is taken, so that the last to open owns the partition.
        """
        place = (topic, partition)
        with self._connection() as connection, connection.transaction():
            cursor = _cursor(connection)
            row = cursor.execute(self._sql.open, self._group.opening(place, generation)).fetchone()
            if row is None:
                newer = cursor.execute(self._sql.generation, self._group.row(place)).fetchone()
                raise InboxFenced(topic, partition, ours=generation or 0, theirs=newer[0] if newer else 0)
        return self._group.opened(place, row)

    @contextmanager
    def record(self, message: Message) -> Iterator[Effect[Cursor]]:
        """One record in one transaction; see `batch`."""
        with self.batch([message]) as batch:
            yield Effect(batch)

    @contextmanager
    def batch(self, messages: Sequence[Message]) -> Iterator[Batch[Cursor]]:
        """Records of any open partitions in one transaction, committed at the end of the block.

        If the block raises, the exception is propagated and nothing is done; consume the same records again then.
        Raises InboxFenced; InboxUnavailable if a pool has no connection, or its connection was lost; InboxError for
        invalid messages, and if the only connection was lost.
        """
        transaction = InboxTransaction(self._group, messages)
        written = committed = False
        try:
            if self._claim_checks is not None:
                transaction.resolve(self._claim_checks.resolve_or_mark)
            with self._connection() as connection, self._locked(connection, transaction):
                yield Batch(connection.cursor(), transaction.judge())
                changes = transaction.write()
                if changes is not None:
                    _cursor(connection).execute(self._sql.write, changes)
                written = True
            committed = written  # not if the block raised psycopg.Rollback, which ends here
        finally:
            transaction.end(committed=committed)

    def forget(self, incarnation: UUID) -> int:
        """Drop the ids of an incarnation that will not return, in all rows of the group; returns how many rows had any.

        In one transaction. Its records then count as new, except those below the position.
        """
        with self._connection() as connection, connection.transaction():
            rows = _cursor(connection).execute(self._sql.stored, {"group": self._group.name}).fetchall()
            changes = self._group.forgetting(rows, incarnation)
            for change in changes:
                connection.execute(self._sql.replace_seen, change)
        return len(changes)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        source = self._source
        with (
            losses_judged(source) as lent,
            nullcontext(source) if isinstance(source, psycopg.Connection) else source.connection() as connection,
        ):
            lent.append(connection)
            refuse_busy(connection)
            yield connection

    @contextmanager
    def _locked(self, connection: Connection, transaction: InboxTransaction) -> Iterator[None]:
        """A transaction that locks the rows, all as known locally."""
        locked = False
        for _ in range(TRIES):
            with connection.transaction():
                try:
                    rows = _cursor(connection).execute(self._sql.lock, transaction.locking()).fetchall()
                except psycopg.errors.SerializationFailure as error:  # how REPEATABLE READ reports it
                    raise psycopg.Rollback from error
                if not transaction.take(rows):
                    raise psycopg.Rollback
                locked = True
                yield
            if locked:
                return
        raise outpaced()


class AsyncInbox(InboxBase[AsyncConnection | AsyncPool]):
    """See `Inbox`. One task at a time: the records of a partition are processed one after the other."""

    async def create_table(self) -> None:
        """Like `Inbox.create_table`."""
        async with self._connection() as connection, connection.transaction():
            row = await (await _async_cursor(connection).execute(self._sql.exists)).fetchone()
            if row is None or not row[0]:
                await connection.execute(self._sql.lock_creation)
                await connection.execute(self._sql.create)

    async def open(self, topic: str, partition: int, generation: int | None = None) -> Position:
        """Like `Inbox.open`."""
        place = (topic, partition)
        async with self._connection() as connection, connection.transaction():
            cursor = _async_cursor(connection)
            await cursor.execute(self._sql.open, self._group.opening(place, generation))
            row = await cursor.fetchone()
            if row is None:
                await cursor.execute(self._sql.generation, self._group.row(place))
                newer = await cursor.fetchone()
                raise InboxFenced(topic, partition, ours=generation or 0, theirs=newer[0] if newer else 0)
        return self._group.opened(place, row)

    @asynccontextmanager
    async def record(self, message: Message) -> AsyncIterator[Effect[AsyncCursor]]:
        """Like `Inbox.record`."""
        async with self.batch([message]) as batch:
            yield Effect(batch)

    @asynccontextmanager
    async def batch(self, messages: Sequence[Message]) -> AsyncIterator[Batch[AsyncCursor]]:
        """Like `Inbox.batch`."""
        transaction = InboxTransaction(self._group, messages)
        written = committed = False
        try:
            if self._claim_checks is not None:
                await to_thread(transaction.resolve, self._claim_checks.resolve_or_mark)
            async with self._connection() as connection, self._locked(connection, transaction):
                yield Batch(connection.cursor(), transaction.judge())
                changes = transaction.write()
                if changes is not None:
                    await _async_cursor(connection).execute(self._sql.write, changes)
                written = True
            committed = written
        finally:
            transaction.end(committed=committed)

    async def forget(self, incarnation: UUID) -> int:
        """Like `Inbox.forget`."""
        async with self._connection() as connection, connection.transaction():
            cursor = _async_cursor(connection)
            await cursor.execute(self._sql.stored, {"group": self._group.name})
            changes = self._group.forgetting(await cursor.fetchall(), incarnation)
            for change in changes:
                await connection.execute(self._sql.replace_seen, change)
        return len(changes)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        source = self._source
        given = nullcontext(source) if isinstance(source, psycopg.AsyncConnection) else source.connection()
        with losses_judged(source) as lent:
            async with given as connection:
                lent.append(connection)
                refuse_busy(connection)
                yield connection

    @asynccontextmanager
    async def _locked(self, connection: AsyncConnection, transaction: InboxTransaction) -> AsyncIterator[None]:
        locked = False
        for _ in range(TRIES):
            async with connection.transaction():
                cursor = _async_cursor(connection)
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


def table_sql(table: str = "harvester_inbox") -> str:
    """The statement that creates the inbox's table, for use with other migration tools."""
    return InboxStatements(table).create.as_string(None) + ";\n"


def refuse_busy(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Reject a connection in a transaction, since the inbox's own transaction would not end with its block."""
    if connection.info.transaction_status in _BUSY:
        raise InboxError(
            "the connection is already in a transaction",
            hint="give the inbox a connection of its own (autocommit=True is simplest), or end that one first",
        )


class _Lost(InboxError, psycopg.OperationalError):
    """The inbox's only connection was lost."""


class _Unavailable(InboxUnavailable, psycopg.OperationalError):
    """The pool has no connection now, or the one it lent was lost."""


@contextmanager
def losses_judged(source: object) -> Iterator[list[psycopg.Connection[Any] | psycopg.AsyncConnection[Any]]]:
    """Raises `_Lost` or `_Unavailable` if the block fails since `source` lent no connection, or the one lent is lost.

    The block adds the connection to the list.
    """
    lent: list[psycopg.Connection[Any] | psycopg.AsyncConnection[Any]] = []
    try:
        yield lent
    except psycopg.Error as error:
        if lent and not lent[0].closed:
            raise
        reason = (error.diag.message_primary or str(error).strip() or type(error).__name__).splitlines()[0]
        if lent and lent[0] is source:
            hint = "give the inbox a pool: it opens another one"
            raise _Lost(f"the inbox's connection is lost: {reason}", hint=hint) from error
        raise _Unavailable(
            f"the inbox has no connection: {reason}", hint="try again; check that PostgreSQL runs"
        ) from error


def outpaced() -> InboxError:
    """The error for an owner that repeatedly finds the row changed."""
    return InboxError(
        f"others keep writing the same rows ({TRIES} tries)",
        hint="give each owner of a partition its own generation, or use READ COMMITTED",
    )


def _cursor(connection: Connection) -> psycopg.Cursor[tuple[Any, ...]]:
    # Of a known class: the application may have set its own factories.
    return psycopg.Cursor(connection, row_factory=tuple_row)


def _async_cursor(connection: AsyncConnection) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    return psycopg.AsyncCursor(connection, row_factory=tuple_row)
