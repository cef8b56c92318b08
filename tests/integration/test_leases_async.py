"""Leases over asyncio connections, and records that are under way together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

from harvester import AsyncStasher, LeaseError, LeaseExpired, LeaseFenced, SequenceGap, Stashed
from harvester.errors import SchemaError
from harvester.outbox.sql import insert
from tests.support.leasing import end, lease_row, record, values

pytestmark = pytest.mark.servers

Connection = psycopg.AsyncConnection[Any]


def over(database: str, use: Callable[[Connection], Awaitable[None]]) -> list[str]:
    """Run `use` over a connection that commits at the end; returns what stands in the outbox then."""

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            await use(connection)

    asyncio.run(run())
    return values(database)


def test_the_same_as_over_blocking_connections(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)

    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        first, other = await stasher.lease_many(connection, ["reader", "other"])
        assert (first.name, other.name, first.generation) == ("reader", "other", 1)
        writer = stasher.leased(first)
        async with writer.transaction(connection):
            assert (await writer.stash(connection, record(1), position="1")).sequence == 1
            assert (await writer.stash(connection, record(2))).sequence == 2
            found = await writer.stash_many(connection.cursor(), [record(n) for n in range(3, 8)], position="7")
            assert [each.sequence for each in found] == list(range(3, 8))
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with writer.transaction(connection):
                await writer.stash(connection, record("lost"))
                raise ZeroDivisionError
        assert writer.sequence == 7
        writer.seek(5)
        async with writer.transaction(connection):
            found = await writer.stash_many(connection, [record(n) for n in (6, 7, 8)], position="8")
            assert [each.repeated for each in found] == [True, True, False]
        assert writer.lease.sequence == writer.sequence == 8
        second = await stasher.lease(connection, "reader")
        assert (second.id, second.generation, second.sequence, second.position) == (first.id, 2, 8, "8")
        with pytest.raises(LeaseFenced):
            await writer.stash(connection, record("late"))
        with pytest.raises(LeaseError, match="in its own transaction"):
            await stasher.lease(connection, "reader")
        await connection.rollback()
        end(database, "reader")
        with pytest.raises(LeaseExpired):
            await stasher.leased(second).stash(connection, record("late"))

    assert over(database, use) == [str(n) for n in range(1, 9)]


@pytest.mark.parametrize("pipelined", [True, False])
def test_records_that_are_under_way_together(database: str, pipelined: bool) -> None:
    """In order they all come through; behind a gap none of them does, and the transaction can go on."""

    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        writer = stasher.leased(await stasher.lease(connection, "reader"))

        async def together(texts: list[str]) -> list[Stashed | BaseException]:
            coming = [writer.stash(connection, record(text), position=text) for text in texts]
            if not pipelined:
                return await asyncio.gather(*coming, return_exceptions=True)
            async with connection.pipeline():
                return await asyncio.gather(*coming, return_exceptions=True)

        found = await together(["1", "2", "3"])
        assert [each.sequence for each in found if isinstance(each, Stashed)] == [1, 2, 3]
        await connection.commit()
        await writer.stash(connection, record("lost"))
        await connection.rollback()
        refused = await together(["hasty"] * 5)
        assert [type(each) for each in refused] == [SequenceGap] * 5
        assert [each.sequence for each in refused if isinstance(each, SequenceGap)] == [5, 6, 7, 8, 9]
        assert {each.expected for each in refused if isinstance(each, SequenceGap)} == {4}
        writer.seek(3)
        assert [type(each) for each in await together(["4", "5"])] == [Stashed] * 2
        # The row is not where it was seen last: the second look must come before those behind it.
        await connection.commit()
        move_the_row(database)
        assert [type(each) for each in await together(["6", "7", "8"])] == [Stashed] * 3

    assert over(database, use) == [str(n) for n in range(1, 9)]
    row = lease_row(database, "reader")
    assert row is not None
    assert (row["sequence"], row["upstream_position"]) == (8, "8")


@pytest.mark.parametrize("pipelined", [True, False])
def test_nothing_is_asked_twice(database: str, pipelined: bool) -> None:
    """Each record is one statement: in turn where the row was seen last, in a pipeline by the lease's id."""

    async def use(connection: Connection) -> None:
        stasher = AsyncStasher()
        writer = stasher.leased(await stasher.lease(connection, "reader"))
        await writer.stash(connection, record(1))
        async with connection.pipeline() if pipelined else nullcontext():
            await asyncio.gather(*(writer.stash(connection, record(n)) for n in range(2, 12)))
        cursor = await connection.execute(
            "SELECT generic_plans + custom_plans FROM pg_prepared_statements WHERE statement LIKE '%outbox_lease%'"
            " ORDER BY statement LIKE '%previous%'"
        )
        assert await cursor.fetchall() == ([(11,)] if pipelined else [(10,), (1,)])

    assert over(database, use) == [str(n) for n in range(1, 12)]


def move_the_row(dsn: str) -> None:
    """Another version of the same lease."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE outbox_lease SET leased_at = leased_at")


def test_without_the_table_init_is_named(database: str) -> None:
    async def use(connection: Connection) -> None:
        await connection.execute("DROP TABLE outbox_lease")
        await connection.commit()
        with pytest.raises(SchemaError, match='no table "outbox_lease"'):
            await AsyncStasher().lease(connection, "reader")

    assert over(database, use) == []
