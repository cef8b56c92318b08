"""The pump on a real PostgreSQL: its counts are the truth, whatever the load is like."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from harvester.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaError
from harvester.outbox.schema import init, inspect
from harvester.outbox.tables import OutboxTable
from harvester.verify.check import Truth, read_truth
from harvester.verify.load import Load, parse
from harvester.verify.pump import pump
from tests.support.dead import ODD_NAME

pytestmark = pytest.mark.servers

TABLE = OutboxTable.parse("outbox")
SEED_DDL = """
CREATE TABLE {table} (
    id BIGSERIAL PRIMARY KEY, create_time TIMESTAMP WITH TIME ZONE NOT NULL,
    kafka_topic VARCHAR(249) NOT NULL, kafka_key {key} NOT NULL, kafka_value {value},
    kafka_header_keys TEXT[] NOT NULL, kafka_header_values TEXT[] NOT NULL, leader_id {leader})
"""


def truth_of(dsn: str, table: OutboxTable = TABLE) -> Truth:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return read_truth(connection, table, inspect(connection, table))


def rows_of(dsn: str, columns: str, table: OutboxTable = TABLE) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(f"SELECT {columns} FROM {table.sql} ORDER BY id").fetchall()


def execute(dsn: str, query: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(query)


def check_numbers(dsn: str, table: OutboxTable = TABLE) -> None:
    """Going through the ids, each key counts 1, 2, 3 … up to its count."""
    reached: dict[str, int] = {}
    for key, value in rows_of(dsn, "kafka_key, kafka_value", table):
        name = key.decode() if isinstance(key, bytes) else key
        pumped = parse(value if isinstance(value, bytes) else value.encode())
        assert pumped is not None
        assert pumped.seq == reached.get(name, 0) + 1
        reached[name] = pumped.seq
    counts = {key: count for key, count in truth_of(dsn, table).counts.items() if count}
    assert reached == counts


def test_counts_and_records_agree_under_contention_late_commits_and_rollbacks(database: str) -> None:
    load = Load(
        records=600, topics=("t",), keys=30, skew=0.8, writers=6, rows_per_transaction=3, late=0.1, rollbacks=0.2
    )

    report = pump(database, TABLE, load)

    assert (report.records, report.complete) == (600, True)
    assert report.late > 0
    assert report.rolled_back_records > 0
    truth = truth_of(database)
    assert sum(truth.counts.values()) == 600
    assert truth.pending == {key: set(range(1, count + 1)) for key, count in truth.counts.items() if count}
    assert truth.foreign_rows == 0
    check_numbers(database)


def test_late_transactions_are_overtaken_by_larger_ids(database: str) -> None:
    report = pump(database, TABLE, Load(records=200, topics=("t",), keys=1000, writers=4, late=0.2))

    assert report.overtaken > 0


def test_the_plan_s_totals_do_not_depend_on_chance(database: str, empty_database: str) -> None:
    load = Load(records=300, topics=("t",), keys=20, writers=4, skew=1.0)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        init(connection, TABLE)

    pump(database, TABLE, load)
    pump(empty_database, TABLE, load)

    assert truth_of(database).counts == truth_of(empty_database).counts


def test_records_look_as_asked_for(database: str) -> None:
    pump(database, TABLE, Load(records=10, topics=("a", "b"), keys=4, value_bytes=77, headers=2, seed=5))

    for topic, key, value, names, values in rows_of(
        database, "kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
    ):
        assert topic == ("a" if int(key.removeprefix("k-")) % 2 == 0 else "b")
        assert len(value) == 77
        assert (names, values) == (["pump-0", "pump-1"], ["seed 5", "seed 5"])
    assert truth_of(database).topics == ("a", "b")


@pytest.mark.parametrize(
    ("key", "value", "leader"),
    [("VARCHAR(100)", "VARCHAR(10000)", "UUID"), ("BYTEA", "BYTEA", "VARCHAR(36)"), ("TEXT", "BYTEA", "UUID")],
)
def test_any_accepted_shape_and_name_will_do(empty_database: str, key: str, value: str, leader: str) -> None:
    table = OutboxTable.parse(ODD_NAME)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "Bil%ling"')
        connection.execute(SEED_DDL.format(table=table.sql, key=key, value=value, leader=leader))
        init(connection, table)

    pump(empty_database, table, Load(records=50, topics=("t",), keys=5, rows_per_transaction=4))
    pump(empty_database, table, Load(records=50, topics=("t",), keys=5), append=True)

    check_numbers(empty_database, table)
    assert sum(truth_of(empty_database, table).counts.values()) == 100


def test_a_second_pump_is_refused_unless_it_appends(database: str) -> None:
    load = Load(records=20, topics=("t",), keys=3)
    pump(database, TABLE, load)

    with pytest.raises(OutboxError, match="counts 20 records of an earlier pump") as caught:
        pump(database, TABLE, load)
    assert "--append" in (caught.value.hint or "")
    pump(database, TABLE, Load(records=20, topics=("t",), keys=5), append=True)

    assert sum(truth_of(database).counts.values()) == 40
    check_numbers(database)


def test_appending_after_the_outbox_was_drained_counts_on(database: str) -> None:
    pump(database, TABLE, Load(records=20, topics=("t",), keys=1))
    execute(database, "DELETE FROM outbox")

    pump(database, TABLE, Load(records=1, topics=("t",), keys=1), append=True)

    assert truth_of(database).pending == {"k-000000": {21}}


@pytest.mark.parametrize(
    ("key", "value"), [("mine", "1:1:c:"), ("k-000000", "hello"), ("k-000000", "21:1:c:"), ("k-000000", None)]
)
def test_an_outbox_with_other_records_is_refused(database: str, key: str, value: str | None) -> None:
    pump(database, TABLE, Load(records=20, topics=("t",), keys=1))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            " kafka_header_values) VALUES (now(), 't', %s, %s, '{}', '{}')",
            (key, value),
        )

    with pytest.raises(OutboxError, match=r"holds 1 records that no pump has counted .* id 21"):
        pump(database, TABLE, Load(records=1, topics=("t",), keys=1), append=True)
    assert sum(truth_of(database).counts.values()) == 20


def test_a_fresh_pump_refuses_an_outbox_in_use_and_leaves_no_side_table(database: str) -> None:
    execute(
        database,
        "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
        " kafka_header_values) VALUES (now(), 't', 'k-000000', '1:1:c:', '{}', '{}')",
    )

    with pytest.raises(OutboxError, match="no pump has counted"):
        pump(database, TABLE, Load(records=1, topics=("t",)))
    with pytest.raises(SchemaError, match="no pump has written"):
        truth_of(database)


def test_a_key_keeps_its_topic(database: str) -> None:
    pump(database, TABLE, Load(records=1, topics=("t",), keys=1))

    with pytest.raises(OutboxError, match="went to topic 't' so far, but would now go to 'u'"):
        pump(database, TABLE, Load(records=1, topics=("u",), keys=1), append=True)


def test_values_that_do_not_fit_are_refused_before_anything_is_written(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(
            SEED_DDL.format(table="outbox", key="VARCHAR(7)", value="VARCHAR(100)", leader="UUID"),
        )
        init(connection, TABLE)

    with pytest.raises(ConfigurationError) as caught:
        pump(empty_database, TABLE, Load(records=1, topics=("t",), value_bytes=101))

    assert {problem.path for problem in caught.value.problems} == {"--size", "--keys"}


def test_stop_ends_it_early_with_a_true_report(database: str) -> None:
    stop = threading.Event()

    def watch(records: int) -> None:
        if records >= 20:
            stop.set()

    report = pump(database, TABLE, Load(records=10**6, topics=("t",), rate_per_s=500.0), stop=stop, on_progress=watch)

    assert not report.complete
    assert report.records >= 20
    assert sum(truth_of(database).counts.values()) == report.records


def test_a_database_that_goes_away_is_reported_and_the_counts_stay_true(database: str, servers: Any) -> None:
    killed = threading.Event()

    def kill(records: int) -> None:
        if records >= 20 and not killed.is_set():
            killed.set()
            with psycopg.connect(servers.dsn, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    (psycopg.conninfo.conninfo_to_dict(database)["dbname"],),
                )

    load = Load(records=10**6, topics=("t",), rate_per_s=500.0)
    with pytest.raises(DatabaseUnavailable):
        pump(database, TABLE, load, on_progress=kill)

    check_numbers(database)
    pump(database, TABLE, Load(records=10, topics=("t",)), append=True)
    check_numbers(database)
