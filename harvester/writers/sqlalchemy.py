"""The stashers for SQLAlchemy 2: sessions and connections, blocking and asyncio; with leases and without.

    with Session(engine) as session, session.begin():
        session.get_one(Account, 42).balance -= 5
        SqlalchemyStasher("outbox").stash(session, OutboxRecord("billing.paid", key="42", value="{…}"))

The row is written at once, in the transaction of that session or connection, and commits and rolls back with it; no
event of the ORM is involved. What a session has pending is flushed before: a record's id is to be taken after the
locks on what it announces (docs/outbox.md), and those come with the flush.

Works over psycopg, psycopg2 and asyncpg. What the server refuses is raised as SQLAlchemy raises it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, CursorResult, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from harvester.errors import NoTransaction, OutboxError
from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.lease_steps import Numbered, Rows, no_table, perform, take
from harvester.outbox.leases import DEFAULT_LEASE_TIME, Lease, Stashed
from harvester.outbox.shape import column_shape
from harvester.outbox.sql.insert import Insertion, Style, rewritten
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

if TYPE_CHECKING:
    # Needs greenlet, which those who use no asyncio need not have.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

    AsyncTarget = AsyncSession | AsyncConnection

Target = Session | scoped_session[Session] | Connection

_STYLES = {"psycopg": Style.PSYCOPG, "psycopg2": Style.FORMAT, "asyncpg": Style.DOLLAR}


class SqlalchemyStasher:
    """Writes records into one outbox. Safe to share between threads; keep one for the life of the program.

    The table's columns are looked up once per connection of the pool, with its first use. `lease_time` as for
    `harvester.Stasher`.
    """

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time

    def stash(self, target: Target, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises NoTransaction, RecordRejected, SchemaError or SQLAlchemy's."""
        connection = self._connection(target)
        insertion = self._insertion(connection)
        return insertion.one_id(_execute(connection, insertion.one_sql, insertion.parameters(record)).one_or_none())

    def stash_many(self, target: Target, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order. All are checked first."""
        connection = self._connection(target)
        insertion = self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        with connection.begin_nested() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                ids += insertion.many_ids(_execute(connection, insertion.many_sql, parameters).all(), parameters)
        return ids

    def lease(self, engine: Engine, name: str) -> Lease:
        """A lease of one name; see `lease_many`."""
        return self.lease_many(engine, [name])[0]

    def lease_many(self, engine: Engine, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names, over a connection of their own; see `harvester.Stasher.lease_many`."""
        with engine.connect() as connection:
            return self._take(connection, names)

    def leased(self, lease: Lease) -> SqlalchemyLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return SqlalchemyLeasedStasher(lease, self)

    def _take(self, connection: Connection, names: Iterable[str]) -> list[Lease]:
        connection = connection.execution_options(isolation_level="READ COMMITTED")  # whatever the engine's is
        try:
            with connection.begin():
                return perform(take(self.table, names, self.lease_time, _style(connection)), _fetching(connection))
        except DBAPIError as error:
            if error.orig is not None and (missing := no_table(self.table, error.orig)) is not None:
                raise missing from error
            raise

    def _connection(self, target: Target) -> Connection:
        if isinstance(target, Connection):
            connection = target
        elif isinstance(target, Session | scoped_session):
            target.flush()
            connection = target.connection()
        else:
            raise TypeError(f"a Session or Connection is needed, not {type(target).__name__}")
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            raise NoTransaction(
                f"a record for {self.table} was to be written over a connection that commits each statement",
                hint="use one without isolation_level AUTOCOMMIT, the one that makes the change",
            )
        return connection

    def _insertion(self, connection: Connection) -> Insertion:
        place = ("harvester", self.table)
        known = connection.info.get(place)  # lives as long as the driver's connection
        if isinstance(known, Insertion):
            return known
        style = _style(connection)
        parameters = catalog_parameters(self.table)
        query = rewritten(CATALOG_SQL, style, parameters)
        # asyncpg numbers its parameters, the others name them here.
        given = tuple(parameters.values()) if style is Style.DOLLAR else parameters
        row = connection.exec_driver_sql(query, given).one()
        shape = column_shape(self.table, parse_catalog(tuple(row)))
        insertion = Insertion.build(self.table, shape, _encoding(connection), style)
        connection.info[place] = insertion
        return insertion


class AsyncSqlalchemyStasher:
    """Writes records over AsyncSession and AsyncConnection; see `SqlalchemyStasher`."""

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self._stasher = SqlalchemyStasher(table, lease_time=lease_time)
        self.table = self._stasher.table

    async def stash(self, target: AsyncTarget, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises as `SqlalchemyStasher.stash`."""
        return await target.run_sync(self._stasher.stash, record)

    async def stash_many(self, target: AsyncTarget, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order, all or none; returns their ids, which grow in that order."""
        return await target.run_sync(self._stasher.stash_many, records)

    async def lease(self, engine: AsyncEngine, name: str) -> Lease:
        """A lease of one name; see `harvester.Stasher.lease_many`."""
        return (await self.lease_many(engine, [name]))[0]

    async def lease_many(self, engine: AsyncEngine, names: Iterable[str]) -> list[Lease]:
        """Leases in the order of the names, over a connection of their own; see `harvester.Stasher.lease_many`."""
        async with engine.connect() as connection:
            return await connection.run_sync(self._stasher._take, names)

    def leased(self, lease: Lease) -> AsyncSqlalchemyLeasedStasher:
        """A stasher that numbers its records under this lease; see `harvester.Stasher.leased`."""
        return AsyncSqlalchemyLeasedStasher(lease, self._stasher)


class SqlalchemyLeasedStasher(Numbered):
    """Made by `SqlalchemyStasher.leased`; see `harvester.LeasedStasher`. For one thread at a time."""

    def __init__(self, lease: Lease, stasher: SqlalchemyStasher) -> None:
        super().__init__(lease)
        self._stasher = stasher

    def stash(self, target: Target, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; `position` is saved with it, None leaves the one before."""
        connection = self._stasher._connection(target)
        steps = self._one(self._stasher._insertion(connection), record, position)
        return perform(steps, _fetching(connection))[0]

    def stash_many(
        self, target: Target, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there; `position` is that of the last one."""
        connection = self._stasher._connection(target)
        batches = self._many(self._stasher._insertion(connection), records, position)
        with connection.begin_nested() if len(batches) > 1 else nullcontext():
            return [stashed for steps in batches for stashed in perform(steps, _fetching(connection))]

    @contextmanager
    def transaction(self, target: Target) -> Iterator[None]:
        """A transaction, or a savepoint within one, that takes the numbers back if it does not commit."""
        before, committed = self.sequence, False
        target = target() if isinstance(target, scoped_session) else target
        try:
            with target.begin_nested() if target.in_transaction() else target.begin() as begun:
                yield
                committed = begun.is_active  # not where it was rolled back by hand
        except BaseException:
            committed = False
            raise
        finally:
            if not committed:
                self.seek(before)


class AsyncSqlalchemyLeasedStasher(Numbered):
    """Made by `AsyncSqlalchemyStasher.leased`; see `harvester.LeasedStasher`. One task at a time."""

    def __init__(self, lease: Lease, stasher: SqlalchemyStasher) -> None:
        super().__init__(lease)
        self._leased = SqlalchemyLeasedStasher(lease, stasher)
        self._course = self._leased._course

    async def stash(self, target: AsyncTarget, record: OutboxRecord, *, position: str | None = None) -> Stashed:
        """Write one record, if its number is the next one; see `SqlalchemyLeasedStasher.stash`."""
        return await target.run_sync(partial(self._leased.stash, position=position), record)

    async def stash_many(
        self, target: AsyncTarget, records: Iterable[OutboxRecord], *, position: str | None = None
    ) -> list[Stashed]:
        """Write records in order, all or none, leaving out those that are there."""
        return await target.run_sync(partial(self._leased.stash_many, position=position), records)

    @asynccontextmanager
    async def transaction(self, target: AsyncTarget) -> AsyncIterator[None]:
        """A transaction, or a savepoint within one, that takes the numbers back if it does not commit."""
        before, committed = self.sequence, False
        try:
            async with target.begin_nested() if target.in_transaction() else target.begin() as begun:
                yield
                committed = begun.is_active  # not where it was rolled back by hand
        except BaseException:
            committed = False
            raise
        finally:
            if not committed:
                self.seek(before)


def _execute(connection: Connection, statement: str, parameters: Sequence[Any]) -> CursorResult[Any]:
    return connection.exec_driver_sql(statement, tuple(parameters))  # a list would be many sets of parameters


def _fetching(connection: Connection) -> Callable[[str, Any], Rows]:
    def fetch(statement: str, values: Any) -> Rows:
        result = connection.exec_driver_sql(statement, values)
        return result.all() if result.returns_rows else ()

    return fetch


def _style(connection: Connection) -> Style:
    dialect = connection.dialect
    style = _STYLES.get(dialect.driver) if dialect.name == "postgresql" else None
    if style is None:
        raise OutboxError(
            f"records cannot be written over {dialect.name}+{dialect.driver}",
            hint=f"use postgresql+{', postgresql+'.join(_STYLES)}",
        )
    return style


def _encoding(connection: Connection) -> str:
    """The Python codec of the session, where the driver tells; the others speak UTF-8 unless forced."""
    info = getattr(connection.connection.driver_connection, "info", None)
    encoding = getattr(info, "encoding", "utf-8")
    return encoding if isinstance(encoding, str) else "utf-8"
