"""The outbox as a model, to inspect waiting records. `stash` writes rows and the harvester deletes them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from harvester.errors import OutboxError
from harvester.outbox.tables import OutboxTable
from harvester.writers.django import outbox_table

if TYPE_CHECKING:
    _Field = models.Field[list[str], list[str]]
else:
    _Field = models.Field  # generic only for type checkers


class TextArray(_Field):
    """A column TEXT[]; the field of django.contrib.postgres would require that app."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        return "text[]"


def db_table(table: OutboxTable) -> str:
    """The table's name for Django, which quotes names that are not quoted yet."""
    return table.sql if table.schema is not None else table.name


class WaitingRecord(models.Model):
    """A record that waits for the harvester. Read only; docs/outbox.md has the rules.

    Unmanaged: the migration creates the table with the statements of `harvester init`.
    """

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    create_time: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    kafka_topic: models.CharField[str, str] = models.CharField(max_length=249)
    kafka_key: models.TextField[str | None, str | None] = models.TextField(null=True)
    kafka_value: models.TextField[str | None, str | None] = models.TextField(null=True)
    kafka_header_keys = TextArray()
    kafka_header_values = TextArray()
    kafka_partition: models.IntegerField[int | None, int | None] = models.IntegerField(null=True)
    leader_id: models.UUIDField[UUID | None, UUID | None] = models.UUIDField(null=True)

    class Meta:
        managed = False
        db_table = db_table(outbox_table())
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.kafka_topic} {self.id}"

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OutboxError("a record of the outbox cannot be saved or changed", hint="write records with stash()")

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OutboxError("a record of the outbox cannot be deleted", hint="publish a correction instead")
