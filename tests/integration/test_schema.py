"""`init` and `inspect` on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from harvester.errors import DatabaseUnavailable, SchemaError
from harvester.outbox import schema
from harvester.outbox.schema import init, inspect, refresh_incarnation
from harvester.outbox.sql import ddl
from harvester.outbox.tables import OutboxTable
from tests.support.outboxes import insert, poor_role, seed_ddl, tables, term_row

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


def test_makes_everything_once(connection: psycopg.Connection[Any]) -> None:
    done = init(connection, OUTBOX, notify=True)
    assert [line.split('"')[0] for line in done] == ["created table "] * 4 + ["created the notify trigger on "]
    assert init(connection, OUTBOX, notify=True) == init(connection, OUTBOX) == []
    shape = inspect(connection, OUTBOX)
    assert (shape.id_type, shape.key_type, shape.value_type, shape.leader_id_type) == ("bigint", "text", "text", "uuid")
    assert (shape.key_nullable, shape.has_partition, shape.has_notify) == (True, True, True)
    assert shape.sequence == "public.outbox_id_seq"
    row = term_row(connection)
    assert (row["term"], row["holder"], row["sessions"], row["delivery"]) == (0, None, [], "at-least-once")
    assert (row["schema_version"], row["outbox_oid"]) == (ddl.schema_version(), shape.oid)


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
    assert len(done) == 3
    assert connection.execute(columns).fetchall() == before
    assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (2,)
    shape = inspect(connection, OUTBOX)
    assert shape.leader_id_type == ("uuid" if leader_id == "UUID" else "text")
    assert (shape.key_nullable, shape.has_partition, shape.value_max) == (False, False, 10_000)


@pytest.mark.parametrize("name", NASTY)
def test_any_name_works_and_none_injects(connection: psycopg.Connection[Any], name: str) -> None:
    table = OutboxTable.parse(name)
    if table.schema is not None:
        with pytest.raises(SchemaError, match="there is no schema"):
            init(connection, table)
        connection.execute(f"CREATE SCHEMA {OutboxTable(None, table.schema).sql}")
    assert len(init(connection, table, notify=True)) == 5
    assert inspect(connection, table).has_notify
    insert(connection, table.sql.replace("%", "%%"))
    assert not refresh_incarnation(connection, table)
    assert term_row(connection, table.term)["last_value"] == 1
    assert init(connection, table, notify=False)[0].startswith(f"removed the notify trigger on {_placed(table)};")


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
    assert sorted(map(len, results)) == [0, 0, 0, 5]


def test_a_failure_leaves_nothing_behind(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE outbox_quarantine (something int)")
    with pytest.raises(SchemaError, match='"outbox_quarantine" lacks id, incarnation'):
        init(connection, OUTBOX, notify=True)
    assert tables(connection) == {"outbox_quarantine"}


def test_it_joins_the_transaction_of_its_caller(empty_database: str) -> None:
    with psycopg.connect(empty_database, row_factory=dict_row) as connection:
        connection.execute("SET lock_timeout = '7s'")
        assert len(init(connection, OUTBOX)) == 4
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
    with pytest.raises(SchemaError, match="in schema 'app', not in the outbox's"):
        inspect(connection, OUTBOX)


def test_a_lost_term_row_comes_back(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    connection.execute("DELETE FROM outbox_term")
    with pytest.raises(SchemaError, match="is empty"):
        inspect(connection, OUTBOX)
    assert init(connection, OUTBOX) == [
        'put the missing row back into "public"."outbox_term"',
        # A row that is new has seen no migration, and they may run again.
        f"migrated the schema from version 1 to {ddl.schema_version()}",
    ]
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
    assert (refused.value.hint or "").startswith("run `harvester init`")


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


def test_missing_privileges_are_listed_as_grants(connection: psycopg.Connection[Any], empty_database: str) -> None:
    init(connection, OUTBOX)
    with (
        poor_role(empty_database, "GRANT SELECT, DELETE ON outbox TO {role}") as dsn,
        psycopg.connect(dsn, autocommit=True) as relay,
    ):
        with pytest.raises(SchemaError, match="lacks privileges that the relay") as refused:
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
