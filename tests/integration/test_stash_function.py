"""The functions for writers in any language: the rows they write, what they refuse, and the privileges of a caller."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harvester import Stasher
from harvester.errors import RecordRejected
from harvester.outbox import schema
from harvester.outbox.leases import HighWaterMark, RunVerdict, judge
from harvester.outbox.sql.grants import GrantTarget, script
from harvester.outbox.sql.stash_function import LEASE_STATES
from harvester.outbox.tables import OutboxTable
from harvester.outbox.validation import check
from harvester.record import OutboxRecord
from tests.support.leasing import lease_row, wait_blocked
from tests.support.outboxes import poor_role, seed_ddl
from tests.support.roles import lead_astray, led_astray

pytestmark = pytest.mark.servers

TABLE = OutboxTable.parse("outbox")
NAMES = ['"public"."outbox_stash"', '"public"."outbox_take_lease"', '"public"."outbox_stash_leased"']
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
        assert schema.init(opened, TABLE, functions=True) == [f"created the function {name}" for name in NAMES]
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
    columns = schema.inspect(connection, TABLE)
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
        done = schema.init(connection, TABLE, functions=True)
        assert [line for line in done if "function" in line] == [
            f"replaced the function {NAMES[0]}",
            f"replaced the function {NAMES[2]}",
        ]
        # A second one with the types of before would make calls ambiguous.
        assert connection.execute("SELECT count(*) FROM pg_proc WHERE proname = 'outbox_stash'").fetchone() == (1,)
        connection.execute("SELECT outbox_stash('t', 'k', %b)", [b"\xff\x00"])
        assert rows(connection) == [("t", "k", b"\xff\x00", [], [], None)]
        assert schema.init(connection, TABLE) == []
        removed = schema.init(connection, TABLE, functions=False)
        assert sorted(removed) == sorted(f"removed the function {name}" for name in NAMES)
        assert connection.execute("SELECT count(*) FROM pg_proc WHERE proname ~ '^outbox_'").fetchone() == (0,)


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
        place = GrantTarget.of(TABLE, schema.read_facts(connection, TABLE))
        for _ in range(2):
            connection.execute(script(place, callers=[name]).encode())
        poor.execute(CALL, GOOD)
        for statement in ("SELECT id FROM outbox", "INSERT INTO outbox (kafka_topic) VALUES ('t')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                poor.execute(statement.encode())
        lease, *_ = take(poor)
        assert put(poor, lease, 1, 1) is not None
        connection.execute("DELETE FROM outbox WHERE kafka_value = '1'")
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


def take(connection: psycopg.Connection[Any], name: str = "reader") -> tuple[int, int, int, str | None]:
    row = connection.execute("SELECT lease, generation, sequence, at FROM outbox_take_lease(%s)", (name,)).fetchone()
    assert row is not None
    return (row[0], row[1], row[2], row[3])


def put(
    connection: psycopg.Connection[Any], lease: int, generation: int, number: int, at: str | None = None
) -> int | None:
    row = connection.execute(
        "SELECT outbox_stash_leased(%s, %s, %s, 'orders', 'k', %s, at => %s)",
        (lease, generation, number, str(number), at),
    ).fetchone()
    assert row is not None
    found: int | None = row[0]
    return found


def test_use_renews_a_lease(connection: psycopg.Connection[Any], database: str) -> None:
    lease, *_ = take(connection)
    connection.execute(
        "UPDATE outbox_lease SET leased_at = now() - interval '6 d', expires_at = now() + interval '1 d'"
    )
    assert put(connection, lease, 1, 1) is not None
    row = lease_row(database, "reader")
    assert row is not None
    assert row["expires_at"] - datetime.now(UTC) > timedelta(days=6)


def test_a_writer_that_begins_anew_writes_each_record_once(connection: psycopg.Connection[Any], database: str) -> None:
    lease, generation, sequence, at = take(connection)
    assert (generation, sequence, at) == (1, 0, None)
    assert lease_row(database, "reader") is not None
    first, second = put(connection, lease, 1, 1, "offset 1"), put(connection, lease, 1, 2, "offset 2")
    assert put(connection, lease, 1, 2, "offset 2") is None, "a repeat"
    again = take(connection)
    assert again == (lease, 2, 2, "offset 2")
    with pytest.raises(psycopg.errors.Error, match="another writer took the lease") as fenced:
        put(connection, lease, 1, 3)
    assert fenced.value.sqlstate == LEASE_STATES["fenced"]
    third = put(connection, lease, 2, 3)
    assert connection.execute("SELECT array_agg(id ORDER BY id) FROM outbox").fetchone() == ([first, second, third],)
    with connection.transaction(force_rollback=True):
        put(connection, lease, 2, 4, "offset 4")
    assert take(connection) == (lease, 3, 3, "offset 2"), "a rollback takes number and position back"


def test_a_leased_record_goes_on_where_a_stasher_stopped(connection: psycopg.Connection[Any]) -> None:
    stasher = Stasher()
    writer = stasher.leased(stasher.lease(connection, "reader"))
    writer.stash(connection, OutboxRecord("orders", "k", "1"), position="one")
    lease, generation, sequence, at = take(connection)
    assert (generation, sequence, at) == (2, 1, "one")
    put(connection, lease, generation, 2, "two")
    resumed = stasher.lease(connection, "reader")
    assert (resumed.id, resumed.generation, resumed.sequence, resumed.position) == (lease, 3, 2, "two")


@pytest.mark.parametrize("stored", [1, 2, 5])
@pytest.mark.parametrize("brought", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("expired", [False, True])
def test_leased_records_are_judged_as_the_stashers_are(
    connection: psycopg.Connection[Any], stored: int, brought: int, expired: bool
) -> None:
    lease, *_ = take(connection)
    for number in (1, 2, 3, 4, 9):
        connection.execute("DELETE FROM outbox")
        connection.execute(
            "UPDATE outbox_lease SET generation = %s, sequence = 2, upstream_position = 'before',"
            " expires_at = now() + %s * interval '1 hour' WHERE id = %s",
            (stored, -1 if expired else 1, lease),
        )
        step = judge(HighWaterMark(stored, 2), brought, number, number, expired=expired)
        if step.verdict in (RunVerdict.ACCEPTED, RunVerdict.REPEATED):
            answer = put(connection, lease, brought, number, "after")
            assert (answer is not None) == (step.verdict is RunVerdict.ACCEPTED)
        else:
            with pytest.raises(psycopg.errors.Error) as refused:
                put(connection, lease, brought, number, "after")
            assert refused.value.sqlstate == LEASE_STATES[step.verdict.value]
        kept = connection.execute(
            "SELECT generation, sequence, upstream_position, (SELECT count(*) FROM outbox) FROM outbox_lease"
        ).fetchone()
        fresh = step.verdict is RunVerdict.ACCEPTED
        assert kept == (step.mark.generation, step.mark.sequence, "after" if fresh else "before", int(fresh))


def test_a_lease_that_is_gone_and_numbers_that_are_none(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.Error, match="there is no such lease") as gone:
        put(connection, 4711, 1, 1)
    assert gone.value.sqlstate == LEASE_STATES["expired"]
    lease, *_ = take(connection)
    for number in (0, -1):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="sequence"):
            put(connection, lease, 1, number)
    for name in ("", "n" * 256, None):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="name of a lease"):
            connection.execute("SELECT outbox_take_lease(%s)", (name,))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="lasts longer"):
        connection.execute("SELECT outbox_take_lease('n', interval '-1 s')")
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.errors.InvalidTransactionState, match="READ COMMITTED"), connection.transaction():
        connection.execute("SELECT outbox_take_lease('n')")


def test_two_transactions_with_the_same_number_write_it_once(
    connection: psycopg.Connection[Any], database: str
) -> None:
    lease, *_ = take(connection)
    with psycopg.connect(database) as one, ThreadPoolExecutor(1) as pool:
        put(one, lease, 1, 1)
        second = pool.submit(put, connection, lease, 1, 1)
        wait_blocked(database, connection.info.backend_pid)
        one.commit()
        assert second.result(30) is None
    assert len(rows(connection)) == 1


def test_the_lease_of_a_writer_who_does_not_wait_for_commits_is_durable(connection: psycopg.Connection[Any]) -> None:
    connection.execute("SET synchronous_commit = off")
    with connection.transaction():
        take(connection)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
