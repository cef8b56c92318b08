"""The Django app: its migration makes what `init` makes, its model shows what waits, `stash` wants a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ModelState
from django.db.utils import IntegrityError

from harvester.errors import NoTransaction, OutboxError
from harvester.outbox import schema
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord
from harvester.writers.django import DjangoStasher, stash, stash_many
from tests.support import django_desk

# With Django set up by then.
from harvester.writers.django.models import WaitingRecord  # isort: skip

pytestmark = pytest.mark.servers

RECORD = OutboxRecord("t", "k", "v", (("a", "b"),))
SHAPE = """SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
    pg_get_expr(d.adbin, d.adrelid), i.indexdef
FROM pg_class c
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_indexes i ON c.relkind = 'i' AND i.indexname = c.relname
WHERE c.relnamespace = 'public'::regnamespace AND c.relname LIKE 'outbox%'
ORDER BY c.relname, a.attnum"""


@pytest.fixture
def alias(database: str) -> Iterator[str]:
    with django_desk.database(database) as opened:
        yield opened


def shape(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(SHAPE).fetchall()


def test_the_migration_makes_what_init_makes(empty_database: str, database: str) -> None:
    with django_desk.database(empty_database) as alias:
        call_command("migrate", "harvester", database=alias, verbosity=0)
        made = shape(empty_database)
        assert made == shape(database)
        with psycopg.connect(empty_database, autocommit=True) as connection:
            assert schema.init(connection, OutboxTable.parse("outbox")) == []
        # Back and forth loses no record.
        with transaction.atomic(using=alias):
            stash(RECORD, using=alias)
        call_command("migrate", "harvester", "zero", database=alias, verbosity=0)
        call_command("migrate", "harvester", database=alias, verbosity=0)
        assert waiting(empty_database) == 1


def test_the_migration_leaves_an_outbox_alone_that_is_there(database: str) -> None:
    before = shape(database)
    with django_desk.database(database) as alias:
        call_command("migrate", "harvester", database=alias, verbosity=0)
    assert shape(database) == before


def test_nothing_is_left_of_a_migration_that_fails(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE outbox_quarantine (id int)")
    with django_desk.database(empty_database) as alias, pytest.raises(OutboxError):
        call_command("migrate", "harvester", database=alias, verbosity=0)
    assert {row[0] for row in shape(empty_database)} == {"outbox_quarantine"}


def test_model_and_migration_agree(database: str) -> None:
    said = StringIO()
    with django_desk.database(database, "default") as alias:
        call_command("makemigrations", "harvester", check_changes=True, dry_run=True, stdout=said)
        call_command("check", databases=[alias], stdout=said)
    assert "No changes" in said.getvalue()
    assert "no issues" in said.getvalue()
    # Of a model that is unmanaged makemigrations does not look at the fields.
    migrated = MigrationLoader(None).project_state().models["harvester", "waitingrecord"]
    model = ModelState.from_model(WaitingRecord)
    assert fields(migrated) == fields(model)
    assert migrated.options == {name: model.options[name] for name in migrated.options}


def fields(state: ModelState) -> dict[str, Any]:
    return {name: field.deconstruct()[1:] for name, field in state.fields.items()}


def test_the_model_has_the_columns_of_the_table(alias: str, database: str) -> None:
    mapped = {
        field.column: (str(field.db_type(connections[alias])).replace("varchar", "character varying"), not field.null)
        for field in WaitingRecord._meta.local_concrete_fields
    }
    columns = [row for row in shape(database) if row[0] == "outbox"]
    assert mapped == {column: (kind, required) for _, column, kind, required, *_ in columns}


def waiting(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


def test_outside_of_atomic_it_is_an_error(alias: str, database: str) -> None:
    for write in (lambda: stash(RECORD, using=alias), lambda: stash_many([RECORD], using=alias)):
        with pytest.raises(NoTransaction, match="atomic"):
            write()
    with transaction.atomic(using=alias):
        assert len([stash(RECORD, using=alias), *stash_many([RECORD] * 2, using=alias)]) == 3
    assert waiting(database) == 3


def test_inner_blocks_are_savepoints(alias: str, database: str) -> None:
    with transaction.atomic(using=alias):
        stash(RECORD, using=alias)
        with transaction.atomic(using=alias):
            stash(RECORD, using=alias)
            transaction.set_rollback(True, using=alias)
        stash(RECORD, using=alias)
    assert waiting(database) == 2


def test_errors_of_the_server_are_django_s(alias: str, database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("ALTER TABLE outbox ADD CHECK (kafka_key <> 'bad')")
    with pytest.raises(IntegrityError), transaction.atomic(using=alias):
        stash(OutboxRecord("t", "bad"), using=alias)
    # Within a block that is broken Django sends nothing, and neither does this.
    with transaction.atomic(using=alias):
        with pytest.raises(IntegrityError), transaction.atomic(using=alias, savepoint=False):
            stash(OutboxRecord("t", "bad"), using=alias)
        with pytest.raises(transaction.TransactionManagementError):
            stash(RECORD, using=alias)
    assert waiting(database) == 0


def test_the_model_shows_what_waits_and_changes_nothing(alias: str) -> None:
    with transaction.atomic(using=alias):
        identity = DjangoStasher(using=alias).stash(RECORD)
    (row,) = WaitingRecord.objects.using(alias).filter(kafka_topic="t")
    assert (row.id, row.kafka_key, row.kafka_value, row.leader_id) == (identity, "k", "v", None)
    assert (row.kafka_header_keys, row.kafka_header_values, row.kafka_partition) == (["a"], ["b"], None)
    assert str(row) == f"t {identity}"
    for change in (row.save, row.delete):
        with pytest.raises(OutboxError):
            change()


def test_another_database_is_refused() -> None:
    connections.settings["lite"] = {**connections.settings["default"], "ENGINE": "django.db.backends.sqlite3"}
    connections.settings["lite"]["NAME"] = ":memory:"
    try:
        with pytest.raises(OutboxError, match="sqlite"), transaction.atomic(using="lite"):
            stash(RECORD, using="lite")
    finally:
        connections["lite"].close()
        del connections["lite"], connections.settings["lite"]
