"""The inbox for asyncio: the same rules on the same table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from harvester.errors import InboxError, InboxFenced
from harvester.idempotence import AsyncInbox
from tests.support.inbox import ONE, Forged, stamped

pytestmark = pytest.mark.servers


class App:
    def __init__(self, db: psycopg.AsyncConnection[Any]) -> None:
        self.db = db
        self.inbox = AsyncInbox(db, "group")

    async def take(self, *messages: Forged) -> list[int]:
        done = []
        for message in messages:
            async with self.inbox.record(message) as effect:
                if effect.is_new:
                    await effect.cursor.execute("INSERT INTO effect (what) VALUES (%s)", (str(message.at),))
                    done.append(message.at)
        return done

    async def effects(self) -> list[str]:
        return [row[0] for row in await (await self.db.execute("SELECT what FROM effect ORDER BY at")).fetchall()]


def run(dsn: str, test: Callable[[App, App], Awaitable[None]]) -> None:
    """With two owners of one group."""

    async def main() -> None:
        async with (
            await psycopg.AsyncConnection.connect(dsn, autocommit=True) as one,
            await psycopg.AsyncConnection.connect(dsn, autocommit=True) as two,
        ):
            await one.execute("CREATE TABLE effect (at serial, what text)")
            await AsyncInbox(one, "group").create_table()
            await test(App(one), App(two))

    asyncio.run(main())


def test_effects_happen_once(empty_database: str) -> None:
    async def test(one: App, two: App) -> None:
        assert (await one.inbox.open("orders", 0)).offset is None
        messages = [Forged(at, stamped(record_id)) for at, record_id in enumerate([3, 1, 3, 2])]
        assert await one.take(*messages, *messages) == [0, 1, 3]
        assert (await two.inbox.open("orders", 0)).offset == 4
        with pytest.raises(InboxFenced):
            await one.take(Forged(4))
        one.inbox.close("orders", 0)
        assert await two.take(Forged(4, stamped(1)), Forged(5)) == [5]
        assert list(two.inbox.seen("orders", 0).intervals(ONE)) == [(1, 3)]
        assert await one.effects() == ["0", "1", "3", "5"]
        assert await two.inbox.forget(ONE) == 1

    run(empty_database, test)


def test_a_failure_leaves_nothing_and_is_not_passed_over(empty_database: str) -> None:
    async def fail(app: App, error: Exception) -> None:
        async with app.inbox.record(Forged(0, stamped(1))) as effect:
            await effect.cursor.execute("INSERT INTO effect (what) VALUES ('half')")
            raise error

    async def test(one: App, two: App) -> None:
        await one.inbox.open("orders", 0)
        with pytest.raises(ValueError, match="oops"):
            await fail(one, ValueError("oops"))
        await fail(one, psycopg.Rollback())
        with pytest.raises(InboxError, match="was not committed"):
            await one.take(Forged(1, stamped(2)))
        assert await one.take(Forged(0, stamped(1)), Forged(1, stamped(2))) == [0, 1]

    run(empty_database, test)


def test_nobody_goes_on_behind_a_batch_that_was_refused(empty_database: str) -> None:
    async def test(one: App, two: App) -> None:
        await one.inbox.open("orders", 0)
        with pytest.raises(InboxError, match="reported an error"):
            async with one.inbox.batch([Forged(0), Forged(1, trouble="_PARTITION_EOF")]):
                """It is not entered."""
        with pytest.raises(InboxError, match="@0 was not committed, but now 1 was given"):
            await one.take(Forged(1))
        assert await one.take(Forged(0), Forged(1)) == [0, 1]

    run(empty_database, test)


def test_given_generations_and_old_copies(empty_database: str) -> None:
    async def test(one: App, two: App) -> None:
        for app in (one, two):
            await app.inbox.open("orders", 0, generation=5)
        messages = [Forged(at, stamped(at + 1)) for at in range(40)]
        ones, twos = await asyncio.gather(one.take(*messages), two.take(*messages))
        assert sorted(ones + twos) == list(range(40))
        assert await one.effects() == [str(at) for at in range(40)]
        with pytest.raises(InboxFenced):
            await two.inbox.open("orders", 0, generation=4)

    run(empty_database, test)


def test_a_pool_lends_connections(empty_database: str) -> None:
    class Pool:
        """The part of psycopg_pool's interface that is needed."""

        @asynccontextmanager
        async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
            async with await psycopg.AsyncConnection.connect(empty_database) as connection:
                yield connection

    async def main() -> None:
        inbox = AsyncInbox(Pool(), "group")
        await inbox.create_table()
        await inbox.open("orders", 0)
        async with inbox.batch([Forged(0, stamped(1)), Forged(1, stamped(1))]) as batch:
            assert [message.offset() for message in batch.new] == [0]
        assert (await inbox.open("orders", 0)).offset == 2

    asyncio.run(main())
