"""Leased stashers over every driver that has one besides psycopg, behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import asyncpg
import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from harvester import Lease, Stashed
from harvester.record import OutboxRecord
from harvester.writers.asyncpg import AsyncpgStasher
from harvester.writers.sqlalchemy import AsyncSqlalchemyStasher, SqlalchemyStasher
from tests.support import django_desk
from tests.support.desks import asyncpg_options, engine_of

Step = tuple[OutboxRecord | Sequence[OutboxRecord], str | None]
"""What to stash, one record or a batch, with its position."""
_FAILS = "SELECT 1 / 0"


class LeasedDesk(Protocol):
    """`run` does all of its steps in one `transaction` of the writer, and fails it where it is told to.

    `spoils`: a statement fails after them, and nobody cares. `ends`: SQLAlchemy's `commit` or `rollback` is called.
    """

    def lease(self, name: str) -> Lease: ...

    def writer(self, lease: Lease) -> Any: ...

    def run(
        self, writer: Any, *steps: Step, error: Exception | None = None, spoils: bool = False, ends: str = ""
    ) -> list[Stashed]: ...


class _Blocking:
    def __init__(self, engine: sqlalchemy.Engine, open_target: Callable[[sqlalchemy.Engine], Any], table: str) -> None:
        self.engine, self.open_target, self.stasher = engine, open_target, SqlalchemyStasher(table)
        self.writer = self.stasher.leased

    def lease(self, name: str) -> Lease:
        return self.stasher.lease(self.engine, name)

    def run(
        self, writer: Any, *steps: Step, error: Exception | None = None, spoils: bool = False, ends: str = ""
    ) -> list[Stashed]:
        found: list[Stashed] = []
        with self.open_target(self.engine) as target, writer.transaction(target):
            for what, position in steps:
                if isinstance(what, OutboxRecord):
                    found.append(writer.stash(target, what, position=position))
                else:
                    found += writer.stash_many(target, what, position=position)
            if spoils:
                with suppress(sqlalchemy.exc.DBAPIError):
                    target.execute(sqlalchemy.text(_FAILS))
            if ends:
                getattr(target, ends)()
            if error is not None:
                raise error
        return found


class _Async:
    def __init__(self, runner: asyncio.Runner, source: Any, target: Any, stasher: Any) -> None:
        self.runner, self.source, self.target, self.stasher = runner, source, target, stasher
        self.writer = stasher.leased

    def lease(self, name: str) -> Lease:
        lease: Lease = self.runner.run(self.stasher.lease(self.source, name))
        return lease

    def run(
        self, writer: Any, *steps: Step, error: Exception | None = None, spoils: bool = False, ends: str = ""
    ) -> list[Stashed]:
        async def perform() -> list[Stashed]:
            found: list[Stashed] = []
            async with writer.transaction(self.target):
                for what, position in steps:
                    if isinstance(what, OutboxRecord):
                        found.append(await writer.stash(self.target, what, position=position))
                    else:
                        found += await writer.stash_many(self.target, what, position=position)
                if spoils:
                    with suppress(sqlalchemy.exc.DBAPIError, asyncpg.DataError):
                        is_plain = isinstance(self.target, asyncpg.Connection)
                        await self.target.execute(_FAILS if is_plain else sqlalchemy.text(_FAILS))
                if ends:
                    await getattr(self.target, ends)()
                if error is not None:
                    raise error
            return found

        return self.runner.run(perform())


class _Django:
    def __init__(self, alias: str, table: str) -> None:
        from harvester.writers.django import DjangoStasher

        self.stasher = DjangoStasher(table, alias)
        self.lease, self.writer = self.stasher.lease, self.stasher.leased

    def run(
        self, writer: Any, *steps: Step, error: Exception | None = None, spoils: bool = False, ends: str = ""
    ) -> list[Stashed]:
        found: list[Stashed] = []
        with writer.transaction():
            for what, position in steps:
                if isinstance(what, OutboxRecord):
                    found.append(writer.stash(what, position=position))
                else:
                    found += writer.stash_many(what, position=position)
            if spoils:
                from django.db import DataError, connections

                with suppress(DataError), connections[self.stasher.using].cursor() as cursor:
                    cursor.execute(_FAILS)
            if error is not None:
                raise error
        return found


@contextmanager
def _blocking(
    dsn: str, table: str, driver: str, open_target: Callable[[sqlalchemy.Engine], Any]
) -> Iterator[LeasedDesk]:
    engine = engine_of(dsn, driver)
    yield _Blocking(engine, open_target, table)
    engine.dispose()


@contextmanager
def _asyncio(dsn: str, table: str, driver: str, *, session: bool) -> Iterator[LeasedDesk]:
    def connect() -> Awaitable[Any]:
        return psycopg.AsyncConnection.connect(dsn) if driver == "psycopg" else asyncpg.connect(**asyncpg_options(dsn))

    engine = create_async_engine(f"postgresql+{driver}://", async_creator=connect)
    with asyncio.Runner() as runner:
        target: Any = AsyncSession(engine) if session else runner.run(_started(engine))
        yield _Async(runner, engine, target, AsyncSqlalchemyStasher(table))
        runner.run(target.close())
        runner.run(engine.dispose())


async def _started(engine: Any) -> Any:
    return await engine.connect()


@contextmanager
def _asyncpg(dsn: str, table: str) -> Iterator[LeasedDesk]:
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(**asyncpg_options(dsn)))
        yield _Async(runner, connection, connection, AsyncpgStasher(table))
        runner.run(connection.close())


@contextmanager
def _django(dsn: str, table: str) -> Iterator[LeasedDesk]:
    with django_desk.database(dsn) as alias:
        yield _Django(alias, table)


LEASED_DESKS: Mapping[str, Callable[[str, str], AbstractContextManager[LeasedDesk]]] = {
    "sqlalchemy core psycopg": lambda dsn, table: _blocking(dsn, table, "psycopg", lambda engine: engine.connect()),
    "sqlalchemy core psycopg2": lambda dsn, table: _blocking(dsn, table, "psycopg2", lambda engine: engine.connect()),
    "sqlalchemy session psycopg": lambda dsn, table: _blocking(dsn, table, "psycopg", Session),
    "sqlalchemy asyncio session psycopg": lambda dsn, table: _asyncio(dsn, table, "psycopg", session=True),
    "sqlalchemy asyncio core asyncpg": lambda dsn, table: _asyncio(dsn, table, "asyncpg", session=False),
    "asyncpg": _asyncpg,
    "django": _django,
}
