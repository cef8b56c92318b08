"""The stashers for SQLAlchemy 2: sessions and connections, blocking and asyncio; with and without leases.

    with Session(engine) as session, session.begin():
        session.get_one(Account, 42).balance -= 5
        SqlalchemyStasher("outbox").stash(session, OutboxRecord("billing.paid", key="42", value="{…}"))

The row is written at once, in the transaction of that session or connection, and commits and rolls back with it; no ORM
event is involved. A session's pending changes are flushed first: a record's id must be taken after the locks on what it
announces (docs/outbox.md), and the flush takes those.

Works with psycopg, psycopg2 and asyncpg. The server's errors are raised as SQLAlchemy raises them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from harvester.errors import NoTransaction, OutboxError
from harvester.outbox.async_stasher import AsyncLeasedStasherBase, AsyncStasherBase
from harvester.outbox.lease_steps import AsyncFetch, Fetch, Rows, StasherCore
from harvester.outbox.leases import Lease
from harvester.outbox.sql.insert import Style
from harvester.outbox.stasher import LeasedStasherBase, StasherBase
from harvester.outbox.tables import OutboxTable

if TYPE_CHECKING:
    # Requires greenlet, which is not needed without asyncio.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

    AsyncTarget = AsyncSession | AsyncConnection

Target = Session | scoped_session[Session] | Connection

_STYLES = {"psycopg": Style.PSYCOPG, "psycopg2": Style.FORMAT, "asyncpg": Style.DOLLAR}
_READ_COMMITTED = "READ COMMITTED"  # whatever the engine's level is


class _SqlalchemyCore(StasherCore):
    """Driver information from a blocking or asyncio connection."""

    _driver_errors = DBAPIError

    def _cache(self, connection: Any) -> tuple[MutableMapping[Any, Any], Any]:
        return connection.info, ("harvester", self.table)  # has the lifetime of the driver's connection

    def _style(self, connection: Any) -> Style:
        dialect = connection.dialect
        style = _STYLES.get(dialect.driver) if dialect.name == "postgresql" else None
        if style is None:
            raise OutboxError(
                f"records cannot be written over {dialect.name}+{dialect.driver}",
                hint=f"use postgresql+{', postgresql+'.join(_STYLES)}",
            )
        return style

    def _encoding(self, connection: Any) -> str:
        """According to the driver; drivers without this information use UTF-8 unless forced."""
        pooled = getattr(connection, "sync_connection", connection).connection
        encoding = getattr(getattr(pooled.driver_connection, "info", None), "encoding", "utf-8")
        return encoding if isinstance(encoding, str) else "utf-8"


class SqlalchemyStasher(StasherBase[Target, Engine, Connection], _SqlalchemyCore):
    """Writes records into one outbox. Safe to share between threads; keep one for the program's lifetime.

    The table's columns are looked up once per connection of the pool, at its first use. `lease_time`: see
    `harvester.Stasher`.
    """

    def leased(self, lease: Lease) -> SqlalchemyLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return SqlalchemyLeasedStasher(lease, self)

    def _connection(self, target: Target) -> Connection:
        if isinstance(target, Connection):
            connection = target
        elif isinstance(target, Session | scoped_session):
            target.flush()
            connection = target.connection()
        else:
            raise TypeError(f"a Session or Connection is needed, not {type(target).__name__}")
        _require_transactions(connection, self.table)
        return connection

    def _fetching(self, connection: Connection, prepare: bool | None = None) -> Fetch:
        def fetch(statement: str, values: Any) -> Rows:
            result = connection.exec_driver_sql(statement, values)
            return result.all() if result.returns_rows else ()

        return fetch

    def _savepoint(self, connection: Connection) -> AbstractContextManager[object]:
        return connection.begin_nested()

    @contextmanager
    def _apart(self, source: Engine) -> Iterator[Connection]:
        with source.connect() as connection, connection.execution_options(isolation_level=_READ_COMMITTED).begin():
            yield connection


class AsyncSqlalchemyStasher(AsyncStasherBase["AsyncTarget", "AsyncEngine", "AsyncConnection"], _SqlalchemyCore):
    """Writes records over AsyncSession and AsyncConnection; see `SqlalchemyStasher`."""

    def leased(self, lease: Lease) -> AsyncSqlalchemyLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return AsyncSqlalchemyLeasedStasher(lease, self)

    async def _connection(self, target: AsyncTarget) -> AsyncConnection:
        from sqlalchemy.ext.asyncio import AsyncConnection

        if isinstance(target, AsyncConnection):
            connection = target
        else:
            await target.flush()
            connection = await target.connection()
        await connection.run_sync(_require_transactions, self.table)
        return connection

    def _fetching(self, connection: AsyncConnection, prepare: bool | None = None) -> AsyncFetch:
        async def fetch(statement: str, values: Any) -> Rows:
            result = await connection.exec_driver_sql(statement, values)
            return result.all() if result.returns_rows else ()

        return fetch

    def _savepoint(self, connection: AsyncConnection) -> AbstractAsyncContextManager[object]:
        return connection.begin_nested()

    @asynccontextmanager
    async def _apart(self, source: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        async with source.connect() as connection:
            await connection.execution_options(isolation_level=_READ_COMMITTED)
            async with connection.begin():
                yield connection


_ALIVE = text("SELECT")
"""Fails after an error that was caught: PostgreSQL answers the COMMIT with a rollback, and without an error."""


@contextmanager
def _watched(connection: Connection, begun: Any, outcome: SimpleNamespace) -> Iterator[None]:
    """Forbids to commit the connection's transaction within the block: it is rolled back instead, and `outcome.refused`
    set. If the block itself releases `begun`, a savepoint, its numbers stand.

    SQLAlchemy permits both, and does not tell afterwards how a transaction ended. Events precede their statements; a
    session that has joined a transaction of its connection's ends without one.
    """
    last: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_: last.append(name)

    def refuse(*_: Any) -> None:
        outcome.refused = True
        raise OutboxError(
            "the transaction of a leased stasher cannot be committed within its block",
            hint="leave the block: that commits it",
        )

    def commit(*_: Any) -> None:
        connection.dialect.do_rollback(connection.connection)  # SQLAlchemy takes the transaction for ended
        refuse()

    def commit_twophase(_: Connection, xid: Any, is_prepared: bool) -> None:
        connection.dialect.do_rollback_twophase(connection, xid, is_prepared)
        refuse()

    heard = {name: noted(name) for name in ("rollback", "rollback_savepoint", "release_savepoint")}
    heard |= {"commit": commit, "commit_twophase": commit_twophase, "prepare_twophase": refuse}
    for name, listener in heard.items():
        event.listen(connection, name, listener)
    stands = {"release_savepoint"}
    try:
        yield
        stands.add("")
    finally:
        for name, listener in heard.items():
            event.remove(connection, name, listener)
        ended = not begun.is_active and not hasattr(outcome, "refused")
        outcome.committed = ended and (last or [""])[-1] in stands


class SqlalchemyLeasedStasher(LeasedStasherBase[Target, Engine, Connection]):
    """Made by `SqlalchemyStasher.leased`; see `harvester.LeasedStasher`. For one thread at a time."""

    @contextmanager
    def transaction(self, target: Target) -> Iterator[None]:
        """A transaction, or a savepoint within one, that takes its numbers back unless it commits."""
        target = target() if isinstance(target, scoped_session) else target
        with self._taken_back() as outcome:
            try:
                with target.begin_nested() if target.in_transaction() else target.begin() as begun:
                    connection = target if isinstance(target, Connection) else target.connection()
                    with _watched(connection, begun, outcome):
                        yield
                    if committed := begun.is_active:
                        target.execute(_ALIVE)
                outcome.committed |= committed
            finally:
                if hasattr(outcome, "refused"):
                    target.rollback()


class AsyncSqlalchemyLeasedStasher(AsyncLeasedStasherBase["AsyncTarget", "AsyncEngine", "AsyncConnection"]):
    """Made by `AsyncSqlalchemyStasher.leased`; see `harvester.LeasedStasher`. One task at a time."""

    @asynccontextmanager
    async def transaction(self, target: AsyncTarget) -> AsyncIterator[None]:
        """A transaction, or a savepoint within one, that takes its numbers back unless it commits."""
        from sqlalchemy.ext.asyncio import AsyncConnection

        with self._taken_back() as outcome:
            try:
                async with target.begin_nested() if target.in_transaction() else target.begin() as begun:
                    connection = target if isinstance(target, AsyncConnection) else await target.connection()
                    assert connection.sync_connection is not None
                    with _watched(connection.sync_connection, begun, outcome):
                        yield
                    if committed := begun.is_active:
                        await target.execute(_ALIVE)
                outcome.committed |= committed
            finally:
                if hasattr(outcome, "refused"):
                    await target.rollback()


def _require_transactions(connection: Connection, table: OutboxTable) -> None:
    """Raises NoTransaction for a connection that commits each statement."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise NoTransaction(
            f"a record for {table} cannot be written on a connection that commits each statement",
            hint="use the connection that makes the change, without isolation_level AUTOCOMMIT",
        )
