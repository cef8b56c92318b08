"""Stashing under a lease, and whatever ends a transaction: rollbacks, savepoints, lost answers, isolation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harvester import (
    LeasedStasher,
    SequenceGap,
    Stashed,
    Stasher,
)
from harvester.errors import OutboxError
from harvester.outbox.sql import insert
from tests.support.leasing import record, top, values

pytest_plugins = ["tests.support.leased"]

pytestmark = pytest.mark.servers


def test_a_rollback_takes_number_row_and_position_with_it(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str
) -> None:
    writer.stash(connection, record(1), position="1")
    connection.commit()
    writer.stash(connection, record("lost"), position="2")
    connection.rollback()
    assert (values(database), top(database)) == (["1"], (1, 1, "1"))
    with pytest.raises(SequenceGap, match="record 3 came where 2 is next"):
        writer.stash(connection, record("hasty"))
    writer.seek(1)
    writer.stash(connection, record(2))
    connection.commit()
    assert values(database) == ["1", "2"]


def test_transaction_takes_the_numbers_back(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str
) -> None:
    with pytest.raises(ZeroDivisionError), writer.transaction(connection):  # noqa: PT012
        writer.stash_many(connection, [record("lost")] * 3)
        raise ZeroDivisionError

    def to_the_savepoint() -> None:
        with writer.transaction(connection) as inner:
            writer.stash(connection, record("rolled back"))
            raise psycopg.Rollback(inner)

    with writer.transaction(connection):
        writer.stash(connection, record(1))
        to_the_savepoint()
        writer.stash(connection, record(2))
    with pytest.raises(psycopg.errors.InFailedSqlTransaction, match="nothing of it is committed"):  # noqa: PT012, SIM117
        with writer.transaction(connection):
            writer.stash(connection, record("lost"))
            with pytest.raises(psycopg.errors.DivisionByZero):
                connection.execute("SELECT 1 / 0")
    with writer.transaction(connection):
        writer.stash(connection, record(3))
    assert values(database) == ["1", "2", "3"]
    assert top(database) == (1, 3, None)


def test_a_commit_whose_answer_never_came(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(psycopg.OperationalError):
        pass

    with psycopg.connect(database) as second, monkeypatch.context() as cut:  # noqa: SIM117
        with pytest.raises(Lost), writer.transaction(second) as transaction:  # noqa: PT012
            writer.stash(second, record(1), position="1")
            commit = transaction._commit_gen

            def committed_and_then_lost() -> Iterator[Any]:
                yield from commit()
                raise Lost("the answer is gone")

            cut.setattr(transaction, "_commit_gen", committed_and_then_lost)
    assert values(database) == ["1"]
    with writer.transaction(connection):
        assert writer.stash(connection, record(1), position="1") == Stashed(None, 1)
        writer.stash(connection, record(2), position="2")
    assert (values(database), top(database)) == (["1", "2"], (1, 2, "2"))


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_stricter_isolation_fails_loudly_and_can_be_repeated(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str, level: psycopg.IsolationLevel
) -> None:
    with psycopg.connect(database) as strict:
        strict.isolation_level = level
        lease = Stasher().lease(strict, "other name")  # of its own isolation
        assert lease.generation == 1
        with pytest.raises(psycopg.errors.SerializationFailure), writer.transaction(strict):  # noqa: PT012
            strict.execute("SELECT count(*) FROM outbox")  # takes the snapshot
            with connection.transaction():
                other = Stasher().leased(writer.lease)
                other.stash(connection, record(1))
            writer.stash(strict, record(1))
        with writer.transaction(strict):
            assert writer.stash(strict, record(1)).repeated
            writer.stash(strict, record(2))
    assert values(database) == ["1", "2"]


def test_a_batch_of_several_statements_is_all_or_none(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)
    connection.autocommit = True
    connection.execute("ALTER TABLE outbox ADD CHECK (kafka_value <> 'bad')")
    with pytest.raises(psycopg.errors.CheckViolation):
        writer.stash_many(connection, [record(n) for n in (1, 2, 3, "bad")], position="4")
    assert (values(database), top(database)) == ([], (1, 0, None))
    writer.seek(0)
    found = writer.stash_many(connection, [record(n) for n in range(1, 8)], position="7")
    assert [each.sequence for each in found] == list(range(1, 8))
    writer.seek(4)
    found = writer.stash_many(connection, [record(n) for n in range(5, 11)], position="10")
    assert [each.repeated for each in found] == [True] * 3 + [False] * 3
    assert (values(database), top(database)) == ([str(n) for n in range(1, 11)], (1, 10, "10"))
    assert writer.stash_many(connection, [], position="11") == []
    assert top(database) == (1, 10, "10")


def test_a_suppressed_row_is_noticed(writer: LeasedStasher, connection: psycopg.Connection[Any]) -> None:
    """By both forms of the statement: it must not pass for a repeat."""
    connection.execute("""CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.kafka_value = 'gone' THEN RETURN NULL; END IF; RETURN NEW; END $$""")
    connection.execute("CREATE TRIGGER n BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION nothing()")
    for _ in range(2):
        with pytest.raises(OutboxError, match="0 of 1 rows"):
            writer.stash(connection, record("gone"))
        with pytest.raises(OutboxError, match="1 of 2 rows"):
            writer.stash_many(connection, [record("gone"), record("kept")])
