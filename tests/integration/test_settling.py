"""Settling on a real server: quarantine, its notice, and what a purge leaves behind."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest

from harvester.errors import SchemaError
from harvester.outbox.schema import inspect
from harvester.outbox.sql import settle
from harvester.outbox.tables import OutboxTable
from tests.support.dead import ODD_NAME, Outbox
from tests.support.outboxes import seed_ddl

pytestmark = pytest.mark.servers


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


@pytest.fixture(params=["outbox", "bytea", ODD_NAME])
def outbox(request: pytest.FixtureRequest, connection: psycopg.Connection[Any]) -> Outbox:
    if request.param == "bytea":
        return Outbox.make(connection, key_type="bytea", archive=True)
    return Outbox.make(connection, request.param, archive=True)


def test_a_record_is_moved_whole_or_not_at_all(outbox: Outbox) -> None:
    first, second = outbox.add("k", None)
    [before, _] = outbox.rows()
    assert outbox.quarantine(first, second) == [(True, False, False), (True, False, False)]
    assert outbox.rows() == []
    [moved, keyless] = outbox.rows(outbox.table.quarantine)
    for column in ("id", "create_time", "kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys"):
        assert moved[column] == before[column], column
    assert (moved["error"], moved["attempts"]) == ("too large", 5)
    assert moved["first_failed_at"] < moved["quarantined_at"]
    assert moved["origin"] == b"sent"
    assert keyless["kafka_key"] is None
    assert outbox.quarantine(first) == [(False, False, False)]


def test_a_deposed_leader_moves_nothing_and_gives_no_notice(outbox: Outbox) -> None:
    [record] = outbox.add("k")
    term, holder = outbox.term, outbox.holder
    outbox.lead()
    outbox.term, outbox.holder = term, holder
    assert outbox.quarantine(record, notice_topic="notices") == [(False, True, False)]
    assert outbox.ids() == [record]
    assert outbox.rows(outbox.table.quarantine) == []


def test_a_notice_goes_into_the_outbox_under_the_records_key(outbox: Outbox) -> None:
    key = b"\x00\xff'" if outbox.shape.key_type == "bytea" else "it's %s"
    [record] = outbox.add(key)
    outbox.quarantine(record, error="x" * 5_000, notice_topic="notices")
    [notice] = outbox.rows()
    assert (notice["kafka_topic"], notice["kafka_key"], notice["leader_id"]) == ("notices", key, None)
    value = json.loads(notice["kafka_value"])
    [moved] = outbox.rows(outbox.table.quarantine)
    assert (value["id"], value["incarnation"], value["topic"]) == (record, str(moved["incarnation"]), "t")
    encoded = base64.b64encode(key).decode() if isinstance(key, bytes) else None
    assert (value["key"], value["key_base64"]) == (None if encoded else key, encoded)
    assert (value["error"], value["attempts"]) == ("x" * settle.NOTICE_ERROR_CHARACTERS, 5)
    for name in ("create_time", "first_failed_at", "quarantined_at"):
        assert datetime.fromisoformat(value[name]) == moved[name]
    assert value["origin"] == b"sent".hex()
    # A notice is a record like any other; when it is refused itself, that is the end.
    assert outbox.quarantine(notice["id"], notice_topic="notices") == [(True, False, False)]
    assert outbox.rows() == []
    assert outbox.ids(outbox.table.quarantine) == [record, notice["id"]]


def test_a_notice_that_does_not_fit_never_keeps_a_record_from_leaving(connection: psycopg.Connection[Any]) -> None:
    connection.execute(seed_ddl(value="VARCHAR(500)"))
    connection.execute("ALTER TABLE outbox ALTER create_time SET DEFAULT now()")
    connection.execute("ALTER TABLE outbox ALTER kafka_header_keys SET DEFAULT '{}'")
    connection.execute("ALTER TABLE outbox ALTER kafka_header_values SET DEFAULT '{}'")
    outbox = Outbox.make(connection)
    [record] = outbox.add("k")
    assert outbox.quarantine(record, error="x" * 900, notice_topic="notices") == [(True, False, False)]
    [notice] = outbox.rows()
    assert (json.loads(notice["kafka_value"])["error"], json.loads(notice["kafka_value"])["key"]) == ("x" * 100, None)
    outbox.purge(notice["id"])
    connection.execute("ALTER TABLE outbox ALTER kafka_value TYPE varchar(50)")
    outbox.shape = inspect(connection, outbox.table)
    [record] = outbox.add("k")
    assert outbox.quarantine(record, notice_topic="notices") == [(True, False, False)]
    assert outbox.rows() == []
    connection.execute("ALTER TABLE outbox ALTER kafka_topic TYPE varchar(5)")
    with pytest.raises(SchemaError, match="does not fit into kafka_topic"):
        settle.quarantine(outbox.table, inspect(connection, outbox.table), "notices")


@pytest.mark.parametrize("archive", ["off", "ids", "rows"])
def test_the_command_tag_counts_what_was_deleted(outbox: Outbox, archive: settle.Archive) -> None:
    first, second, third = outbox.add("a", None, "c")
    assert outbox.purge(first, second, 4711, archive=archive) == 2
    assert outbox.purge(first, archive=archive) == 0
    assert outbox.ids() == [third]
    assert outbox.ids(outbox.table.archive) == ([] if archive == "off" else [first, second])


def test_the_archive_keeps_what_kafka_got(outbox: Outbox) -> None:
    key, value = ("k", "v") if outbox.shape.key_type == "text" else (b"\0\xff", b"\x01")
    [first, second] = outbox.add(key, key, value=value)
    [created, _] = outbox.rows()
    outbox.purge(first, archive="ids")
    outbox.purge(second, archive="rows")
    [by_id, whole] = outbox.rows(outbox.table.archive)
    incarnation = outbox.run(f"SELECT incarnation FROM {outbox.table.term}").fetchall()[0]["incarnation"]
    as_bytes = key.encode() if isinstance(key, str) else key
    for row in (by_id, whole):
        assert (row["incarnation"], row["kafka_topic"], row["kafka_key"]) == (incarnation, "t", as_bytes)
        assert row["purged_at"] >= created["create_time"] == by_id["create_time"]
    assert (by_id["kafka_value"], by_id["kafka_header_keys"]) == (None, None)
    assert whole["kafka_value"] == (value.encode() if isinstance(value, str) else value)
    assert (whole["kafka_header_keys"], whole["kafka_header_values"], whole["kafka_partition"]) == ([], [], None)


@pytest.mark.parametrize("archive", ["off", "ids", "rows"])
def test_a_purge_of_what_is_free_leaves_the_same_trace(
    outbox: Outbox, empty_database: str, archive: settle.Archive
) -> None:
    ids = outbox.add("a", "b", "c")
    statement = settle.purge_unlocked(outbox.table, archive, outbox.shape)
    with psycopg.connect(empty_database) as other:
        psycopg.RawCursor(other).execute(f"SELECT FROM {outbox.table.sql} WHERE id = $1 FOR UPDATE", [ids[1]])
        assert outbox.connection.execute(statement, {"ids": ids}).fetchall() == [(ids[1],)]
    assert outbox.ids() == [ids[1]]
    assert outbox.ids(outbox.table.archive) == ([] if archive == "off" else [ids[0], ids[2]])


def test_without_a_partition_column_as_well(connection: psycopg.Connection[Any]) -> None:
    connection.execute(seed_ddl())
    outbox = Outbox.make(connection, archive=True)
    for _ in range(2):
        connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            " VALUES (now(), 't', 'k', '{a}', '{b}')"
        )
    first, second = outbox.ids()
    assert outbox.purge(first, archive="rows") == 1
    assert outbox.quarantine(second, notice_topic="n") == [(True, False, False)]
    assert outbox.rows(outbox.table.archive)[0]["kafka_header_values"] == ["b"]
    assert [row["kafka_topic"] for row in outbox.rows()] == ["n"]
    assert OutboxTable.parse("outbox").archive == '"outbox_archive"'
