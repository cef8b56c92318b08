"""Records in quarantine, put there by the relay's own statement, in outboxes of several shapes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import pq
from psycopg.rows import dict_row

from harvester.outbox.purge_session import bigint_array
from harvester.outbox.schema import init, inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import settle
from harvester.outbox.tables import OutboxTable

ODD_NAME = '"Bil%ling"."out ""box"" %s $1 <id>"'


@dataclass
class Outbox:
    """An outbox with a leader, without a harvester. Statements need no doubled per cent signs."""

    connection: psycopg.Connection[Any]
    table: OutboxTable
    shape: OutboxShape
    term: int = 1
    holder: UUID | None = None

    @classmethod
    def make(
        cls, connection: psycopg.Connection[Any], name: str = "outbox", *, key_type: str = "text", archive: bool = False
    ) -> Outbox:
        """In an empty database, or where it is already."""
        table = OutboxTable.parse(name)
        if table.schema is not None:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {OutboxTable(None, table.schema).sql}")
        init(connection, table, archive=archive, value_type="bytea" if key_type == "bytea" else "text")
        if key_type == "bytea":
            connection.execute(f"ALTER TABLE {table.sql} ALTER kafka_key TYPE bytea USING NULL")
            init(connection, table)
        made = cls(connection, table, inspect(connection, table))
        made.lead()
        return made

    def lead(self) -> None:
        """Another holder, under the next term."""
        self.term, self.holder = self.term + 1, uuid4()
        self.run(f"UPDATE {self.table.term} SET term = $1, holder = $2", self.term, self.holder)

    def run(self, query: str, *values: object) -> psycopg.Cursor[dict[str, Any]]:
        """In libpq's notation; rows are dicts."""
        return psycopg.RawCursor(self.connection, row_factory=dict_row).execute(query, values)

    def add(self, *keys: str | bytes | None, topic: str = "t", value: str | bytes | None = "v") -> list[int]:
        """One row for each key; returns the ids."""
        if isinstance(value, str) and self.shape.value_type == "bytea":
            value = value.encode()
        return [
            self.run(
                f"INSERT INTO {self.table.sql} (kafka_topic, kafka_key, kafka_value) VALUES ($1, $2, $3) RETURNING id",
                topic, key, value,
            ).fetchall()[0]["id"]
            for key in keys
        ]  # fmt: skip

    def quarantine(self, *ids: int, error: str = "too large", notice_topic: str = "") -> list[tuple[bool, bool, bool]]:
        """(moved, fenced, taken) for each, by the relay's statement."""
        statement = settle.quarantine(self.table, self.shape, notice_topic)
        failed = datetime.now(UTC) - timedelta(minutes=1)
        return [
            self.connection.execute(
                statement,
                {
                    "id": i, "xmin": None, "term": self.term, "holder": self.holder, "error": error, "attempts": 5,
                    "first_failed_at": failed, "origin": b"sent",
                },
            ).fetchall()[0]
            for i in ids
        ]  # fmt: skip

    def purge(self, *ids: int, archive: settle.Archive = "off") -> int:
        """By the relay's statement, prepared, with the ids in binary; returns what the command tag counts."""
        pgconn = self.connection.pgconn
        statement = settle.purge(self.table, archive, self.shape)
        result = pgconn.exec_params(statement.encode(), [bigint_array(ids)], param_formats=[pq.Format.BINARY])
        assert result.status == pq.ExecStatus.COMMAND_OK, result.error_message
        return result.command_tuples or 0

    def rows(self, relation: str | None = None) -> list[dict[str, Any]]:
        """Of the outbox, or of another of its tables, by id."""
        return self.run(f"SELECT * FROM {relation or self.table.sql} ORDER BY id").fetchall()

    def ids(self, relation: str | None = None) -> list[int]:
        return [row["id"] for row in self.rows(relation)]
