"""`init` and `inspect` on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from harvester.errors import DatabaseUnavailable, SchemaError
from harvester.outbox import ddl, schema
from harvester.outbox.schema import init, inspect, refresh_incarnation
from harvester.outbox.tables import OutboxTable
from tests.support.outboxes import poor_role, seed_ddl, seed_insert

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
NASTY = (
    '"Outbox"',
    '"out box"',
    '"o""u\'t\\b;x"',
    '"100% $1 %s {0}"',
    '"исходящие_größe_☃"',
    '"Select".outbox',
    '"a ""nasty"" schema\'s"."O\'""x"',
    "app.outbox",
)


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


def term_row(connection: psycopg.Connection[Any], table: OutboxTable = OUTBOX) -> dict[str, Any]:
    row = connection.cursor(row_factory=dict_row).execute(f"SELECT * FROM {table.term}").fetchone()
    assert row is not None
    return row


def insert(connection: psycopg.Connection[Any], table: str = "outbox", rows: int = 1) -> None:
    for _ in range(rows):
        connection.execute(seed_insert(table), ("t", "k", "v", "{}", "{}"))


def tables(connection: psycopg.Connection[Any]) -> set[str]:
    return {
        row[0] for row in connection.execute("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace")
    }


def add_lanes(table: OutboxTable) -> list[str]:
    return [f"ALTER TABLE {table.term} ADD COLUMN IF NOT EXISTS lanes INTEGER"]


def fill_lanes(table: OutboxTable) -> list[str]:
    return [f"UPDATE {table.term} SET lanes = 8"]


def broken_migration(table: OutboxTable) -> list[str]:
    return [f"ALTER TABLE {table.term} DROP COLUMN unknown"]


def test_makes_everything_once(connection: psycopg.Connection[Any]) -> None:
    done = init(connection, OUTBOX, notify=True)
    assert [line.split('"')[0] for line in done] == ["created table "] * 3 + ["created the notify trigger on "]
    assert init(connection, OUTBOX, notify=True) == init(connection, OUTBOX) == []
    shape = inspect(connection, OUTBOX)
    assert (shape.id_type, shape.key_type, shape.value_type, shape.leader_id_type) == ("bigint", "text", "text", "uuid")
    assert (shape.key_nullable, shape.has_partition, shape.has_notify) == (True, True, True)
    assert shape.sequence == "public.outbox_id_seq"
    row = term_row(connection)
    assert (row["term"], row["holder"], row["sessions"], row["delivery"]) == (0, None, [], "at-least-once")
    assert (row["schema_version"], row["outbox_oid"]) == (1, shape.oid)


def test_a_new_table_takes_the_statement_of_the_guide_and_shorter_ones(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    insert(connection)
    connection.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
    rows = connection.execute("SELECT kafka_value, kafka_header_keys, leader_id FROM outbox ORDER BY id").fetchall()
    assert rows == [("v", [], None), (None, [], None)]


@pytest.mark.parametrize("leader_id", ["UUID", "VARCHAR(36)"])
def test_a_table_of_the_guide_stays_as_it_is(connection: psycopg.Connection[Any], leader_id: str) -> None:
    columns = "SELECT attname, atttypid, atttypmod, attnotnull FROM pg_attribute WHERE attrelid = 'outbox'::regclass"
    connection.execute(seed_ddl(leader_id=leader_id))
    insert(connection)
    before = connection.execute(columns).fetchall()
    done = init(connection, OUTBOX)
    insert(connection)
    assert len(done) == 2
    assert connection.execute(columns).fetchall() == before
    assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (2,)
    shape = inspect(connection, OUTBOX)
    assert shape.leader_id_type == ("uuid" if leader_id == "UUID" else "text")
    assert (shape.key_nullable, shape.has_partition, shape.columns.value_max) == (False, False, 10_000)


@pytest.mark.parametrize("name", NASTY)
def test_any_name_works_and_none_injects(connection: psycopg.Connection[Any], name: str) -> None:
    table = OutboxTable.parse(name)
    if table.schema is not None:
        with pytest.raises(SchemaError, match="there is no schema"):
            init(connection, table)
        connection.execute(f"CREATE SCHEMA {OutboxTable(None, table.schema).sql}")
    assert len(init(connection, table, notify=True)) == 4
    assert inspect(connection, table).has_notify
    insert(connection, table.sql.replace("%", "%%"))
    assert not refresh_incarnation(connection, table)
    assert term_row(connection, table)["last_value"] == 1
    assert init(connection, table, notify=False) == [f"removed the notify trigger on {_placed(table)}"]


@pytest.mark.parametrize("name", NASTY)
def test_the_printed_script_makes_the_same_and_may_run_twice(connection: psycopg.Connection[Any], name: str) -> None:
    table = OutboxTable.parse(name)
    if table.schema is not None:
        connection.execute(f"CREATE SCHEMA {OutboxTable(None, table.schema).sql}")
    for _ in range(2):
        connection.execute(schema.sql(table, None, True))
    assert inspect(connection, table).has_notify
    assert init(connection, table, notify=True) == []


def test_the_script_for_an_existing_outbox_follows_its_types(connection: psycopg.Connection[Any]) -> None:
    connection.execute(seed_ddl(value="BYTEA"))
    connection.execute(schema.sql(OUTBOX, schema.find_shape(connection, OUTBOX)))
    assert inspect(connection, OUTBOX).value_type == "bytea"
    assert init(connection, OUTBOX) == []


def test_two_at_once_are_safe(empty_database: str) -> None:
    together = threading.Barrier(4)

    def run(isolation: psycopg.IsolationLevel) -> list[str]:
        with psycopg.connect(empty_database) as connection:
            connection.isolation_level = isolation
            together.wait(30)
            return init(connection, OUTBOX, notify=True)

    levels = [psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.SERIALIZABLE] * 2
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, levels))
    assert sorted(map(len, results)) == [0, 0, 0, 4]


def test_a_failure_leaves_nothing_behind(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE outbox_quarantine (something int)")
    with pytest.raises(SchemaError, match='"outbox_quarantine" lacks id, incarnation'):
        init(connection, OUTBOX, notify=True)
    assert tables(connection) == {"outbox_quarantine"}


def test_it_joins_the_transaction_of_its_caller(empty_database: str) -> None:
    with psycopg.connect(empty_database, row_factory=dict_row) as connection:
        connection.execute("SET lock_timeout = '7s'")
        assert len(init(connection, OUTBOX)) == 3
        assert connection.execute("SHOW lock_timeout").fetchone() == {"lock_timeout": "7s"}
        inspect(connection, OUTBOX)
        connection.rollback()
        assert tables(connection) == set()


def test_the_companions_stand_beside_the_outbox_that_the_search_path_finds(
    connection: psycopg.Connection[Any],
) -> None:
    connection.execute("CREATE SCHEMA app")
    connection.execute(seed_ddl("app.outbox"))
    connection.execute("SET search_path = public, app")
    init(connection, OUTBOX)
    assert inspect(connection, OUTBOX).schema == "app"
    assert tables(connection) == set()
    init(connection, OutboxTable.parse("public.outbox"))
    # Now public.outbox comes first; both are whole, each with its own companions.
    assert inspect(connection, OUTBOX).schema == "public"
    connection.execute("DROP TABLE public.outbox_term")
    with pytest.raises(SchemaError, match="in schema 'app', not beside the outbox"):
        inspect(connection, OUTBOX)


def test_a_newer_schema_is_refused_untouched(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    connection.execute("UPDATE outbox_term SET schema_version = 99")
    connection.execute("DROP TABLE outbox_quarantine")
    with pytest.raises(SchemaError, match="has version 99, this harvester knows 1"):
        init(connection, OUTBOX)
    assert "outbox_quarantine" not in tables(connection)
    connection.execute("UPDATE outbox_term SET schema_version = 1")
    init(connection, OUTBOX)
    connection.execute("UPDATE outbox_term SET schema_version = 99")
    with pytest.raises(SchemaError, match="has version 99, this harvester knows 1") as refused:
        inspect(connection, OUTBOX)
    assert "newer harvester" in (refused.value.hint or "")


def test_migrations_run_once_in_order_and_as_a_whole(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    init(connection, OUTBOX)
    monkeypatch.setattr(ddl, "MIGRATIONS", (add_lanes, fill_lanes, broken_migration))
    with pytest.raises(SchemaError, match="has version 1, this harvester needs 4"):
        inspect(connection, OUTBOX)
    with pytest.raises(SchemaError, match='column "unknown"'):
        init(connection, OUTBOX)
    assert "lanes" not in term_row(connection)

    monkeypatch.setattr(ddl, "MIGRATIONS", (add_lanes, fill_lanes))
    assert init(connection, OUTBOX) == ["migrated the schema from version 1 to 3"]
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (8, 3)
    assert init(connection, OUTBOX) == []
    inspect(connection, OUTBOX)


def test_a_new_schema_has_all_migrations(connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddl, "MIGRATIONS", (add_lanes,))
    assert len(init(connection, OUTBOX)) == 3
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (None, 2)
    connection.execute("DROP TABLE outbox, outbox_term, outbox_quarantine")
    connection.execute(schema.sql(OUTBOX))
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (None, 2)


def test_a_lost_term_row_comes_back(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    connection.execute("DELETE FROM outbox_term")
    with pytest.raises(SchemaError, match="is empty"):
        inspect(connection, OUTBOX)
    assert init(connection, OUTBOX) == ['put the missing row back into "public"."outbox_term"']
    inspect(connection, OUTBOX)


def test_there_is_never_a_second_term_row(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    for singleton in ("true", "false", "NULL"):
        with pytest.raises(psycopg.IntegrityError):
            connection.execute(f"INSERT INTO outbox_term (singleton, schema_version) VALUES ({singleton}, 1)")


@pytest.mark.parametrize("missing", ["outbox", "outbox_term", "outbox_quarantine"])
def test_inspect_names_what_is_missing(connection: psycopg.Connection[Any], missing: str) -> None:
    init(connection, OUTBOX)
    connection.execute(f"DROP TABLE {missing}")
    with pytest.raises(SchemaError, match=f'"{missing}"') as refused:
        inspect(connection, OUTBOX)
    assert refused.value.hint == "run `harvester init`"


def test_the_quarantine_follows_a_value_that_became_bytes_and_back(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    connection.execute(
        "INSERT INTO outbox_quarantine (id, incarnation, kafka_value, error, attempts)"
        " VALUES (1, gen_random_uuid(), 'grün', 'e', 1)"
    )
    for kind, using, stored in (("bytea", "convert_to", "grün".encode()), ("text", "convert_from", "grün")):
        connection.execute(
            f"ALTER TABLE outbox ALTER COLUMN kafka_value TYPE {kind} USING {using}(kafka_value, 'UTF8')"
        )
        with pytest.raises(SchemaError, match="has kafka_value as"):
            inspect(connection, OUTBOX)
        assert len(init(connection, OUTBOX)) == 1
        assert inspect(connection, OUTBOX).value_type == kind
        assert connection.execute("SELECT kafka_value FROM outbox_quarantine").fetchone() == (stored,)


def test_the_incarnation_is_renewed_when_ids_start_again(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    first = term_row(connection)
    seen: list[UUID] = [first["incarnation"]]

    def renewed() -> bool:
        answer = refresh_incarnation(connection, OUTBOX)
        now = term_row(connection)["incarnation"]
        assert (now != seen[-1]) == answer
        seen.append(now)
        return answer

    insert(connection, rows=5)
    assert not renewed()
    insert(connection)
    assert not renewed()
    connection.execute("TRUNCATE outbox")
    assert not renewed()
    connection.execute("TRUNCATE outbox RESTART IDENTITY")
    assert renewed()
    assert not renewed()
    insert(connection, rows=3)
    assert not renewed()
    connection.execute("ALTER SEQUENCE outbox_id_seq RESTART WITH 1000")
    assert not renewed()
    connection.execute("ALTER SEQUENCE outbox_id_seq RESTART WITH 7")
    assert renewed()
    connection.execute("DROP TABLE outbox")
    assert init(connection, OUTBOX) == [
        'created table "outbox"',
        "renewed the incarnation: ids of this outbox may start again",
    ]
    assert init(connection, OUTBOX) == []
    last = term_row(connection)
    assert last["incarnation"] not in seen
    assert last["outbox_id"] == first["outbox_id"]


def test_the_trigger_wakes_once_per_transaction(connection: psycopg.Connection[Any], empty_database: str) -> None:
    init(connection, OUTBOX, notify=True)
    connection.execute(f"LISTEN {OUTBOX.channel}")
    with psycopg.connect(empty_database) as writer:
        insert(writer, rows=3)
        writer.commit()
        insert(writer)
        writer.rollback()
    # A notification of our own comes after all that were committed before it.
    connection.execute("LISTEN done")
    connection.execute("NOTIFY done")
    received = []
    for notification in connection.notifies(timeout=30):
        if notification.channel == "done":
            break
        received.append((notification.channel, notification.payload))
    assert received == [(OUTBOX.channel, "")]


def test_a_disabled_or_foreign_trigger_does_not_count(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX, notify=True)
    qualified = OutboxTable.parse("public.outbox")
    assert not inspect(connection, qualified).has_notify  # it would listen on another channel
    connection.execute("ALTER TABLE outbox DISABLE TRIGGER ALL")
    assert not inspect(connection, OUTBOX).has_notify
    assert init(connection, OUTBOX, notify=True) == ['created the notify trigger on "public"."outbox"']
    assert inspect(connection, OUTBOX).has_notify


def test_it_does_not_queue_behind_a_long_transaction(
    connection: psycopg.Connection[Any], empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(connection, OUTBOX)
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    with psycopg.connect(empty_database) as writer:
        insert(writer)
        assert init(connection, OUTBOX) == []
        with pytest.raises(DatabaseUnavailable, match="holds the table for too long"):
            init(connection, OUTBOX, notify=True)
    assert init(connection, OUTBOX, notify=True)


def test_missing_privileges_are_listed_as_grants(connection: psycopg.Connection[Any], empty_database: str) -> None:
    init(connection, OUTBOX)
    with (
        poor_role(empty_database, "GRANT SELECT, DELETE ON outbox TO {role}") as dsn,
        psycopg.connect(dsn, autocommit=True) as relay,
    ):
        with pytest.raises(SchemaError, match="may not do all that the relay") as refused:
            inspect(relay, OUTBOX)
        assert refused.value.hint is not None
        for grant in refused.value.hint.removeprefix("let the owner run: ").split("; "):
            connection.execute(grant)
        assert inspect(relay, OUTBOX) == inspect(connection, OUTBOX)
        assert not refresh_incarnation(relay, OUTBOX)


def test_one_who_may_not_create_is_told(connection: psycopg.Connection[Any], empty_database: str) -> None:
    connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with (
        poor_role(empty_database) as dsn,
        psycopg.connect(dsn) as nobody,
        pytest.raises(SchemaError, match="permission denied for schema public"),
    ):
        init(nobody, OUTBOX)


def test_a_lost_session_is_unavailable(connection: psycopg.Connection[Any], empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as victim:
        connection.execute("SELECT pg_terminate_backend(%s)", (victim.info.backend_pid,))
        with pytest.raises(DatabaseUnavailable, match="could not inspect"):
            inspect(victim, OUTBOX)


def _placed(table: OutboxTable) -> str:
    return OutboxTable(table.schema or "public", table.name).sql
