"""What is particular to asyncpg: pools, and a transaction that was forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import psycopg
import pytest

from harvester.errors import NoTransaction
from harvester.outbox.sql.insert import Insertion
from harvester.record import OutboxRecord
from harvester.writers.asyncpg import AsyncpgStasher
from tests.support.desks import asyncpg_options

pytestmark = pytest.mark.servers

RECORD = OutboxRecord("t", "k", "v")


def waiting(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


def test_a_transaction_that_was_forgotten(database: str) -> None:
    async def use() -> None:
        connection = await asyncpg.connect(**asyncpg_options(database))
        stasher = AsyncpgStasher()
        for _ in range(2):
            with pytest.raises(NoTransaction):
                await stasher.stash(connection, RECORD)
            with pytest.raises(NoTransaction):
                await stasher.stash_many(connection, [RECORD])
            async with connection.transaction():
                await stasher.stash(connection, RECORD)
        await connection.execute("BEGIN")
        await stasher.stash(connection, RECORD)
        await connection.execute("COMMIT")
        await connection.close()

    asyncio.run(use())
    assert waiting(database) == 3


def test_pools_share_what_is_known_of_their_connections(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    build = Insertion.build

    def counted(*given: Any) -> Insertion:
        built.append(given)
        return build(*given)

    monkeypatch.setattr(Insertion, "build", counted)

    async def use() -> None:
        stasher = AsyncpgStasher()
        async with asyncpg.create_pool(**asyncpg_options(database), min_size=1, max_size=1) as pool:
            for _ in range(3):
                async with pool.acquire() as connection, connection.transaction():
                    await stasher.stash(connection, RECORD)
            await pool.expire_connections()
            async with pool.acquire() as connection, connection.transaction():
                await stasher.stash_many(connection, [RECORD, RECORD])

    asyncio.run(use())
    assert waiting(database) == 5
    assert len(built) == 2
