"""Versions of the schema, and the incarnation of the id space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harvester.errors import SchemaError
from harvester.outbox import schema, shape
from harvester.outbox.schema import init, inspect, refresh_incarnation
from harvester.outbox.sql import ddl
from harvester.outbox.tables import OutboxTable
from tests.support.outboxes import insert, seed_ddl, tables, term_row

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
ADDED = (
    "progress_topic", "holder_kind", "lease_until", "wanted_by", "wanted_until",
    "leader_group", "kafka_cluster", "closed_floor", "open_ids", "floor_space",
)  # fmt: skip


@pytest.fixture
def connection(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as opened:
        yield opened


def use_migrations(monkeypatch: pytest.MonkeyPatch, *migrations: ddl.Migration) -> None:
    """These instead of ours; so the columns that ours add to tables are not to be expected either."""
    monkeypatch.setattr(ddl, "MIGRATIONS", migrations)
    monkeypatch.setattr(shape, "TERM_COLUMNS", [name for name in shape.TERM_COLUMNS if name not in ADDED])
    monkeypatch.setattr(shape, "QUARANTINE_COLUMNS", [name for name in shape.QUARANTINE_COLUMNS if name != "origin"])


def add_lanes(table: OutboxTable) -> list[str]:
    return [f"ALTER TABLE {table.term} ADD COLUMN IF NOT EXISTS lanes INTEGER"]


def fill_lanes(table: OutboxTable) -> list[str]:
    return [f"UPDATE {table.term} SET lanes = 8"]


def broken_migration(table: OutboxTable) -> list[str]:
    return [f"ALTER TABLE {table.term} DROP COLUMN unknown"]


def test_a_newer_schema_is_refused_untouched(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    connection.execute("UPDATE outbox_term SET schema_version = 99")
    connection.execute("DROP TABLE outbox_quarantine")
    with pytest.raises(SchemaError, match=f"has version 99, but this harvester only supports {ddl.schema_version()}"):
        init(connection, OUTBOX)
    assert "outbox_quarantine" not in tables(connection)
    connection.execute("UPDATE outbox_term SET schema_version = 1")
    init(connection, OUTBOX)
    connection.execute("UPDATE outbox_term SET schema_version = 99")
    with pytest.raises(
        SchemaError, match=f"has version 99, but this harvester only supports {ddl.schema_version()}"
    ) as refused:
        inspect(connection, OUTBOX)
    assert "newer harvester" in (refused.value.hint or "")


def test_migrations_run_once_in_order_and_as_a_whole(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_migrations(monkeypatch)
    init(connection, OUTBOX)
    use_migrations(monkeypatch, add_lanes, fill_lanes, broken_migration)
    with pytest.raises(SchemaError, match="has version 1, but this harvester needs 4"):
        inspect(connection, OUTBOX)
    with pytest.raises(SchemaError, match='column "unknown"'):
        init(connection, OUTBOX)
    assert "lanes" not in term_row(connection)

    use_migrations(monkeypatch, add_lanes, fill_lanes)
    assert init(connection, OUTBOX) == ["migrated the schema from version 1 to 3"]
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (8, 3)
    assert init(connection, OUTBOX) == []
    inspect(connection, OUTBOX)


def test_a_new_schema_has_all_migrations(connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_migrations(monkeypatch, add_lanes)
    assert len(init(connection, OUTBOX)) == 3
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (None, 2)
    connection.execute("DROP TABLE outbox, outbox_term, outbox_quarantine")
    connection.execute(schema.sql(OUTBOX))
    assert (term_row(connection)["lanes"], term_row(connection)["schema_version"]) == (None, 2)


def test_version_2_indexes_a_quarantine_that_has_records(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        use_migrations(older)
        init(connection, OUTBOX)
    # A key that no btree could hold.
    connection.execute(
        "INSERT INTO outbox_quarantine (id, incarnation, kafka_key, error, attempts)"
        " SELECT 1, gen_random_uuid(), string_agg(md5(i::text), ''), 'e', 1 FROM generate_series(1, 1000) i"
    )
    assert init(connection, OUTBOX) == [
        f"migrated the schema from version 1 to {ddl.schema_version()}",
        'created table "public"."outbox_lease"',
    ]
    assert {"outbox_quarantine_key", "outbox_quarantine_at"} <= tables(connection)
    connection.execute("ALTER TABLE outbox ALTER kafka_key TYPE bytea USING NULL")
    assert len(init(connection, OUTBOX)) == 1, "the index follows a key that becomes bytea"
    assert init(connection, OUTBOX) == []


def test_the_incarnation_is_renewed_when_ids_start_again(connection: psycopg.Connection[Any]) -> None:
    init(connection, OUTBOX)
    first = term_row(connection)
    seen: list[UUID] = [first["incarnation"]]

    def renewed() -> bool:
        answer = refresh_incarnation(connection, OUTBOX)
        now = term_row(connection)["incarnation"]
        assert (now != seen[-1]) == answer
        seen.append(now)
        return answer

    insert(connection, rows=5)
    assert not renewed()
    insert(connection)
    assert not renewed()
    connection.execute("TRUNCATE outbox")
    assert not renewed()
    connection.execute("TRUNCATE outbox RESTART IDENTITY")
    assert renewed()
    assert not renewed()
    insert(connection, rows=3)
    assert not renewed()
    connection.execute("ALTER SEQUENCE outbox_id_seq RESTART WITH 1000")
    assert renewed()  # it was restarted, and nobody knows from where
    connection.execute("ALTER SEQUENCE outbox_id_seq RESTART WITH 7")
    assert renewed()
    # One row was seen, and the next to come is again the first.
    connection.execute("TRUNCATE outbox RESTART IDENTITY")
    assert renewed()
    insert(connection)
    assert not renewed()
    connection.execute("TRUNCATE outbox RESTART IDENTITY")
    assert renewed()
    # Another table, even one whose ids go on.
    connection.execute("DROP TABLE outbox")
    connection.execute(seed_ddl())
    connection.execute("SELECT setval('outbox_id_seq', 5000)")
    assert renewed()
    assert not renewed()
    connection.execute("DROP TABLE outbox")
    assert init(connection, OUTBOX) == [
        'created table "outbox"',
        "renewed the incarnation: ids of this outbox may start again",
    ]
    assert init(connection, OUTBOX) == []
    last = term_row(connection)
    assert last["incarnation"] not in seen
    assert last["outbox_id"] == first["outbox_id"]
