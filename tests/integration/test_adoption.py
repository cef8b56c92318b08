"""Tables of others whose rows become records: what Debezium's outbox event router reads is harvested unchanged."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from harvester.errors import DatabaseUnavailable, SchemaError
from harvester.outbox import schema
from harvester.outbox.adoption import adopt
from harvester.outbox.sql.adoption import Route
from harvester.outbox.tables import OutboxTable
from tests.support.cli import run_cli
from tests.support.harvesting import Scene
from tests.support.outboxes import poor_role
from tests.support.roles import lead_astray, led_astray

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
# As in Debezium's documentation of the outbox event router.
DEBEZIUM = """CREATE TABLE outboxevent (
    id uuid NOT NULL, aggregatetype character varying(255) NOT NULL, aggregateid character varying(255) NOT NULL,
    type character varying(255) NOT NULL, payload jsonb)"""
INSERT = "INSERT INTO outboxevent VALUES (%s, %s, %s, %s, %s)"
ID = uuid.UUID("406c07f3-26f0-4eea-a50c-109940064b8f")
EVENT = (ID, "Order", "1", "OrderCreated", '{"id": 1, "lineItems": [{"id": 1, "totalPrice": 49.99}]}')
PUBLISHED = ("outbox.event.Order", "1", '{"id": 1, "lineItems": [{"id": 1, "totalPrice": 49.99}]}', ["id"], [str(ID)])


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as opened:
        opened.execute(DEBEZIUM)
        yield opened


def records(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values FROM outbox ORDER BY id"
    ).fetchall()


def test_rows_are_records_if_their_transaction_commits(connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT, EVENT)
    adopt(connection, OUTBOX, "outboxevent", Route.parse())
    assert records(connection) == []  # those that were there before
    with connection.transaction(force_rollback=True):
        connection.execute(INSERT, EVENT)
    with connection.transaction():
        connection.execute(INSERT, EVENT)
        # Debezium sees the insertion in the log, whatever becomes of the row; so does this.
        connection.execute("DELETE FROM outboxevent")
    assert records(connection) == [PUBLISHED]


def test_the_relay_publishes_them_in_order(scene: Scene) -> None:
    scene.db.execute(DEBEZIUM)
    adopt(scene.db, OUTBOX, "outboxevent", Route.parse(topic=scene.topic, headers=["id={id}", "eventType={type}"]))
    rows = [(uuid.uuid4(), "Order", str(n % 3), f"E{n}", f'{{"n": {n}}}') for n in range(30)]
    with scene.db.cursor() as cursor:
        cursor.executemany(INSERT, rows[:10])
        with cursor.copy("COPY outboxevent FROM STDIN") as copy:
            for row in rows[10:20]:
                copy.write_row(row)
        values = ", ".join(["(%s, %s, %s, %s, %s::jsonb)"] * 10)
        cursor.execute(f"INSERT INTO outboxevent VALUES {values}", [field for row in rows[20:] for field in row])
    with scene.embedded():
        scene.wait_left()
    published = scene.published()
    assert published == {str(k): [row[4] for row in rows if row[2] == str(k)] for k in range(3)}
    (first,) = [record for record in scene.log() if record.value == rows[0][4].encode()]
    assert [header for header in first.headers if header[0] in ("id", "eventType")] == [
        ("id", str(rows[0][0]).encode()),
        ("eventType", b"E0"),
    ]


def test_what_is_null_is_left_out(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE events (topic text, k text, v text, a text, b text)")
    route = Route.parse(topic="{topic}", key="{k}", value="{v}", headers=["a={a}", "both={a}-{b}", "b={b}"])
    adopt(connection, OUTBOX, "events", route)
    connection.execute("INSERT INTO events VALUES ('t', NULL, NULL, 'x', NULL), ('t', '', '', NULL, NULL)")
    assert records(connection) == [("t", None, None, ["a"], ["x"]), ("t", "", "", [], [])]
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("INSERT INTO events (k) VALUES ('k')")
    adopt(connection, OUTBOX, "events", Route.parse(topic="{topic}", key="", value="{v}", headers=[]))
    connection.execute("INSERT INTO events VALUES ('t', 'k', 'v')")
    assert records(connection)[-1] == ("t", None, "v", [], [])


@pytest.mark.parametrize("value_type", ["text", "bytea"])
def test_text_and_bytes_become_what_the_outbox_has(empty_database: str, value_type: Any) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        schema.init(connection, OUTBOX, value_type=value_type)
        connection.execute("CREATE TABLE events (raw bytea, words text)")
        text = "ß\\x41 {}"
        for template in ("{raw}", "{words}", "<{raw}>"):
            adopt(connection, OUTBOX, "events", Route.parse(topic="t", key="{raw}", value=template, headers=[]))
            connection.execute("INSERT INTO events VALUES (%s, %s)", [text.encode(), text])
        expected: list[Any] = [text, text, f"<{text}>"]
        if value_type == "bytea":
            adopt(connection, OUTBOX, "events", Route.parse(topic="t", key="", value="{raw}", headers=[]))
            connection.execute("INSERT INTO events VALUES ('\\xff00')")
            expected = [*(value.encode() for value in expected), b"\xff\x00"]
        found = records(connection)
    assert [row[2] for row in found] == expected
    assert {row[1] for row in found} <= {text, None}


def test_names_and_texts_full_of_quotes(connection: psycopg.Connection[Any]) -> None:
    odd, text = """x"y'z\\%$function$ """, """'"\\%s$1$function$"""
    table = OutboxTable("public", odd)
    quoted = OutboxTable(None, odd).sql
    psycopg.RawCursor(connection).execute(f"CREATE TABLE {table.sql} ({quoted} text)".encode())
    route = Route.parse(topic="t", key=text, value=f"{{{odd}}}", headers=[f"{text}={text}"])
    adopt(connection, OUTBOX, table.sql, route)
    psycopg.RawCursor(connection).execute(f"INSERT INTO {table.sql} VALUES ($1)".encode(), ["v"])
    assert records(connection) == [("t", text, "v", [text], [text])]


