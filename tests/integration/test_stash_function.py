"""The function `outbox_stash`: what it writes, what it refuses, and what a role needs to call it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harvester.errors import RecordRejected
from harvester.outbox import schema
from harvester.outbox.grants import Place, script
from harvester.outbox.tables import OutboxTable
from harvester.outbox.validation import check
from harvester.record import OutboxRecord
from tests.support.outboxes import poor_role, seed_ddl
from tests.support.roles import lead_astray, led_astray

pytestmark = pytest.mark.servers

TABLE = OutboxTable.parse("outbox")
COLUMNS = "kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_partition"
CALL = "SELECT outbox_stash(%s, %s, %s, %s::text[], %s::text[], %s)"
GOOD = ("orders", "k", '{"a": "\\x41"}', ["a", "a"], ['q"{}', ""], 3)
REFUSED = {
    "no topic": (None, "k", "v", [], [], None),
    "empty topic": ("", "k", "v", [], [], None),
    "topic of two lines": ("a\nb", "k", "v", [], [], None),
    "topic and a line feed": ("a\n", "k", "v", [], [], None),
    "topic beyond ASCII": ("é", "k", "v", [], [], None),
    "topic of one dot": (".", "k", "v", [], [], None),
    "topic of two dots": ("..", "k", "v", [], [], None),
    "long topic": ("t" * 250, "k", "v", [], [], None),
    "names without values": ("t", "k", "v", ["a"], [], None),
    "values without names": ("t", "k", "v", [], ["a"], None),
    "a name that is NULL": ("t", "k", "v", [None], ["a"], None),
    "a value that is NULL": ("t", "k", "v", ["a"], [None], None),
    "no list": ("t", "k", "v", None, [], None),
    "lists of lists": ("t", "k", "v", [["a"], ["b"]], [["a"], ["b"]], None),
    "partition below 0": ("t", "k", "v", [], [], -1),
}


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as opened:
        assert schema.init(opened, TABLE, functions=True) == ['created the function "public"."outbox_stash"']
        yield opened


def rows(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT {COLUMNS} FROM outbox ORDER BY id").fetchall()


def test_it_writes_a_record_in_the_caller_s_transaction(connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        connection.execute(CALL, GOOD)
        answer = connection.execute("SELECT outbox_stash(topic => 't', key => NULL, value => NULL)").fetchone()
    assert connection.execute("SELECT max(id) FROM outbox").fetchone() == answer
    assert rows(connection) == [GOOD, ("t", None, None, [], [], None)]
    with connection.transaction(force_rollback=True):
        connection.execute(CALL, GOOD)
    assert len(rows(connection)) == 2


@pytest.mark.parametrize("why", list(REFUSED))
def test_it_refuses_what_the_stasher_refuses(connection: psycopg.Connection[Any], why: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="record refused"):
        connection.execute(CALL, REFUSED[why])
    assert rows(connection) == []


@pytest.mark.parametrize("character", ["a", "Z", "0", ".", "_", "-", "/", ":", "@", "[", "`", "{", " ", "ß", "ı", "K"])
def test_topics_are_judged_alike(connection: psycopg.Connection[Any], character: str) -> None:
    topic = f"a{character}b"
    columns = schema.inspect(connection, TABLE).columns
    try:
        check(OutboxRecord(topic, "k"), columns)
    except RecordRejected:
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            connection.execute(CALL, (topic, "k", None, [], [], None))
    else:
        connection.execute(CALL, (topic, "k", None, [], [], None))


def test_its_types_follow_the_table(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(seed_ddl())
        schema.init(connection, TABLE, functions=True)
        assert schema.init(connection, TABLE, functions=True) == []
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="no column kafka_partition"):
            connection.execute(CALL, GOOD)
        connection.execute("ALTER TABLE outbox ALTER kafka_value TYPE BYTEA USING convert_to(kafka_value, 'UTF8')")
        connection.execute("ALTER TABLE outbox ADD kafka_partition INT")
        assert 'replaced the function "public"."outbox_stash"' in schema.init(connection, TABLE, functions=True)
        # A second one with the types of before would make calls ambiguous.
        assert connection.execute("SELECT count(*) FROM pg_proc WHERE proname = 'outbox_stash'").fetchone() == (1,)
        connection.execute("SELECT outbox_stash('t', 'k', %b)", [b"\xff\x00"])
        assert rows(connection) == [("t", "k", b"\xff\x00", [], [], None)]
        assert schema.init(connection, TABLE) == []
        assert schema.init(connection, TABLE, functions=False) == ['removed the function "public"."outbox_stash"']
        assert connection.execute("SELECT count(*) FROM pg_proc WHERE proname = 'outbox_stash'").fetchone() == (0,)


def test_the_printed_script_makes_it(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        for _ in range(2):
            connection.execute(schema.sql(TABLE, functions=True).encode())
        connection.execute(CALL, GOOD)
        assert rows(connection) == [GOOD]
        assert schema.init(connection, TABLE, functions=True) == []


def test_a_caller_needs_nothing_else(connection: psycopg.Connection[Any], database: str) -> None:
    with poor_role(database) as dsn, psycopg.connect(dsn, autocommit=True) as poor:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="function outbox_stash"):
            poor.execute(CALL, GOOD)
        name = str(conninfo_to_dict(dsn)["user"])
        place = Place.of(TABLE, schema.read_facts(connection, TABLE))
        for _ in range(2):
            connection.execute(script(place, callers=[name]).encode())
        poor.execute(CALL, GOOD)
        for statement in ("SELECT id FROM outbox", "INSERT INTO outbox (kafka_topic) VALUES ('t')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                poor.execute(statement.encode())
        # Its tables of the same name lead it nowhere.
        poor.execute("CREATE TEMP TABLE outbox (kafka_topic text)")
        poor.execute("SELECT public.outbox_stash('t', NULL, NULL)")
        poor.execute("DROP TABLE pg_temp.outbox")
        lead_astray(connection, poor)
        poor.execute(CALL, GOOD)
        assert len(rows(connection)) == 3
        assert led_astray(connection) == 0
        connection.execute(script(place, writers=[name]).encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="function outbox_stash"):
            poor.execute(CALL, GOOD)
