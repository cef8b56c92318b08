"""What the relay's SQL and its pure counterparts agree on: rows as bytes, slices of keys, keys as literals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester.delivery.decode import decode
from harvester.errors import UndecodableRecord
from harvester.outbox import queries
from harvester.outbox.copying import Row, copy_rows
from harvester.outbox.schema import inspect
from harvester.outbox.tables import OutboxTable
from harvester.record import KafkaRecord
from harvester.relay.router import shard_of, slice_sql
from tests.support.outboxes import seed_ddl

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEYS = [
    "",
    "a",
    "key-7",
    "K\u00e4se",
    "\U0001f9c0",
    "it's",
    'back\\slash "quoted"',
    "' OR 1=1 --",
    "{NULL}",
    "NULL",
    "%s",
]
BINARY_KEYS = [b"", b"a", b"\0\xff'\\", bytes(range(256))]
COLUMNS = "create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_partition"


@pytest.fixture(params=["text", "bytea"])
def connection(request: pytest.FixtureRequest, database: str) -> Iterator[psycopg.Connection[Any]]:
    """The default outbox, and one whose keys are bytea."""
    with psycopg.connect(database, autocommit=True) as opened:
        if request.param == "bytea":
            for table in ("outbox", "outbox_quarantine"):
                opened.execute(f"ALTER TABLE {table} ALTER kafka_key TYPE bytea USING NULL")
        opened.execute("ALTER TABLE outbox ALTER kafka_key DROP NOT NULL")
        yield opened


def keys_of(connection: psycopg.Connection[Any]) -> list[str | bytes | None]:
    is_text = inspect(connection, OUTBOX).key_type == "text"
    return [None, *(KEYS if is_text else BINARY_KEYS)]


def as_bytes(key: str | bytes | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def fill(connection: psycopg.Connection[Any], keys: list[str | bytes | None]) -> dict[int, bytes | None]:
    """One row for each key; returns the key's bytes by id."""
    found = {}
    for key in keys:
        row = connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            " VALUES (now(), 't', %s, '{}', '{}') RETURNING id",
            (key,),
        ).fetchone()
        assert row is not None
        found[row[0]] = as_bytes(key)
    return found


def lead(connection: psycopg.Connection[Any], term: int = 1) -> dict[str, Any]:
    holder = uuid4()
    connection.execute("UPDATE outbox_term SET term = %s, holder = %s", (term, holder))
    return {"term": term, "holder": holder, "leader_id": uuid4()}


def mark(
    connection: psycopg.Connection[Any], leader: dict[str, Any], excluded: str = "", limit: int = 100
) -> list[Row]:
    shape = inspect(connection, OUTBOX)
    statement = queries.mark_in_table(OUTBOX, shape, **leader, limit=limit, excluded=excluded)
    return copy_rows(connection, statement, 10)


def test_a_mark_gives_rows_by_id_and_key(connection: psycopg.Connection[Any]) -> None:
    keys = fill(connection, keys_of(connection))
    rows = mark(connection, lead(connection))
    assert [(record_id, key) for record_id, key, _ in rows] == sorted(keys.items())
    assert [(decode(raw).id, decode(raw).key) for _, _, raw in rows] == sorted(keys.items())


def test_sql_finds_the_same_slices_as_the_router(connection: psycopg.Connection[Any]) -> None:
    keys = fill(connection, [*keys_of(connection), *[None] * 5])
    shape = inspect(connection, OUTBOX)
    for shards in (1, 2, 3, 8, 97):
        slices = slice_sql(queries.key_bytes_sql(shape), "o.id", shards)
        found = dict(connection.execute(f"SELECT o.id, {slices} FROM outbox o").fetchall())
        assert found == {record_id: shard_of(key, record_id, shards) for record_id, key in keys.items()}


def test_closed_keys_are_left_out_whatever_they_are_made_of(connection: psycopg.Connection[Any]) -> None:
    keys = fill(connection, keys_of(connection))
    shape, leader = inspect(connection, OUTBOX), lead(connection)
    everything = [key for key in keys.values() if key is not None]
    for closed in everything:
        rows = mark(connection, leader | {"leader_id": uuid4()}, queries.exclusions(shape, {closed}, None))
        assert [key for _, key, _ in rows] == [key for key in keys.values() if key != closed]
    rows = mark(connection, leader, queries.exclusions(shape, everything, None))
    assert [key for _, key, _ in rows] == [None]


def test_closed_slices_are_left_out(connection: psycopg.Connection[Any]) -> None:
    keys = fill(connection, [*keys_of(connection), *[None] * 5])
    shape = inspect(connection, OUTBOX)
    condition = f"{slice_sql(queries.key_bytes_sql(shape), 'o.id', 3)} IN (0, 2)"
    rows = mark(connection, lead(connection), queries.exclusions(shape, (), condition))
    assert [row[0] for row in rows] == [i for i, key in keys.items() if shard_of(key, i, 3) == 1]


