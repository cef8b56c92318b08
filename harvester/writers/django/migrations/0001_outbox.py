"""Creates what `harvester init` creates, with the same code; safe if that has already run."""

from __future__ import annotations

from typing import Any, ClassVar

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from harvester.outbox import schema
from harvester.writers.django import outbox_table, psycopg_connection
from harvester.writers.django.models import TextArray, db_table


def create(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    schema.init(psycopg_connection(editor.connection), outbox_table())


class Migration(migrations.Migration):
    """Reversing it keeps the tables: they may contain records."""

    initial = True
    operations: ClassVar[list[Any]] = [
        migrations.RunPython(create, migrations.RunPython.noop, elidable=False),
        migrations.CreateModel(
            name="WaitingRecord",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("create_time", models.DateTimeField()),
                ("kafka_topic", models.CharField(max_length=249)),
                ("kafka_key", models.TextField(null=True)),
                ("kafka_value", models.TextField(null=True)),
                ("kafka_header_keys", TextArray()),
                ("kafka_header_values", TextArray()),
                ("kafka_partition", models.IntegerField(null=True)),
                ("leader_id", models.UUIDField(null=True)),
            ],
            options={"db_table": db_table(outbox_table()), "managed": False, "ordering": ("id",)},
        ),
    ]
