"""One transaction after another over every driver that has a stasher, behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import asyncpg
import psycopg
import psycopg2
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from harvester.record import OutboxRecord
from harvester.writers.asyncpg import AsyncpgStasher
from harvester.writers.sqlalchemy import AsyncSqlalchemyStasher, SqlalchemyStasher
from tests.support import django_desk


class Desk(Protocol):
    """A transaction is open all the time; the next begins with the end of the one before."""

    def execute(self, statement: str) -> None: ...

    def stash(self, record: OutboxRecord) -> int: ...

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class _Blocking:
    def __init__(self, target: Session | sqlalchemy.Connection, table: str) -> None:
        self.target, self.stasher = target, SqlalchemyStasher(table)
        self.commit, self.rollback = target.commit, target.rollback

    def execute(self, statement: str) -> None:
        self.target.execute(sqlalchemy.text(statement))

    def stash(self, record: OutboxRecord) -> int:
        return self.stasher.stash(self.target, record)

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]:
        return self.stasher.stash_many(self.target, records)


class _Asyncio:
    def __init__(self, runner: asyncio.Runner, target: AsyncSession | AsyncConnection, table: str) -> None:
        self.runner, self.target, self.stasher = runner, target, AsyncSqlalchemyStasher(table)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self.runner.run(wait())

    def execute(self, statement: str) -> None:
        self.run(self.target.execute(sqlalchemy.text(statement)))

    def stash(self, record: OutboxRecord) -> int:
        return int(self.run(self.stasher.stash(self.target, record)))

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]:
        ids: list[int] = self.run(self.stasher.stash_many(self.target, records))
        return ids

    def commit(self) -> None:
        self.run(self.target.commit())

    def rollback(self) -> None:
        self.run(self.target.rollback())


class _Asyncpg:
    def __init__(self, runner: asyncio.Runner, connection: Any, table: str) -> None:
        self.runner, self.connection, self.stasher = runner, connection, AsyncpgStasher(table)
        self.begin()

    def begin(self) -> None:
        self.transaction = self.connection.transaction()
        self.runner.run(self.transaction.start())

    def execute(self, statement: str) -> None:
        self.runner.run(self.connection.execute(statement))

    def stash(self, record: OutboxRecord) -> int:
        return self.runner.run(self.stasher.stash(self.connection, record))

    def stash_many(self, records: Iterable[OutboxRecord]) -> list[int]:
        return self.runner.run(self.stasher.stash_many(self.connection, records))

    def commit(self) -> None:
        self.runner.run(self.transaction.commit())
        self.begin()

    def rollback(self) -> None:
        self.runner.run(self.transaction.rollback())
        self.begin()


def asyncpg_options(dsn: str) -> dict[str, Any]:
    """A DSN of libpq as asyncpg takes it."""
    options = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    return {theirs: options[ours] for ours, theirs in names.items() if ours in options}


def engine_of(dsn: str, driver: str) -> sqlalchemy.Engine:
    """Over the driver named."""
    connect: Callable[[str], Any] = psycopg.connect if driver == "psycopg" else psycopg2.connect
    return sqlalchemy.create_engine(f"postgresql+{driver}://", creator=lambda: connect(dsn))


@contextmanager
def _core(dsn: str, table: str, driver: str) -> Iterator[Desk]:
    engine = engine_of(dsn, driver)
    with engine.connect() as connection:
        yield _Blocking(connection, table)
    engine.dispose()


@contextmanager
def _session(dsn: str, table: str, driver: str) -> Iterator[Desk]:
    engine = engine_of(dsn, driver)
    with Session(engine) as session:
        yield _Blocking(session, table)
    engine.dispose()


@contextmanager
def _asyncio_session(dsn: str, table: str, driver: str) -> Iterator[Desk]:
    async def connect() -> Any:
        if driver == "psycopg":
            return await psycopg.AsyncConnection.connect(dsn)
        return await asyncpg.connect(**asyncpg_options(dsn))

    engine = create_async_engine(f"postgresql+{driver}://", async_creator=connect)
    with asyncio.Runner() as runner:
        session = AsyncSession(engine)
        yield _Asyncio(runner, session, table)
        runner.run(session.close())
        runner.run(engine.dispose())


@contextmanager
def _asyncio_core(dsn: str, table: str) -> Iterator[Desk]:
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(**asyncpg_options(dsn)))
    with asyncio.Runner() as runner:
        connection = runner.run(engine.connect().start())
        yield _Asyncio(runner, connection, table)
        runner.run(connection.close())
        runner.run(engine.dispose())


@contextmanager
def _asyncpg(dsn: str, table: str) -> Iterator[Desk]:
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(**asyncpg_options(dsn)))
        yield _Asyncpg(runner, connection, table)
        runner.run(connection.close())


DESKS: Mapping[str, Callable[[str, str], AbstractContextManager[Desk]]] = {
    "asyncpg": _asyncpg,
    "django": django_desk.opened,
    "sqlalchemy core psycopg": lambda dsn, table: _core(dsn, table, "psycopg"),
    "sqlalchemy core psycopg2": lambda dsn, table: _core(dsn, table, "psycopg2"),
    "sqlalchemy core asyncio asyncpg": _asyncio_core,
    "sqlalchemy session psycopg": lambda dsn, table: _session(dsn, table, "psycopg"),
    "sqlalchemy session asyncio psycopg": lambda dsn, table: _asyncio_session(dsn, table, "psycopg"),
    "sqlalchemy session asyncio asyncpg": lambda dsn, table: _asyncio_session(dsn, table, "asyncpg"),
}
