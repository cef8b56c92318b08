"""The trigger that wakes the leader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harvester.errors import DatabaseUnavailable
from harvester.outbox import schema
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.schema import init, inspect
from harvester.outbox.tables import OutboxTable
from tests.support.outboxes import insert

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


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


def test_a_notification_that_comes_with_an_answer_wakes_the_leader_and_is_not_kept(
    connection: psycopg.Connection[Any], empty_database: str
) -> None:
    """Whoever leads executes statements all the time; what the client library keeps of them would grow for weeks."""
    init(connection, OUTBOX, notify=True)
    session = MarkSession(empty_database, OUTBOX, "test", 30.0)
    session.open()
    awake, wake = os.pipe()
    try:
        for _ in range(2):
            insert(connection)
            session.holders()  # the server sends what has been notified before it answers
        assert session._connection is not None
        assert not session._connection._notifies_backlog
        assert session.wait(0.0, awake)
        assert not session.wait(0.0, awake), "it is told once"
    finally:
        session.close()
        os.close(awake)
        os.close(wake)


def test_a_disabled_or_foreign_trigger_does_not_count(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX, notify=True)
    qualified = OutboxTable.parse("public.outbox")
    assert not inspect(connection, qualified).has_notify  # it would listen on another channel
    connection.execute("ALTER TABLE outbox DISABLE TRIGGER ALL")
    assert not inspect(connection, OUTBOX).has_notify
    assert init(connection, OUTBOX, notify=True) == [
        'created the notify trigger on "public"."outbox", and its function "public"."outbox_notify"'
    ]
    assert inspect(connection, OUTBOX).has_notify


def test_it_does_not_queue_behind_a_long_transaction(
    connection: psycopg.Connection[Any], empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(connection, OUTBOX)
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    with psycopg.connect(empty_database) as writer:
        insert(writer)
        assert init(connection, OUTBOX) == []
        with pytest.raises(DatabaseUnavailable, match="has locked the table for too long"):
            init(connection, OUTBOX, notify=True)
    assert init(connection, OUTBOX, notify=True)
