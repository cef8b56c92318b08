"""The stasher over psycopg's asyncio connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from harvester.errors import RecordRejected, SchemaError
from harvester.outbox.async_stasher import AsyncStasher
from harvester.outbox.sql import insert
from harvester.record import OutboxRecord

pytestmark = pytest.mark.servers

RECORD = OutboxRecord("orders", "k1", "grün", (("a", 'b"\\'),), 2)
ROW = ("orders", "k1", "grün", ["a"], ['b"\\'], 2)
Connection = psycopg.AsyncConnection[Any]


def over(database: str, use: Callable[[Connection], Awaitable[None]], **options: Any) -> list[tuple[Any, ...]]:
    """Run `use` over a connection that commits at the end; returns what stands in the outbox then."""

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database, **options) as connection:
            await use(connection)

    asyncio.run(run())
    with psycopg.connect(database) as connection:
        return connection.execute(
            "SELECT kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_partition"
            " FROM outbox ORDER BY id"
        ).fetchall()


def test_one_many_and_prepared(database: str) -> None:
    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        ids = [await stasher.stash(connection, RECORD)]
        ids += await stasher.stash_many(connection.cursor(), [RECORD, RECORD])
        prepared = await stasher.prepare(connection)
        ids += [await prepared.stash(RECORD) for _ in range(2)]
        assert ids == sorted(set(ids))
        assert await stasher.stash_many(connection, []) == []

    assert over(database, use) == [ROW] * 5


def test_rolled_back_with_its_transaction(database: str) -> None:
    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        await stasher.stash(connection, RECORD)
        await connection.rollback()
        async with connection.transaction(force_rollback=True):
            await stasher.stash_many(connection, [RECORD] * 3)
        await stasher.stash(connection, RECORD)

    assert over(database, use) == [ROW]


def test_a_refusal_leaves_the_transaction_intact(database: str) -> None:
    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        await stasher.stash(connection, RECORD)
        with pytest.raises(RecordRejected, match="topic"):
            await stasher.stash(connection, OutboxRecord("", "k"))
        with pytest.raises(RecordRejected, match="record 0 of the batch"):
            await stasher.stash_many(connection, [OutboxRecord("", "k")])
        with pytest.raises(SchemaError, match="no outbox table"):
            await AsyncStasher("elsewhere").stash(connection, RECORD)

    assert over(database, use) == [ROW]


def test_inside_a_pipeline(database: str) -> None:
    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        async with connection.pipeline():
            await stasher.stash(connection, RECORD)
            await stasher.stash_many(connection, [RECORD, RECORD])

    assert over(database, use) == [ROW] * 3


def test_a_batch_is_whole_on_autocommit(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 1)

    async def use(connection: Connection) -> None:
        await connection.execute("ALTER TABLE outbox ADD CHECK (kafka_key <> 'bad')")
        with pytest.raises(psycopg.errors.CheckViolation):
            await AsyncStasher().stash_many(connection, [RECORD, OutboxRecord("t", "bad")])

    assert over(database, use, autocommit=True) == []


def test_the_wrong_kind_of_connection_is_named(database: str) -> None:
    async def use(connection: Connection) -> None:
        with (
            psycopg.connect(database) as blocking,
            pytest.raises(TypeError, match="AsyncConnection or AsyncCursor is needed, not Connection"),
        ):
            await AsyncStasher().stash(blocking, RECORD)  # type: ignore[arg-type]

    assert over(database, use) == []
