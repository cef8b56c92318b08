"""Sessions of the harvester: what they are pinned to, and which servers they refuse."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester.errors import DatabaseUnavailable
from harvester.outbox.connection import Connection, connect, read_session, server_identity
from tests.support.outboxes import poor_role

pytestmark = pytest.mark.servers


def setting(connection: psycopg.Connection[Any], name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def by_default(dsn: str, name: str, value: str) -> None:
    """Set a default of the whole database, as an administrator may have done."""
    database = sql.Identifier(str(conninfo_to_dict(dsn)["dbname"]))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET {} = {}").format(database, sql.Identifier(name), sql.Literal(value))
        )


def test_a_session_names_itself_and_notices_a_dead_peer(empty_database: str) -> None:
    with connect(empty_database, application_name="harvester x") as connection:
        assert setting(connection, "application_name") == "harvester x"
        assert connection.autocommit
        parameters = connection.info.get_parameters()
        assert {
            name: parameters.get(name) for name in ("keepalives_idle", "keepalives_interval", "keepalives_count")
        } == {
            "keepalives_idle": "5",
            "keepalives_interval": "2",
            "keepalives_count": "3",
        }
        assert parameters["tcp_user_timeout"] == "11000"
        assert parameters["target_session_attrs"] == "read-write"  # of several servers, the one that takes writes
    given = make_conninfo(empty_database, keepalives_idle=60)
    with connect(given, application_name="x", autocommit=False) as connection:
        assert connection.info.get_parameters()["keepalives_idle"] == "60"
        assert not connection.autocommit
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize(
    ("name", "default", "pinned"),
    [
        ("synchronous_commit", "off", "on"),
        ("synchronous_commit", "local", "on"),
        ("synchronous_commit", "remote_apply", "remote_apply"),
        ("default_transaction_isolation", "serializable", "read committed"),
        ("client_encoding", "latin1", "UTF8"),
        ("standard_conforming_strings", "off", "on"),
        ("DateStyle", "German, DMY", "ISO, DMY"),
        ("quote_all_identifiers", "on", "off"),
        ("statement_timeout", "50ms", "0"),
        ("idle_session_timeout", "50ms", "0"),
    ],
)
def test_defaults_of_the_database_do_not_weaken_it(empty_database: str, name: str, default: str, pinned: str) -> None:
    by_default(empty_database, name, default)
    with connect(empty_database, application_name="x") as connection:
        assert setting(connection, name) == pinned


@pytest.mark.parametrize(("style", "zone"), [("German", "Asia/Jakarta"), ("SQL", "Asia/Kolkata")])
def test_a_successor_finds_a_session_whatever_form_the_database_gives_to_times(
    empty_database: str, style: str, zone: str
) -> None:
    """The server does not know one zone's abbreviation, and takes the other one for another zone (P7)."""
    by_default(empty_database, "DateStyle", style)
    by_default(empty_database, "TimeZone", zone)
    with connect(empty_database, application_name="x") as connection:
        pid, started = read_session(connection)
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s::timestamptz", (pid, started)
        ).fetchone()
        assert found == (1,)
        assert connection.execute("SELECT now()").fetchone()  # psycopg reads no other form of a time


@pytest.mark.parametrize("attrs", [{}, {"target_session_attrs": "any"}])
def test_a_server_that_only_reads_is_refused(empty_database: str, attrs: dict[str, str]) -> None:
    by_default(empty_database, "default_transaction_read_only", "on")
    with pytest.raises(DatabaseUnavailable, match="allows only reading") as refused:
        connect(make_conninfo(empty_database, **attrs), application_name="x")
    assert "primary" in (refused.value.hint or "")


def test_a_missing_database_is_one_line(empty_database: str) -> None:
    dsn = make_conninfo(empty_database, dbname="no_such_database")
    with pytest.raises(DatabaseUnavailable, match=r'database "no_such_database" does not exist$') as refused:
        connect(dsn, application_name="x")
    assert (refused.value.hint or "").startswith("create the database")


def test_the_identity_of_the_server(empty_database: str) -> None:
    def identity(connection: Connection) -> tuple[int, int] | None:
        before = connection.info.transaction_status
        answer = server_identity(connection)
        assert connection.info.transaction_status == before
        return answer

    with connect(empty_database, application_name="x") as connection:
        row = connection.execute(
            "SELECT system_identifier, timeline_id FROM pg_control_system(), pg_control_checkpoint()"
        ).fetchone()
        assert identity(connection) == row
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    with (
        poor_role(empty_database) as dsn,
        connect(dsn, application_name="x", autocommit=False) as connection,
    ):
        connection.execute("SELECT 1")
        assert identity(connection) is None
