"""P10: who could still fill a gap, as `pg_locks` names them, on a real server."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harvester.outbox.schema import inspect
from harvester.outbox.sql import queries
from harvester.outbox.tables import OutboxTable

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
INSERT = "INSERT INTO outbox (kafka_topic, kafka_value) VALUES ('t', 'v')"


def holders(connection: psycopg.Connection[Any]) -> tuple[set[str], int]:
    shape = inspect(connection, OUTBOX)
    row = connection.execute(queries.holders(OUTBOX, shape.oid, shape.sequence)).fetchone()
    assert row is not None
    return set(row[0] or {}), row[1]


def test_a_transaction_holds_from_before_its_first_id_until_it_has_ended(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as watcher, psycopg.connect(database) as writer:
        assert holders(watcher)[0] == set()
        writer.execute("SELECT count(*) FROM outbox")  # who only reads fills nothing
        assert holders(watcher)[0] == set()
        writer.execute(INSERT)
        (first,), last_value = holders(watcher)
        assert last_value == 1
        writer.commit()
        assert holders(watcher)[0] == set()
        writer.execute(INSERT)
        (second,), _ = holders(watcher)
        assert second != first  # the same session, another transaction
        writer.rollback()
        assert holders(watcher) == (set(), 2)


def test_other_tables_and_other_databases_do_not_count(database: str, empty_database: str) -> None:
    with (
        psycopg.connect(database, autocommit=True) as watcher,
        psycopg.connect(database) as writer,
        psycopg.connect(empty_database) as stranger,
    ):
        writer.execute("CREATE TABLE other (id int)")
        writer.execute("INSERT INTO other VALUES (1)")
        stranger.execute("CREATE TABLE outbox (id int)")
        stranger.execute("INSERT INTO outbox VALUES (1)")
        assert holders(watcher)[0] == set()


def test_an_outbox_without_a_sequence_has_no_last_value_and_no_file(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as watcher:
        oid = inspect(watcher, OUTBOX).oid
        row = watcher.execute(queries.holders(OUTBOX, oid, None)).fetchone()
        assert row is not None
        assert row[:4] == (None, None, None, None)


def test_the_file_of_the_sequence_tells_a_restart_from_calls(database: str) -> None:
    """Also where more ids have been given out since than before: the last value alone would not show it."""
    with psycopg.connect(database, autocommit=True) as watcher:
        shape = inspect(watcher, OUTBOX)

        def file() -> int:
            row = watcher.execute(queries.holders(OUTBOX, shape.oid, shape.sequence)).fetchone()
            assert row is not None
            return int(row[2])

        watcher.execute(INSERT)
        first = file()
        watcher.execute(INSERT)
        watcher.execute("SELECT setval('outbox_id_seq', 1000000000)")
        assert file() == first
        watcher.execute("TRUNCATE outbox RESTART IDENTITY")
        assert file() != first