def test_a_mark_takes_each_row_once_from_the_head(connection: psycopg.Connection[Any]) -> None:
    ids = sorted(fill(connection, [None] * 5))
    leader = lead(connection)
    assert [row[0] for row in mark(connection, leader, limit=3)] == ids[:3]
    assert [row[0] for row in mark(connection, leader)] == ids[3:]
    assert mark(connection, leader) == []
    assert len(mark(connection, leader | {"leader_id": uuid4()})) == 5


def test_a_reset_gives_back_only_what_carries_the_leader_id(connection: psycopg.Connection[Any]) -> None:
    ids = sorted(fill(connection, [None] * 4))
    leader = lead(connection)
    mark(connection, leader)
    connection.execute(queries.reset(OUTBOX, **leader | {"leader_id": uuid4()}, ids=ids))
    assert mark(connection, leader) == []
    connection.execute(queries.reset(OUTBOX, **leader, ids=ids[1:3]))
    assert [row[0] for row in mark(connection, leader)] == ids[1:3]


def test_another_term_marks_and_resets_nothing(connection: psycopg.Connection[Any]) -> None:
    ids = sorted(fill(connection, [None] * 2))
    leader = lead(connection, term=5)
    mark(connection, leader, limit=1)
    for other in ({"term": 4}, {"term": 6}, {"holder": uuid4()}):
        assert mark(connection, leader | other) == []
        connection.execute(queries.reset(OUTBOX, **leader | other, ids=ids))
    assert [row[0] for row in mark(connection, leader)] == ids[1:]


@pytest.fixture
def rich(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    """The original table with everything beyond it: bytea values, nullable keys, partitions; arrays may be NULL."""
    from harvester.outbox import schema

    with psycopg.connect(empty_database, autocommit=True) as opened:
        opened.execute(seed_ddl(value="BYTEA"))
        opened.execute(
            "ALTER TABLE outbox ALTER kafka_key DROP NOT NULL, ALTER kafka_header_keys DROP NOT NULL,"
            " ALTER kafka_header_values DROP NOT NULL, ADD kafka_partition INT"
        )
        schema.init(opened, OUTBOX)
        yield opened


MOMENT = datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC)
HEADERS = [
    ([], []),
    (None, None),
    (["h"], [""]),
    (["n\u00e4me", "n\u00e4me", ""], ["\u20ac", "NULL", 'with "quotes", {braces} and \\']),
]


def test_rows_of_a_real_server_decode_to_what_was_written(rich: psycopg.Connection[Any]) -> None:
    written: list[KafkaRecord] = []
    combinations = product([None, "", "K\u00e4se"], [None, b"", bytes(range(256))], HEADERS, [None, 0, 7])
    for number, (key, value, (names, contents), partition) in enumerate(combinations, 1):
        created = MOMENT + timedelta(microseconds=number)
        row = (created, "a.topic_1", key, value, names, contents, partition)
        rich.execute(f"INSERT INTO outbox ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s)", row)
        pairs = zip(names or [], contents or [], strict=True)
        headers = [(name, content.encode()) for name, content in pairs]
        created_us = (created - EPOCH) // timedelta(microseconds=1)
        where = -1 if partition is None else partition
        written.append(KafkaRecord(number, "a.topic_1", as_bytes(key), value, headers, where, created_us))
    rows = mark(rich, lead(rich), limit=1000)
    assert [decode(raw) for _, _, raw in rows] == written
    assert [key for _, key, _ in rows] == [record.key for record in written]


@pytest.mark.parametrize(
    ("topic", "names", "contents", "partition", "message"),
    [
        ("t", "{a}", "{}", None, "1 header keys but 0"),
        ("t", "{a,NULL}", "{b,c}", None, "kafka_header_keys has a NULL"),
        ("t", "{a}", "{NULL}", None, "kafka_header_values has a NULL"),
        ("t", "{{a,b}}", "{a,b}", None, "2 dimensions"),
        ("t", "{{a}}", "{{a}}", None, "2 dimensions"),
        ("no topic", "{}", "{}", None, "invalid topic name 'no topic'"),
        ("t", "{}", "{}", -1, "invalid partition -1"),
    ],
)
def test_rows_that_are_no_records(
    rich: psycopg.Connection[Any], topic: str, names: str, contents: str, partition: int | None, message: str
) -> None:
    row = (topic, names, contents, partition)
    rich.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values, kafka_partition)"
        " VALUES (now(), %s, %s, %s, %s)",
        row,
    )
    [(_, _, raw)] = mark(rich, lead(rich))
    with pytest.raises(UndecodableRecord, match=message):
        decode(raw)


def test_arrays_that_begin_elsewhere_than_at_one(rich: psycopg.Connection[Any]) -> None:
    rich.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
        " VALUES (now(), 't', '[5:6]={a,b}', '{c,d}')"
    )
    [(_, _, raw)] = mark(rich, lead(rich))
    assert decode(raw).headers == [("a", b"c"), ("b", b"d")]


def test_times_without_an_end_are_only_numbers(rich: psycopg.Connection[Any]) -> None:
    for moment in ("infinity", "-infinity"):
        rich.execute("INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
                     " VALUES (%s, 't', '{}', '{}')", (moment,))  # fmt: skip
    assert [decode(raw).created_us > 0 for _, _, raw in mark(rich, lead(rich))] == [True, False]
