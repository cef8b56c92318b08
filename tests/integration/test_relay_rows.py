"""Rows as a real server sends them: what was written is what a shard decodes, in both ways of marking."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harvester.delivery.decode import Broken, decode
from harvester.outbox import leader_session
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.libpq import copy_rows
from harvester.outbox.schema import inspect
from harvester.outbox.sql import queries
from harvester.outbox.sql.queries import Row
from harvester.outbox.tables import OutboxTable
from harvester.record import KafkaRecord
from tests.support.marking import BOTH
from tests.support.outboxes import seed_ddl
from tests.support.rows import broken_one, decode_one

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COLUMNS = "create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_partition"


def mark(connection: psycopg.Connection[Any], marking: str = "memory") -> list[Row]:
    """All rows, as a new leader gets them."""
    holder = uuid4()
    connection.execute("UPDATE outbox_term SET term = 1, holder = %s", (holder,))
    where: dict[str, Any] = {"fence": queries.Fence(1, holder), "limit": 1000, "high": None, "gaps": ()}
    shape = inspect(connection, OUTBOX)
    if marking == "table":
        return copy_rows(connection, queries.mark_in_table(OUTBOX, shape, leader_id=uuid4(), **where), 10)
    return copy_rows(connection, queries.mark_in_memory(OUTBOX, shape, **where), 10)


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


@BOTH
def test_rows_of_a_real_server_decode_to_what_was_written(rich: psycopg.Connection[Any], marking: str) -> None:
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
        written.append(
            KafkaRecord(
                number, key.encode() if key is not None else None, "a.topic_1", value, headers, where, created_us
            )
        )
    rows = mark(rich, marking)
    xmins = dict(rich.execute("SELECT id, xmin::text::bigint FROM outbox").fetchall())
    written = [record._replace(xmin=xmins[record.id]) for record in written]
    assert decode(b"".join(raw for _, _, raw in rows)) == written
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
    [(record_id, _, raw)] = mark(rich)
    found = broken_one(raw)
    assert (found.id, found.key) == (record_id, None)
    assert message in found.reason


def test_arrays_that_begin_elsewhere_than_at_one(rich: psycopg.Connection[Any]) -> None:
    rich.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
        " VALUES (now(), 't', '[5:6]={a,b}', '{c,d}')"
    )
    [(_, _, raw)] = mark(rich)
    assert decode_one(raw).headers == [("a", b"c"), ("b", b"d")]


@pytest.mark.parametrize("kind", ["text", "varchar"])
def test_a_single_header_in_every_form_of_an_array(rich: psycopg.Connection[Any], kind: str) -> None:
    """Shards pass over most of a usual array of one element: it must be none that only looks like it."""
    for column in ("kafka_header_keys", "kafka_header_values"):
        rich.execute(f"ALTER TABLE outbox ALTER {column} TYPE {kind}[]")
    forms = ["{a}", "[5:5]={a}", "[-1:-1]={a}", "{}", "{NULL}", "{{a}}"]
    for form in forms:
        rich.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
            f" VALUES (now(), 't', '{{h}}', '{form}'::text[])"
        )
    broken = ["0 header values", "has a NULL", "2 dimensions"]
    found = decode(b"".join(raw for _, _, raw in mark(rich)))
    assert [one.headers for one in found if isinstance(one, KafkaRecord)] == [[("h", b"a")]] * 3
    reasons = [one.reason for one in found if isinstance(one, Broken)]
    assert len(reasons) == len(broken)
    assert all(message in reason for message, reason in zip(broken, reasons, strict=True))


def test_times_without_an_end_are_only_numbers(rich: psycopg.Connection[Any]) -> None:
    for moment in ("infinity", "-infinity"):
        rich.execute("INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
                     " VALUES (%s, 't', '{}', '{}')", (moment,))  # fmt: skip
    assert [decode_one(raw).created_us > 0 for _, _, raw in mark(rich)] == [True, False]


def test_a_row_without_a_time_is_of_the_epoch(rich: psycopg.Connection[Any]) -> None:
    rich.execute("ALTER TABLE outbox ALTER create_time DROP NOT NULL")
    rich.execute("INSERT INTO outbox (kafka_topic, kafka_header_keys, kafka_header_values) VALUES ('t', '{}', '{}')")
    [(_, _, raw)] = mark(rich)
    assert decode_one(raw).created_us == 0


def test_an_outbox_without_partitions(rich: psycopg.Connection[Any]) -> None:
    rich.execute("ALTER TABLE outbox DROP kafka_partition")
    rich.execute("INSERT INTO outbox (create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
                 " VALUES (now(), 't', '{}', '{}')")  # fmt: skip
    [(_, _, raw)] = mark(rich)
    assert decode_one(raw).partition == -1


@pytest.mark.parametrize("how", ["memory", "table", "fetch"])
def test_rows_beyond_a_sum_of_bytes_come_without_their_content(
    rich: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing else bounds what a mark takes in before anything is known of the rows' size."""
    monkeypatch.setattr(leader_session, "_MOST_BYTES", 25_000)
    for number in range(1, 8):
        rich.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value)"
            " VALUES (clock_timestamp(), 't', %s, %s)",
            (f"k{number}" if number != 6 else None, b"v" * 10_000),
        )
    holder = uuid4()
    rich.execute("UPDATE outbox_term SET term = 1, holder = %s", (holder,))
    session = MarkSession(rich.info.dsn, OUTBOX, "test", 10)
    session.open()
    try:
        if how == "fetch":
            rows = session.fetch(term=1, holder=holder, ids=tuple(range(1, 8)))
        else:
            leader_id = uuid4() if how == "table" else None
            rows = session.mark(term=1, holder=holder, leader_id=leader_id, limit=100, high=None, gaps=())
    finally:
        session.close()
    keys = [b"k1", b"k2", b"k3", b"k4", b"k5", None, b"k7"]
    assert [(record_id, key) for record_id, key, _ in rows] == list(enumerate(keys, 1))
    assert [len(raw) > 10_000 for _, _, raw in rows] == [True] * 3 + [False] * 4
    assert [raw for _, _, raw in rows[3:]] == [b""] * 4
