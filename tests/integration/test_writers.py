"""The stashers for SQLAlchemy, Django and asyncpg: all of them keep what the one for psycopg promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from harvester.errors import OutboxError, RecordRejected, SchemaError
from harvester.outbox import schema
from harvester.outbox.sql import insert
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord
from tests.support.desks import DESKS, Desk

pytestmark = pytest.mark.servers

HEADERS = (("a", 'quote " back \\ brace {} comma , null NULL'), ("a", ""), ("", "ü☃"), ("x", "NULL"))
PLAIN = OutboxRecord("orders", "k1", '{"a": "\\\\x00 %s {} :x $1"}', HEADERS)
ALL = [PLAIN, OutboxRecord("t", None), OutboxRecord("t", "", "", (), 3), PLAIN]
ODD = '"My ""Schema"""."100% :x $1 %s %(y)s"'


@pytest.fixture(params=list(DESKS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def desk(kind: str, database: str) -> Iterator[Desk]:
    with DESKS[kind](database, "outbox") as opened:
        yield opened


def stored(dsn: str, table: str = "outbox") -> list[OutboxRecord]:
    """What other sessions see, in the order of the ids."""
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        rows = psycopg.Cursor(connection, row_factory=dict_row).execute(
            f"SELECT * FROM {table.replace('%', '%%')} ORDER BY id", ()
        )
        return [
            OutboxRecord(
                row["kafka_topic"],
                row["kafka_key"],
                row["kafka_value"],
                tuple(zip(row["kafka_header_keys"], row["kafka_header_values"], strict=True)),
                row["kafka_partition"],
            )
            for row in rows
        ]


def test_records_come_back_as_they_were(desk: Desk, database: str) -> None:
    ids = [desk.stash(record) for record in ALL]
    ids += desk.stash_many(iter(ALL))
    assert ids == sorted(set(ids))
    assert desk.stash_many([]) == []
    assert stored(database) == []
    desk.commit()
    assert stored(database) == [*ALL, *ALL]


def test_a_rollback_takes_them_with_it(desk: Desk, database: str) -> None:
    desk.stash(PLAIN)
    desk.stash_many([PLAIN] * 3)
    desk.rollback()
    desk.stash(PLAIN)
    desk.commit()
    assert stored(database) == [PLAIN]


def test_a_rollback_takes_a_long_batch_with_it(desk: Desk, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as the first statement of its transaction: a batch of several statements begins none of its own."""
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)
    desk.stash(PLAIN)
    desk.commit()
    desk.stash_many(ALL)
    desk.rollback()
    assert stored(database) == [PLAIN]
    desk.stash_many(ALL)
    desk.commit()
    assert stored(database) == [PLAIN, *ALL]


def test_they_commit_with_the_change(desk: Desk, database: str) -> None:
    desk.execute("CREATE TABLE account (id int)")
    desk.stash(PLAIN)
    desk.rollback()
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT to_regclass('account')").fetchone() == (None,)
    desk.execute("CREATE TABLE account (id int)")
    desk.stash(PLAIN)
    desk.commit()
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT to_regclass('account')").fetchone() == ("account",)
    assert stored(database) == [PLAIN]


def test_a_refusal_leaves_the_transaction_intact(desk: Desk, database: str) -> None:
    desk.stash(PLAIN)
    for bad in (OutboxRecord("no topic", "k"), OutboxRecord("t", "\x00"), OutboxRecord("t", "k", b"\xff")):
        with pytest.raises(RecordRejected):
            desk.stash(bad)
        with pytest.raises(RecordRejected, match="record 1 of the batch"):
            desk.stash_many([PLAIN, bad])
    desk.commit()
    assert stored(database) == [PLAIN]


def test_bytes(kind: str, empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        schema.init(connection, OutboxTable.parse("outbox"), value_type="bytea")
    binary = OutboxRecord("t", "k", bytes(range(256)))
    with DESKS[kind](empty_database, "outbox") as desk:
        desk.stash(binary)
        desk.stash(OutboxRecord("t", "k", "ß\\x41"))
        desk.stash_many([binary, OutboxRecord("t", None)])
        desk.commit()
    assert stored(empty_database) == [
        binary,
        OutboxRecord("t", "k", "ß\\x41".encode()),
        binary,
        OutboxRecord("t", None),
    ]


def test_a_name_full_of_placeholders(kind: str, empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        psycopg.Cursor(connection).execute(b'CREATE SCHEMA "My ""Schema"""')
        schema.init(connection, OutboxTable.parse(ODD))
    with DESKS[kind](empty_database, ODD) as desk:
        desk.stash(PLAIN)
        desk.stash_many([PLAIN, PLAIN])
        desk.commit()
    assert stored(empty_database, ODD) == [PLAIN] * 3


def test_no_outbox_and_rows_that_a_trigger_takes_away(kind: str, empty_database: str) -> None:
    with DESKS[kind](empty_database, "outbox") as desk, pytest.raises(SchemaError):
        desk.stash(PLAIN)
    with psycopg.connect(empty_database) as connection:
        schema.init(connection, OutboxTable.parse("outbox"))
        connection.execute("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        connection.execute("CREATE TRIGGER no BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION no()")
    with DESKS[kind](empty_database, "outbox") as desk:
        for write in (lambda: desk.stash(PLAIN), lambda: desk.stash_many([PLAIN])):
            with pytest.raises(OutboxError, match=r"not inserted|0 of 1"):
                write()


def test_the_columns_are_looked_up_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.stash(PLAIN)
    desk.commit()
    monkeypatch.setattr(insert.Insertion, "build", _unexpected)
    desk.stash(PLAIN)


def _unexpected(*_: Any) -> None:
    raise AssertionError("looked up again")
