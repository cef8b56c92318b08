"""`harvester init` and `harvester status` as processes."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import Any

import psycopg
import pytest

from harvester.errors import ExitCode
from harvester.outbox.schema import init, inspect, read_facts
from harvester.outbox.stasher import Stasher
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord
from tests.support.cli import run_cli
from tests.support.outboxes import seed_ddl

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")


def run(command: str, dsn: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run_cli(command, "--set", f"data_source={dsn}", *args, check=check)


def test_init_says_what_it_did_and_then_that_all_is_done(empty_database: str) -> None:
    first = run("init", empty_database, "--notify").stdout.splitlines()
    assert first == [
        'created table "outbox"',
        'created table "public"."outbox_term", schema version 5',
        'created table "public"."outbox_quarantine"',
        'created table "public"."outbox_lease"',
        'created the notify trigger on "public"."outbox", and its function "public"."outbox_notify"',
    ]
    with psycopg.connect(empty_database) as connection:
        made = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
            " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        ).fetchall()
    assert {name for (name,) in made} == {"outbox", *(f"outbox_{n}" for n in ("term", "quarantine", "lease", "notify"))}
    assert all(f'"{name}"' in "\n".join(first) for (name,) in made)
    assert run("init", empty_database).stdout == "nothing to do: the schema is complete\n"
    removed = json.loads(run("init", empty_database, "--no-notify", "--json").stdout)
    assert removed == {
        "outbox": '"outbox"',
        "done": ['removed the notify trigger on "public"."outbox"; its function "public"."outbox_notify" stays'],
    }


def test_init_makes_the_archive_that_the_configuration_wants(empty_database: str) -> None:
    printed = run("init", empty_database, "--print", "--set", "archive=ids").stdout
    assert "PARTITION BY RANGE" in printed
    assert "PARTITION BY RANGE" not in run("init", empty_database, "--print").stdout
    done = json.loads(run("init", empty_database, "--set", "archive=rows", "--json").stdout)["done"]
    assert 'created table "public"."outbox_archive"' in done
    assert sum("created partition" in line for line in done) == 4


def test_an_outbox_that_is_not_there_is_told_with_the_database(empty_database: str) -> None:
    """A data source that leads to the wrong database of the right server."""
    run("init", empty_database)
    wrong = psycopg.conninfo.make_conninfo(empty_database, dbname="postgres")
    name = psycopg.conninfo.conninfo_to_dict(empty_database)["dbname"]
    elsewhere = ("--set", 'outbox_table="not_in_postgres"')
    done = run("status", wrong, *elsewhere, check=False)
    assert done.returncode == ExitCode.SCHEMA
    assert "there is no outbox table \"not_in_postgres\" in the database 'postgres'" in done.stderr
    assert "correct dbname in data_source" in done.stderr
    with psycopg.connect(wrong) as connection:
        facts = read_facts(connection, OutboxTable(None, "not_in_postgres"))
    assert (facts.database, name in facts.other_databases) == ("postgres", True)


def test_init_can_make_a_value_column_of_bytes(empty_database: str) -> None:
    run("init", empty_database, "--value-type", "bytea", "--set", 'outbox_table="\\"My Outbox\\""')
    with psycopg.connect(empty_database) as connection:
        assert inspect(connection, OutboxTable(None, "My Outbox")).value_type == "bytea"


def test_print_changes_nothing_and_psql_could_run_it(empty_database: str) -> None:
    printed = run("init", empty_database, "--print", "--notify").stdout
    assert printed.startswith("-- ")
    with psycopg.connect(empty_database, autocommit=True) as connection:
        assert connection.execute("SELECT to_regclass('outbox')").fetchone() == (None,)
        connection.execute(printed)
        assert inspect(connection, OUTBOX).has_notify
        assert init(connection, OUTBOX) == []


def test_print_follows_the_outbox_that_exists(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(seed_ddl(value="BYTEA"))
        printed = run("init", empty_database, "--print").stdout
        assert "BIGSERIAL" not in printed
        connection.execute(printed)
        assert inspect(connection, OUTBOX).value_type == "bytea"


def test_print_works_where_no_database_is_within_reach() -> None:
    done = run("init", _nowhere(), "--print")
    assert "CREATE TABLE IF NOT EXISTS" in done.stdout
    assert "the SQL is for a new outbox" in done.stderr


@pytest.mark.parametrize("command", ["init", "status"])
def test_an_unreachable_database_is_one_line_and_a_hint(command: str) -> None:
    done = run(command, _nowhere(), check=False)
    assert done.returncode == ExitCode.UNAVAILABLE
    message, hint = done.stderr.splitlines()
    assert message.startswith("harvester: cannot reach PostgreSQL at 127.0.0.1:")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    "command",
    [("verify", "--topic", "t", "--timeout", "3"), ("dead", "list", "--dead-letter-topic", "t"), ("move",)],
    ids=lambda c: c[0],
)
def test_a_kafka_that_is_away_is_one_line_and_a_hint(database: str, command: tuple[str, ...]) -> None:
    away = 'base_kafka_config={"bootstrap.servers"="127.0.0.1:1"}'
    settings = ("--set", f"data_source={database}", "--set", "leader_group_id=g")
    run_cli("pump", *settings, "--records", "1")  # there is something to verify
    done = run_cli(*command, *settings, "--set", away, check=False)
    assert done.returncode == ExitCode.UNAVAILABLE
    message, hint = done.stderr.splitlines()  # and no line of the client's
    assert message.startswith("harvester: ")
    assert hint == "hint: check that Kafka is running and that bootstrap.servers is correct"


def test_a_misfit_is_a_schema_error(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE outbox (id int)")
    done = run("init", empty_database, check=False)
    assert done.returncode == ExitCode.SCHEMA
    assert 'the outbox table "outbox" does not fit: column create_time is missing' in done.stderr


def test_status_for_scripts(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        Stasher().stash(connection, OutboxRecord("t", "k"))
    status: dict[str, Any] = json.loads(run("status", database, "--json").stdout)
    assert status["backlog"]["records"] == 1
    assert status["backlog"]["oldest_age_s"] >= 0
    assert (status["term"], status["holder"], status["schema_version"]) == (0, None, 5)
    assert status["quarantine"] == {"records": 0, "capped": False, "newest_at": None, "newest_error": None}
    assert status["shape"]["value"] == "text"


def test_status_before_init_points_to_init(empty_database: str) -> None:
    done = run("status", empty_database, check=False)
    assert done.returncode == ExitCode.SCHEMA
    assert done.stderr.splitlines()[-1].startswith("hint: run `harvester init`")


def test_status_for_people(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_term SET term = 7, holder = gen_random_uuid(), holder_name = '[b]host_1',"
            " acquired_at = now() - interval '72 hours'"
        )
        connection.execute("INSERT INTO outbox (kafka_topic, create_time) VALUES ('t', now() - interval '36 hours')")
        connection.execute(
            "INSERT INTO outbox_quarantine (id, incarnation, error, attempts)"
            " VALUES (1, gen_random_uuid(), E'too\\nlarge [red]', 5)"
        )
    shown = run("status", database).stdout
    for said in (
        'outbox "outbox"',
        "[b]host_1, the last to take over, 3.0 d ago",
        "1 record, the first for 1.5 d",
        "1 record, the latest: too large [red]",
        "version 5",
    ):
        assert said in shown


def _nowhere() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"host=127.0.0.1 port={bound.getsockname()[1]} user=u dbname=d"
