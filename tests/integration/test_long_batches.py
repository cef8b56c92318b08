"""A batch of several statements is part of the caller's transaction, also where it is the first thing in it."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from harvester import AsyncStasher, OutboxRecord, Stasher
from harvester.errors import OutboxError
from harvester.outbox.sql import insert

pytestmark = pytest.mark.servers

RECORDS = [OutboxRecord("t", "k", str(n)) for n in range(5)]


@pytest.fixture(autouse=True)
def _short_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)


def count(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("autocommit", [False, True])
def test_blocking(database: str, leased: bool, autocommit: bool) -> None:
    stasher = Stasher()
    with psycopg.connect(database, autocommit=autocommit) as connection:
        writer = stasher.leased(stasher.lease(connection, "w")) if leased else stasher
        writer.stash(connection, RECORDS[0])
        connection.commit()
        writer.stash_many(connection, RECORDS)
        connection.rollback()
        assert count(database) == (6 if autocommit else 1)


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("autocommit", [False, True])
def test_asyncio(database: str, leased: bool, autocommit: bool) -> None:
    async def use() -> None:
        stasher = AsyncStasher()
        async with await psycopg.AsyncConnection.connect(database, autocommit=autocommit) as connection:
            writer = stasher.leased(await stasher.lease(connection, "w")) if leased else stasher
            await writer.stash(connection, RECORDS[0])
            await connection.commit()
            await writer.stash_many(connection, RECORDS)
            await connection.rollback()
            assert count(database) == (6 if autocommit else 1)

    asyncio.run(use())


def test_it_is_written_as_a_whole_or_not_at_all(database: str) -> None:
    """Also when it fails without an error of the server, and the caller commits all the same."""
    stasher = Stasher()
    with psycopg.connect(database) as connection:
        stasher.stash(connection, RECORDS[0])
        connection.execute("""CREATE FUNCTION last() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN IF NEW.kafka_value = ''4'' THEN RETURN NULL; END IF; RETURN NEW; END'""")
        connection.execute("CREATE TRIGGER last BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION last()")
        connection.commit()
        with pytest.raises(OutboxError, match="0 of 1"):
            stasher.stash_many(connection, RECORDS)
        connection.commit()
    assert count(database) == 1
