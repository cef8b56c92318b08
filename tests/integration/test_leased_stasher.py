"""Stashing under a lease: the very next number, repeats, gaps, generations; with whatever ends a transaction."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from harvester import (
    Lease,
    LeasedStasher,
    LeaseError,
    LeaseExpired,
    LeaseFenced,
    LeaseUnknown,
    OutboxRecord,
    SequenceGap,
    Stashed,
    Stasher,
)
from harvester.errors import RecordRejected
from tests.support.leasing import lease_row, record, top, values

pytest_plugins = ["tests.support.leased"]

pytestmark = pytest.mark.servers


def test_each_record_takes_the_next_number(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str
) -> None:
    stashed = [writer.stash(connection, record(n), position=f"p{n}") for n in range(1, 4)]
    stashed += writer.stash_many(connection, [record(n) for n in range(4, 7)], position="p6")
    stashed.append(writer.stash(connection, record(7)))
    assert [each.sequence for each in stashed] == list(range(1, 8))
    ids = [each.id for each in stashed]
    assert ids == sorted(ids, key=lambda row: row or 0)
    connection.commit()
    assert values(database) == [str(n) for n in range(1, 8)]
    assert top(database) == (1, 7, "p6")
    assert writer.lease.sequence == writer.sequence == 7


def test_a_row_is_as_without_a_lease(writer: LeasedStasher, connection: psycopg.Connection[Any]) -> None:
    headers = (("a", 'quote " back \\ brace {} comma , null NULL'), ("", "ü☃"))
    record = OutboxRecord("orders", "ü", '{"a": "\\\\x00 %s {}"}', headers, 3)
    Stasher().stash(connection, record)
    for _ in range(2):  # the deciding statement, then the hopeful one
        writer.stash(connection, record)
        writer.stash_many(connection, [record])
    writer.seek(writer.sequence)
    rows = connection.execute(
        "SELECT DISTINCT kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_partition,"
        " leader_id, create_time FROM outbox"
    ).fetchall()
    assert len(rows) == 1


def test_what_was_stashed_before_is_recognised_and_not_written(
    writer: LeasedStasher, stasher: Stasher, connection: psycopg.Connection[Any], database: str
) -> None:
    saved = writer.lease
    for n in range(1, 5):
        writer.stash(connection, record(n), position=str(n))
    connection.commit()
    again = stasher.leased(Lease(saved.id, saved.generation, saved.sequence))
    assert again.stash(connection, record(1), position="1") == Stashed(None, 1)
    assert again.stash_many(connection, [record(2), record(3)], position="3") == [Stashed(None, 2), Stashed(None, 3)]
    found = again.stash_many(connection, [record(4), record(5), record(6)], position="6")
    assert [each.repeated for each in found] == [True, False, False]
    assert again.stash(connection, record(7), position="7").sequence == 7
    connection.commit()
    assert values(database) == [str(n) for n in range(1, 8)]
    assert top(database) == (1, 7, "7")


def test_a_repeat_leaves_the_position(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str
) -> None:
    for n in (1, 2):
        writer.stash(connection, record(n), position=str(n))
    writer.seek(0)
    writer.stash(connection, record(1), position="1")
    connection.commit()
    assert top(database) == (1, 2, "2")


@pytest.mark.parametrize("first", [True, False], ids=["unseen", "seen"])
def test_a_gap_writes_nothing_and_the_transaction_goes_on(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str, first: bool
) -> None:
    if first:
        writer.stash(connection, record(1), position="1")
    else:
        writer.seek(1)
        connection.execute("UPDATE outbox_lease SET sequence = 1, upstream_position = '1'")
    writer.seek(2)
    connection.execute("CREATE TABLE mine (n int)")
    for number in (3, 4):
        with pytest.raises(SequenceGap, match=f"record {number} came where 2 is next") as refused:
            writer.stash(connection, record(number), position="x")
        assert (refused.value.sequence, refused.value.expected) == (number, 2)
    with pytest.raises(SequenceGap, match="record 5 came"):
        writer.stash_many(connection, [record(5), record(6)], position="x")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    writer.seek(refused.value.expected - 1)
    writer.stash(connection, record(2))
    connection.commit()
    assert values(database) == (["1", "2"] if first else ["2"])
    assert top(database) == (1, 2, "1")
    assert connection.execute("SELECT count(*) FROM mine").fetchone() == (0,)


def test_generations(
    writer: LeasedStasher, stasher: Stasher, connection: psycopg.Connection[Any], database: str
) -> None:
    """As stored: go on. One more: raise it, and fence. Less: fenced. Two more: nobody ever had it."""
    saved = writer.lease
    writer.stash(connection, record(1))
    connection.commit()
    successor = stasher.leased(saved.raised())
    assert successor.stash(connection, record(1)).repeated, "a repeat raises the generation, too"
    connection.commit()
    assert top(database)[0] == 2
    with pytest.raises(LeaseFenced, match="its generation is 2 now; record 2 was not written"):
        writer.stash(connection, record(2))
    with pytest.raises(LeaseFenced):
        writer.stash_many(connection, [record(3)])
    assert successor.stash(connection, record(2)).sequence == 2
    with pytest.raises(LeaseUnknown, match="has generation 2 and never gave this one out"):
        stasher.leased(Lease(saved.id, 4, 2)).stash(connection, record(3))
    third = stasher.leased(Lease(saved.id, 3, 2))
    third.seek(5)
    with pytest.raises(SequenceGap):
        third.stash(connection, record(6))
    assert successor.stash(connection, record(3)).sequence == 3, "a gap raises nothing"
    connection.commit()
    assert values(database) == ["1", "2", "3"]


def test_a_second_lease_fences_the_first(
    writer: LeasedStasher, stasher: Stasher, connection: psycopg.Connection[Any], database: str
) -> None:
    writer.stash(connection, record(1))
    connection.commit()
    second = stasher.leased(stasher.lease(connection, "reader"))
    with pytest.raises(LeaseFenced):
        writer.stash(connection, record("late"))
    assert second.stash(connection, record(2)).sequence == 2
    connection.commit()
    assert values(database) == ["1", "2"]


def test_a_bad_record_takes_no_number(
    writer: LeasedStasher, connection: psycopg.Connection[Any], database: str
) -> None:
    for _ in range(2):
        with pytest.raises(RecordRejected):
            writer.stash(connection, OutboxRecord("no topic", "k"))
        with pytest.raises(RecordRejected):
            writer.stash_many(connection, [record(1), OutboxRecord("t", "\x00")])
        with pytest.raises(LeaseError, match="not a valid upstream position"):
            writer.stash(connection, record(1), position=7)  # type: ignore[arg-type]
        writer.stash(connection, record("good"))
    connection.commit()
    assert values(database) == ["good", "good"]


def test_unleased_rows_are_never_checked(
    writer: LeasedStasher, stasher: Stasher, connection: psycopg.Connection[Any], database: str
) -> None:
    writer.stash(connection, record(1))
    stasher.stash(connection, record("plain"))
    stasher.stash_many(connection, [record("plain")] * 2)
    stasher.prepare(connection).stash(record("plain"))
    writer.stash(connection, record(2))
    connection.commit()
    assert values(database) == ["1", "plain", "plain", "plain", "plain", "2"]
    assert top(database) == (1, 2, None)


def test_factories_of_the_connection_do_not_matter(database: str) -> None:
    for factory in (psycopg.ClientCursor, psycopg.RawCursor):
        with psycopg.connect(database, row_factory=dict_row, cursor_factory=factory) as connection:
            stasher = Stasher()
            writer = stasher.leased(stasher.lease(connection.cursor(), factory.__name__))
            with writer.transaction(connection.cursor()):
                assert [writer.stash(connection.cursor(), record(n)).sequence for n in range(3)] == [1, 2, 3]
                assert len(writer.stash_many(connection, [record(4)])) == 1


def test_the_statement_is_prepared_and_finds_the_lease_at_once(
    writer: LeasedStasher, connection: psycopg.Connection[Any]
) -> None:
    """Two statements in all, however long it goes on; and a transaction with many records stays quick."""
    for n in range(300):
        writer.stash(connection, record(n))
    row = connection.execute(
        "SELECT count(*), max(generic_plans + custom_plans) FROM pg_prepared_statements WHERE statement LIKE '%lease%'"
    ).fetchone()
    assert row == (2, 299)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("UPDATE outbox_lease SET expires_at = clock_timestamp() WHERE name = 'reader'", LeaseExpired),
        ("UPDATE outbox_lease SET generation = generation + 1 WHERE name = 'reader'", LeaseFenced),
        ("UPDATE outbox_lease SET sequence = sequence - 1 WHERE name = 'reader'", SequenceGap),
        ("UPDATE outbox_lease SET generation = 1, sequence = 1 WHERE name = 'other'", None),
    ],
)
def test_where_the_row_was_seen_proves_nothing(
    writer: LeasedStasher, stasher: Stasher, connection: psycopg.Connection[Any], database: str, change: str, error: Any
) -> None:
    """A place can hold another version, or after a while another lease; the hopeful statement asks for everything."""
    stasher.lease(connection, "other")
    writer.stash(connection, record(1))
    connection.execute(change.encode())
    row = connection.execute(
        "SELECT ctid FROM outbox_lease WHERE name = %s", ("other" if "other" in change else "reader",)
    ).fetchone()
    assert row is not None
    writer._course.at = row[0]
    with pytest.raises(error) if error is not None else nullcontext():
        writer.stash(connection, record(2))
    connection.commit()
    assert values(database) == (["1"] if error is not None else ["1", "2"])
    other = lease_row(database, "other")
    assert other is not None
    assert other["sequence"] == (1 if "other" in change else 0)
