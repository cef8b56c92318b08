"""The stasher over psycopg's blocking connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from harvester.errors import OutboxError, RecordRejected, SchemaError
from harvester.outbox.sql import insert
from harvester.outbox.stasher import Stasher
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord
from tests.support.outboxes import poor_role, seed_ddl

pytestmark = pytest.mark.servers

MODERN = """CREATE TABLE outbox (
    id BIGSERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL, kafka_topic VARCHAR(249) NOT NULL, kafka_key BYTEA,
    kafka_value BYTEA, kafka_header_keys VARCHAR[] NOT NULL, kafka_header_values VARCHAR[] NOT NULL,
    kafka_partition INT, leader_id VARCHAR(36))"""
# One of everything that text and array syntax could trip over.
HEADERS = (("a", 'quote " back \\ brace {} comma , null NULL'), ("a", ""), ("", "ü☃"), ("x", "NULL"))
PLAIN = OutboxRecord("orders", "k1", '{"a": "\\\\x00 %s {}"}', HEADERS)


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database) as opened:
        yield opened


def stored(connection: psycopg.Connection[Any], table: str = "outbox") -> list[OutboxRecord]:
    """All rows in order of id, as records."""
    rows = psycopg.Cursor(connection).execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
    cursor = connection.cursor(row_factory=dict_row)
    records = []
    for row in cursor.execute(f"SELECT * FROM {table} ORDER BY id"):
        headers = tuple(zip(row["kafka_header_keys"], row["kafka_header_values"], strict=True))
        fields = (row["kafka_topic"], row["kafka_key"], row["kafka_value"])
        records.append(OutboxRecord(*fields, headers, row.get("kafka_partition")))
        assert row["leader_id"] is None
        assert row["create_time"] is not None
    assert len(records) == len(rows)
    return records


def test_a_record_comes_back_as_it_was(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    records = [PLAIN, OutboxRecord("t", None), OutboxRecord("t", "", "", (), 3)]
    ids = [stasher.stash(connection, record) for record in records]
    assert ids == sorted(ids)
    assert stored(connection) == records


def test_a_batch_comes_back_as_it_was(connection: psycopg.Connection[Any]) -> None:
    records = [PLAIN, OutboxRecord("t", None), OutboxRecord("t", "", "", (), 3), PLAIN]
    ids = Stasher().stash_many(connection, iter(records))
    assert ids == sorted(set(ids))
    assert len(ids) == 4
    assert stored(connection) == records
    assert Stasher().stash_many(connection, []) == []


@pytest.mark.parametrize("leader_id", ["UUID", "VARCHAR"])
def test_the_table_of_the_guide(empty_database: str, leader_id: str) -> None:
    with psycopg.connect(empty_database) as connection:
        connection.execute(seed_ddl(leader_id=leader_id))
        stasher = Stasher()
        stasher.stash(connection, PLAIN)
        stasher.stash_many(connection, [PLAIN, OutboxRecord("t", "k")])
        assert stored(connection) == [PLAIN, PLAIN, OutboxRecord("t", "k")]
        for bad in (OutboxRecord("t", None), OutboxRecord("t", "k", partition=1), OutboxRecord("t", "k" * 101)):
            with pytest.raises(RecordRejected):
                stasher.stash(connection, bad)
        assert len(stored(connection)) == 3


def test_bytes(empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        connection.execute(MODERN)
        binary, text = bytes(range(256)), OutboxRecord("t", "\x00ü", "ß\\x41", HEADERS, 7)
        stasher = Stasher()
        stasher.stash(connection, OutboxRecord("t", "k", binary))
        stasher.stash(connection, text)
        stasher.stash_many(connection, [OutboxRecord("t", "k", binary), text, OutboxRecord("t", None)])
        as_stored = OutboxRecord("t", "\x00ü".encode(), "ß\\x41".encode(), HEADERS, 7)  # type: ignore[arg-type]
        first = OutboxRecord("t", b"k", binary)  # type: ignore[arg-type]
        assert stored(connection) == [first, as_stored, first, as_stored, OutboxRecord("t", None)]
        # A batch without any value or key still has types.
        assert len(stasher.stash_many(connection, [OutboxRecord("t", None)] * 2)) == 2


def test_a_rollback_takes_the_record_with_it(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    stasher.stash(connection, PLAIN)
    stasher.stash_many(connection, [PLAIN] * 3)
    connection.rollback()
    assert stored(connection) == []
    stasher.stash(connection, PLAIN)
    connection.commit()
    assert stored(connection) == [PLAIN]


def test_a_refusal_leaves_the_transaction_intact(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    stasher.stash(connection, PLAIN)
    for bad in (OutboxRecord("no topic", "k"), OutboxRecord("t", "\x00"), OutboxRecord("t", "k", b"\xff")):
        with pytest.raises(RecordRejected):
            stasher.stash(connection, bad)
        with pytest.raises(RecordRejected, match="record 1 of the batch"):
            stasher.stash_many(connection, [PLAIN, bad])
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    connection.commit()
    assert stored(connection) == [PLAIN]


def test_a_missing_table_leaves_the_transaction_intact(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(SchemaError, match='no outbox table "elsewhere"'):
        Stasher("elsewhere").stash(connection, PLAIN)
    assert Stasher().stash(connection, PLAIN)


def test_a_cursor_keeps_its_results(connection: psycopg.Connection[Any]) -> None:
    cursor = connection.cursor(row_factory=dict_row)
    cursor.execute("SELECT generate_series(1, 3) AS n")
    assert Stasher().stash(cursor, PLAIN)
    assert len(Stasher().stash_many(cursor, [PLAIN])) == 1
    assert [row["n"] for row in cursor] == [1, 2, 3]


@pytest.mark.parametrize("cursor_factory", [psycopg.ClientCursor, psycopg.RawCursor])
def test_factories_of_the_connection_do_not_matter(database: str, cursor_factory: type[psycopg.Cursor[Any]]) -> None:
    with psycopg.connect(database, row_factory=dict_row, cursor_factory=cursor_factory) as connection:
        stasher = Stasher()
        assert stasher.stash_many(connection, [PLAIN]) == [stasher.stash(connection, PLAIN) - 1]


def test_the_wrong_kind_of_connection_is_named(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(TypeError, match="Connection or Cursor is needed, not str"):
        Stasher().stash("outbox", PLAIN)  # type: ignore[arg-type]


def test_batches_of_several_statements(connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 7)
    records = [OutboxRecord("t", f"k{n}", f"v{n}") for n in range(50)]
    ids = Stasher().stash_many(connection, records)
    assert ids == sorted(set(ids))
    assert stored(connection) == records


def test_a_batch_is_written_whole_or_not_at_all_on_autocommit(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "CHUNK_RECORDS", 2)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox ADD CHECK (kafka_key <> 'bad')")
        with pytest.raises(psycopg.errors.CheckViolation):
            Stasher().stash_many(connection, [OutboxRecord("t", key) for key in ("a", "b", "c", "bad")])
        assert stored(connection) == []
        Stasher().stash_many(connection, [OutboxRecord("t", key) for key in ("a", "b", "c")])
        assert len(stored(connection)) == 3


def test_ids_follow_the_records_while_others_write(database: str) -> None:
    stasher, together = Stasher(), threading.Barrier(4)

    def write(writer: int) -> list[tuple[int, str]]:
        pairs = []
        with psycopg.connect(database) as connection:
            together.wait(30)
            for batch in range(10):
                keys = [f"{writer}-{batch}-{n:03}" for n in range(100)]
                ids = stasher.stash_many(connection, [OutboxRecord("t", key) for key in keys])
                pairs += list(zip(ids, keys, strict=True))
                connection.commit()
        return pairs

    with ThreadPoolExecutor(4) as pool:
        written = [pair for pairs in pool.map(write, range(4)) for pair in pairs]
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT id, kafka_key FROM outbox").fetchall()
    assert sorted(written) == sorted(rows)
    assert len(rows) == 4_000


def test_prepared(connection: psycopg.Connection[Any]) -> None:
    prepared = Stasher().prepare(connection)
    records = [PLAIN, OutboxRecord("t", None), OutboxRecord("t", "k", "v", (), 2)] * 3
    ids = [prepared.stash(record) for record in records]
    assert ids == sorted(set(ids))
    assert stored(connection) == records
    statements = connection.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'INSERT%'")
    assert statements.fetchone() != (0,)
    with pytest.raises(RecordRejected):
        prepared.stash(OutboxRecord("", "k"))
    connection.rollback()
    prepared.stash(PLAIN)
    assert stored(connection) == [PLAIN]


def test_inside_a_pipeline(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    with connection.pipeline():
        connection.execute("CREATE TABLE other (n int)")
        ids = [stasher.stash(connection, PLAIN), *stasher.stash_many(connection, [PLAIN, PLAIN])]
        ids.append(stasher.prepare(connection).stash(PLAIN))
        connection.execute("INSERT INTO other VALUES (1)")
    assert ids == sorted(set(ids))
    assert stored(connection) == [PLAIN] * 4


def test_columns_are_looked_up_once_per_connection(
    connection: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stasher = Stasher()
    stasher.stash(connection, PLAIN)
    monkeypatch.setattr("harvester.outbox.lease_steps.CATALOG_SQL", "no SQL at all")
    stasher.stash(connection, PLAIN)
    with psycopg.connect(database) as other, pytest.raises(psycopg.errors.SyntaxError):
        stasher.stash(other, PLAIN)


def test_a_writer_needs_no_more_than_to_insert(connection: psycopg.Connection[Any], database: str) -> None:
    grants = ("GRANT INSERT, SELECT (id) ON outbox TO {role}", "GRANT USAGE ON SEQUENCE outbox_id_seq TO {role}")
    with poor_role(database, *grants) as dsn, psycopg.connect(dsn) as writer:
        Stasher().stash(writer, PLAIN)
        Stasher().stash_many(writer, [PLAIN, PLAIN])
        writer.commit()
    assert stored(connection) == [PLAIN] * 3


def test_a_session_in_latin1(database: str) -> None:
    with psycopg.connect(database, client_encoding="latin1") as connection:
        stasher = Stasher()
        good = OutboxRecord("t", "ü", "ß", (("ä", "ö"),))
        stasher.stash(connection, good)
        stasher.stash_many(connection, [good])
        with pytest.raises(RecordRejected, match="value cannot be encoded"):
            stasher.stash(connection, OutboxRecord("t", "k", "☃"))
        assert stored(connection) == [good, good]


@pytest.mark.parametrize("name", ['"O\'u""t % \\ {} %s box"', '"Ünder".outbox'])
def test_nasty_names(empty_database: str, name: str) -> None:
    table = OutboxTable.parse(name)
    with psycopg.connect(empty_database) as connection:
        if table.schema is not None:
            connection.execute(f"CREATE SCHEMA {OutboxTable(None, table.schema).sql}")
        connection.execute(seed_ddl(table.sql))
        stasher = Stasher(name)
        stasher.stash(connection, PLAIN)
        stasher.stash_many(connection, [PLAIN])
        assert stored(connection, table.sql) == [PLAIN, PLAIN]


def test_a_suppressed_row_is_noticed(connection: psycopg.Connection[Any]) -> None:
    connection.execute("""CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.kafka_key = 'gone' THEN RETURN NULL; END IF; RETURN NEW; END $$""")
    connection.execute("CREATE TRIGGER n BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION nothing()")
    with pytest.raises(OutboxError, match="was not inserted"):
        Stasher().stash(connection, OutboxRecord("t", "gone"))
    with pytest.raises(OutboxError, match="1 of 2 rows"):
        Stasher().stash_many(connection, [PLAIN, OutboxRecord("t", "gone")])
