"""What a failed connection is reported as; no server takes part."""

from __future__ import annotations

import socket

import psycopg
import pytest

from harvester.errors import ConfigurationError, DatabaseUnavailable, ExitCode, SchemaError
from harvester.outbox.connection import connect, database_errors, one_line, unreachable


@pytest.mark.parametrize(
    ("text", "reason", "hint"),
    [
        (
            'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused\n'
            "\tIs the server running on that host and accepting TCP/IP connections?",
            "cannot reach PostgreSQL at db:1: Connection refused",
            "check that the server runs",
        ),
        (
            'connection failed: connection to server at "::1", port 1 failed: FATAL:  password authentication '
            'failed for user "u"',
            'cannot reach PostgreSQL at db:1: password authentication failed for user "u"',
            "check user and password",
        ),
        (
            'connection to server on socket "/run/x/.s.PGSQL.5432" failed: FATAL:  database "x" does not exist',
            'cannot reach PostgreSQL at db:1: database "x" does not exist',
            "create the database",
        ),
        (
            'connection failed: connection to server at "10.0.0.1", port 1 failed: session is read-only',
            "PostgreSQL at db:1 allows only reading (session is read-only)",
            "point data_source at the primary",
        ),
        ("", "cannot reach PostgreSQL at db:1: no reason was given", "check that the server runs"),
    ],
)
def test_one_line_and_a_hint(text: str, reason: str, hint: str) -> None:
    error = unreachable("db:1", text)
    assert error.message.startswith(reason)
    assert "\n" not in error.message
    assert (error.hint or "").startswith(hint)
    assert error.exit_code == ExitCode.UNAVAILABLE


def test_a_standby_beside_a_dead_primary_is_not_to_blame() -> None:
    """As psycopg puts it together."""
    refused = 'connection to server at "db-2", port 2 failed: Connection refused\n\tIs the server running?'
    read_only = 'connection to server at "db-1", port 1 failed: session is read-only'
    attempts = (
        f"- host: 'db-1', port: '1', hostaddr: '10.0.0.1': connection failed: {read_only}\n"
        f"- host: 'db-2', port: '2', hostaddr: '10.0.0.2': connection failed: {refused}"
    )
    text = f"connection failed: {refused}\nMultiple connection attempts failed. All failures were:\n{attempts}"
    error = unreachable("db-1:1, db-2:2", text)
    wanted = "no PostgreSQL that accepts writes: db-1:1: session is read-only; db-2:2: Connection refused"
    assert error.message == wanted
    assert (error.hint or "").startswith("promote a standby")
    only_standbys = unreachable("db-1:1, db-3:1", text.replace(refused, read_only))
    assert "allows only reading" in only_standbys.message


def test_a_closed_port_names_the_server_but_not_the_password() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(DatabaseUnavailable, match=f"127.0.0.1:{port}: Connection refused") as refused:
            connect(f"postgresql://u:s3cret@127.0.0.1:{port}/db", application_name="test")
    assert "s3cret" not in f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"


def test_all_of_several_servers_are_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(DatabaseUnavailable, match=f"at 127.0.0.1:{port}, localhost:{port}: "):
            connect(f"host=127.0.0.1,localhost port={port} user=u", application_name="test")


@pytest.mark.parametrize("dsn", ["host=a s3cret", "postgresql://u:s3cret@[bad/db", "password='s3cret"])
def test_a_text_that_is_no_dsn_is_not_echoed(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="data_source: is not a PostgreSQL connection string") as refused:
        connect(dsn, application_name="test")
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.AdminShutdown("FATAL:  terminating connection"), DatabaseUnavailable),
        (psycopg.InterfaceError("the connection is closed"), DatabaseUnavailable),
        (psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"), DatabaseUnavailable),
        (psycopg.errors.InsufficientPrivilege("permission denied"), SchemaError),
        (psycopg.errors.UndefinedTable("relation does not exist"), SchemaError),
    ],
)
def test_driver_errors_become_ours(error: psycopg.Error, expected: type[Exception]) -> None:
    with pytest.raises(expected, match="could not look") as translated, database_errors("look"):
        raise error
    assert translated.value.__cause__ is error


def test_our_own_errors_pass_unchanged() -> None:
    own = SchemaError("as it was")
    with pytest.raises(SchemaError) as passed, database_errors("look"):
        raise own
    assert passed.value is own


def test_one_line_is_one_line() -> None:
    assert one_line(psycopg.OperationalError("FATAL:  first\nDETAIL: second")) == "first"
    assert one_line(psycopg.OperationalError("")) == "OperationalError"
