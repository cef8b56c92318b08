"""Leases over SQLAlchemy, asyncpg and Django: what they promise over psycopg holds there too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from harvester import Lease, LeaseExpired, LeaseFenced, OutboxRecord, SequenceGap, Stashed
from harvester.errors import OutboxError, SchemaError
from harvester.outbox import schema
from harvester.outbox.sql import insert
from harvester.outbox.tables import OutboxTable
from harvester.writers.sqlalchemy import SqlalchemyStasher
from tests.support.desks import engine_of
from tests.support.leased_desks import LEASED_DESKS, LeasedDesk
from tests.support.leasing import end, lease_row, record, top, values

pytestmark = pytest.mark.servers

ODD = '"My ""Schema"""."100% :x $1 %s %(y)s"'


@pytest.fixture(params=list(LEASED_DESKS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def desk(kind: str, database: str) -> Iterator[LeasedDesk]:
    with LEASED_DESKS[kind](database, "outbox") as opened:
        yield opened


def test_each_record_is_written_once(desk: LeasedDesk, database: str) -> None:
    lease = desk.lease("reader")
    assert (lease.generation, lease.sequence, lease.position) == (1, 0, None)
    writer = desk.writer(lease)
    found = desk.run(writer, (record(1), "1"), (record(2), None), ([record(3), record(4)], "4"))
    assert [each.sequence for each in found] == [1, 2, 3, 4]
    assert len({each.id for each in found} - {None}) == 4
    assert top(database) == (1, 4, "4")
    again = desk.writer(Lease(lease.id, 1, 2))
    found = desk.run(again, ([record(3), record(4), record(5)], "5"), (record(6), "6"))
    assert [each.repeated for each in found] == [True, True, False, False]
    assert desk.run(desk.writer(Lease(lease.id, 1, 5)), (record(6), "x")) == [Stashed(None, 6)]
    assert values(database) == [str(number) for number in range(1, 7)]
    assert again.lease.sequence == again.sequence == 6
    next_one = desk.lease("reader")
    assert (next_one.id, next_one.generation, next_one.sequence, next_one.position) == (lease.id, 2, 6, "6")


def test_a_transaction_that_does_not_commit_takes_its_numbers_back(desk: LeasedDesk, database: str) -> None:
    writer = desk.writer(desk.lease("reader"))
    desk.run(writer, (record(1), "1"))
    with pytest.raises(ZeroDivisionError):
        desk.run(writer, (record("lost"), "2"), ([record("lost")] * 3, "5"), error=ZeroDivisionError())
    assert writer.sequence == 1
    assert desk.run(writer, (record(2), "2"))[0].sequence == 2
    assert values(database) == ["1", "2"]
    assert top(database) == (1, 2, "2")


def test_an_error_that_was_caught_ends_the_transaction_all_the_same(desk: LeasedDesk, database: str) -> None:
    """PostgreSQL answers its COMMIT with a rollback, and without an error."""
    writer = desk.writer(desk.lease("reader"))
    desk.run(writer, (record(1), "1"))
    with pytest.raises(Exception, match="transaction"):
        desk.run(writer, (record("lost"), "2"), spoils=True)
    assert desk.run(writer, (record(2), "2"))[0].sequence == 2
    assert values(database) == ["1", "2"]


@pytest.mark.parametrize("kind", [kind for kind in LEASED_DESKS if kind.startswith("sqlalchemy")])
def test_sqlalchemys_own_commit_is_refused_within_a_transaction(desk: LeasedDesk, database: str) -> None:
    """Its numbers would be taken back although they are used, and the next records would pass for repeats."""
    writer = desk.writer(desk.lease("reader"))
    with pytest.raises(OutboxError, match="cannot be committed within its block"):
        desk.run(writer, (record("lost"), "1"), ends="commit")
    assert writer.sequence == 0
    assert not desk.run(writer, (record(0), "0"))[0].repeated, "in the same connection; what was refused has gone"
    assert values(database) == ["0"]
    desk.run(writer, (record("lost"), "1"), ends="rollback")
    assert writer.sequence == 1
    assert not desk.run(writer, (record(1), "1"))[0].repeated
    assert values(database) == ["0", "1"]


def test_a_commit_is_refused_within_a_savepoint_and_counted_of_a_session_that_has_joined(database: str) -> None:
    engine = engine_of(database, "psycopg")
    stasher = SqlalchemyStasher("outbox")
    writer = stasher.leased(stasher.lease(engine, "reader"))
    with Session(engine) as session, suppress(OutboxError):
        session.execute(sqlalchemy.text("SELECT"))
        with writer.transaction(session):
            writer.stash(session, record("lost"))
            session.commit()
    assert writer.sequence == 0
    with engine.connect() as connection, connection.begin():
        session = Session(connection)
        with writer.transaction(session):
            writer.stash(session, record(1))
            session.commit()
        assert writer.sequence == 1
    engine.dispose()
    assert values(database) == ["1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_savepoint_that_is_released_within_its_block_keeps_its_numbers(database: str, fails: bool) -> None:
    engine = engine_of(database, "psycopg")
    stasher = SqlalchemyStasher("outbox")
    writer = stasher.leased(stasher.lease(engine, "reader"))
    with engine.connect() as target, target.begin():
        with suppress(ZeroDivisionError), writer.transaction(target):
            writer.stash(target, record(1))
            with target.begin_nested():
                writer.stash(target, record(2))
            savepoint = target.get_nested_transaction()
            assert savepoint is not None
            savepoint.commit()
            if fails:
                raise ZeroDivisionError
        with suppress(ZeroDivisionError), writer.transaction(target):
            writer.stash(target, record("lost"))
            with target.begin_nested():
                pass
            raise ZeroDivisionError
        assert writer.sequence == 2
        assert writer.stash(target, record(3)).sequence == 3
    engine.dispose()
    assert values(database) == ["1", "2", "3"]


def test_refusals_leave_the_transaction_as_it_was(desk: LeasedDesk, database: str) -> None:
    lease = desk.lease("reader")
    writer = desk.writer(lease)
    desk.run(writer, (record(1), "1"))
    writer.seek(4)
    with pytest.raises(SequenceGap, match="record 5 came where 2 is next"):
        desk.run(writer, (record(5), "5"))
    desk.lease("reader")
    writer.seek(1)
    with pytest.raises(LeaseFenced):
        desk.run(writer, (record(2), "2"))
    end(database, "reader")
    with pytest.raises(LeaseExpired) as refused:
        desk.run(desk.writer(Lease(lease.id, 2, 1)), (record(2), "2"))
    assert "position and sequence of the new lease" in (refused.value.hint or "")
    renewed = desk.lease("reader")
    assert (renewed.generation, renewed.sequence, renewed.position) == (3, 1, "1")
    desk.run(desk.writer(renewed), (record(2), "2"))
    assert values(database) == ["1", "2"]


def test_use_renews_a_lease(desk: LeasedDesk, database: str) -> None:
    writer = desk.writer(desk.lease("reader"))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_lease SET leased_at = now() - interval '6 d', expires_at = now() + interval '1 d'"
        )
    desk.run(writer, (record(1), "1"))
    row = lease_row(database, "reader")
    assert row is not None
    assert (row["expires_at"] - row["leased_at"]).days == 7


def test_a_long_batch_is_written_whole_or_not_at_all(
    desk: LeasedDesk, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)
    writer = desk.writer(desk.lease("reader"))
    assert [each.sequence for each in desk.run(writer, ([record(n) for n in range(5)], "5"))] == [1, 2, 3, 4, 5]
    with pytest.raises(ZeroDivisionError):
        desk.run(writer, ([record(n) for n in range(5)], "10"), error=ZeroDivisionError())
    assert top(database) == (1, 5, "5")


def test_nasty_names_and_values(kind: str, empty_database: str) -> None:
    headers = (("a", 'quote " back \\ brace {} comma , null NULL'), ("", "ü☃"))
    binary = OutboxRecord("t", "ü %s $1", bytes(range(256)), headers, 3)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        psycopg.Cursor(connection).execute(b'CREATE SCHEMA "My ""Schema"""')
        schema.init(connection, OutboxTable.parse(ODD), value_type="bytea")
    with LEASED_DESKS[kind](empty_database, ODD) as desk:
        writer = desk.writer(desk.lease("ü \" % {} ' $1"))
        desk.run(writer, (binary, "% $1 \\"), (binary, None), ([binary, OutboxRecord("t", None)], None))
        assert desk.lease("ü \" % {} ' $1").position == "% $1 \\"
    with psycopg.connect(empty_database) as connection:
        query = f"SELECT DISTINCT kafka_key, kafka_value, kafka_header_values, kafka_partition FROM {ODD} WHERE id < 4"
        rows = connection.execute(query.encode()).fetchall()
        assert rows == [("ü %s $1", bytes(range(256)), [value for _, value in headers], 3)]


def test_without_the_table_init_is_named(desk: LeasedDesk, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DROP TABLE outbox_lease")
    with pytest.raises(SchemaError, match='no table "outbox_lease"'):
        desk.lease("reader")