def test_partitions_have_it_too(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE events (id int, payload text) PARTITION BY RANGE (id)")
    connection.execute("CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (1) TO (10)")
    adopt(connection, OUTBOX, "events", Route.parse(topic="t", key="{id}", value="{payload}", headers=[]))
    connection.execute("CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM (10) TO (20)")
    connection.execute("INSERT INTO events VALUES (1, 'a'), (11, 'b')")
    assert [row[1:3] for row in records(connection)] == [("1", "a"), ("11", "b")]


def test_it_is_routed_anew_and_abandoned(connection: psycopg.Connection[Any]) -> None:
    adopt(connection, OUTBOX, "outboxevent", Route.parse())
    adopt(connection, OUTBOX, "public.outboxevent", Route.parse(topic="orders"))
    connection.execute(INSERT, EVENT)
    assert [row[0] for row in records(connection)] == ["orders"]
    adopt(connection, OUTBOX, "outboxevent", None)
    adopt(connection, OUTBOX, "outboxevent", None)
    connection.execute(INSERT, EVENT)
    assert len(records(connection)) == 1
    left = connection.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'outbox%'").fetchone()
    assert left == (0,)


def test_what_cannot_be_adopted(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE VIEW seen AS SELECT * FROM outboxevent")
    for name, match in (
        ("nowhere", "no table nowhere"),
        ("seen", "not a table"),
        ("outbox", "the outbox itself"),
        ("a b c", "a b c"),
    ):
        with pytest.raises(SchemaError, match=match):
            adopt(connection, OUTBOX, name, Route.parse())
    with pytest.raises(SchemaError, match="no column payloud"):
        adopt(connection, OUTBOX, "outboxevent", Route.parse(value="{payloud}"))


def test_its_writers_need_nothing_else_and_can_do_nothing_else(
    connection: psycopg.Connection[Any], database: str
) -> None:
    adopt(connection, OUTBOX, "outboxevent", Route.parse())
    row = connection.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'outbox_from%'").fetchone()
    assert row is not None
    with poor_role(database, "GRANT INSERT ON outboxevent TO {role}") as dsn, psycopg.connect(dsn) as writer:
        lead_astray(connection, writer)
        writer.execute(INSERT, EVENT)
        writer.commit()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            writer.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
        writer.rollback()
        writer.execute("CREATE TEMP TABLE mine (id uuid, aggregatetype text, aggregateid text, payload text)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            writer.execute(f"CREATE TRIGGER t AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION {row[0]}()".encode())
    assert records(connection) == [PUBLISHED]
    assert led_astray(connection) == 0


def test_it_does_not_wait_for_a_writer_for_long(
    connection: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    with psycopg.connect(database) as writer:
        writer.execute(INSERT, EVENT)
        with pytest.raises(DatabaseUnavailable):
            adopt(connection, OUTBOX, "outboxevent", Route.parse())
    adopt(connection, OUTBOX, "outboxevent", Route.parse())


def test_the_command(connection: psycopg.Connection[Any], database: str) -> None:
    where = ("--set", f"data_source={database}")
    printed = run_cli("adopt", "outboxevent", "--print", *where).stdout
    connection.execute(INSERT, EVENT)
    assert records(connection) == []
    assert printed.startswith("BEGIN;\n"), "or a row could come between the old trigger and the new one"
    for statement in printed.split(";\n\n"):  # as psql does
        psycopg.RawCursor(connection).execute(statement.encode())
        if "CREATE TRIGGER" in statement:
            assert connection.info.transaction_status is TransactionStatus.INTRANS
    assert connection.info.transaction_status is TransactionStatus.IDLE
    connection.execute(INSERT, EVENT)
    assert records(connection) == [PUBLISHED]
    said = run_cli("adopt", "outboxevent", "--topic", "orders", "--key", "", "--no-headers", *where).stdout
    assert said == 'new rows of outboxevent are records of "outbox": topic orders, key None, value {payload}\n'
    connection.execute(INSERT, EVENT)
    assert records(connection)[-1] == ("orders", None, EVENT[4], [], [])
    run_cli("adopt", "outboxevent", "--remove", *where)
    connection.execute(INSERT, EVENT)
    assert len(records(connection)) == 2
    bad = run_cli("adopt", "outboxevent", "--value", "{", *where, check=False)
    assert bad.returncode == 78
    assert "stray brace" in bad.stderr
    helped = run_cli("adopt", "--help").stdout
    assert all(f"{{{name}}}" in helped for name in Route.parse().columns)


@pytest.mark.usefixtures("connection")
def test_who_may_not_is_told_so(database: str) -> None:
    with (
        poor_role(database) as dsn,
        psycopg.connect(dsn, autocommit=True) as poor,
        pytest.raises(SchemaError, match="permission denied"),
    ):
        adopt(poor, OUTBOX, "outboxevent", Route.parse())
