"""Dead letters: records in quarantine, found, read and discarded. `redrive` puts them back.

A record is identified by (incarnation, id), since ids may start again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from harvester.errors import OutboxError
from harvester.outbox.connection import database_errors, execute
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable, as_bytes

_MOST = 2**63 - 1  # a bigint
_NAMED = "(q.incarnation, q.id) IN (SELECT * FROM unnest($1::uuid[], $2::bigint[]))"

Connection = psycopg.Connection[Any]
Identity = tuple[UUID, int]

# psycopg raises for times that no datetime can hold in the session's time zone, which is at most a day from UTC.
_LOADABLE = "CASE WHEN q.create_time >= '0001-01-02Z' AND q.create_time < '9999-12-31Z' THEN q.create_time END"


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which records: those that meet all given conditions; without any, all records.

    `topics` and `ids`: any of them. `key` is bytes as Kafka would get them. `error` is part of the message, ignoring
    case, `error_pattern` a PostgreSQL regular expression. `since`: a moment, or a maximum age. `limit`: at most this
    many.
    """

    topics: Sequence[str] = ()
    ids: Sequence[int] = ()
    incarnation: UUID | None = None
    key: bytes | None = None
    error: str | None = None
    error_pattern: str | None = None
    since: datetime | timedelta | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A row of the quarantine. Key and value are bytes as Kafka would have got them; `value` is None unless requested.

    `create_time` is also None if a datetime cannot hold it: `infinity`, and beyond the years 1 to 9999.

    `header_keys` and `header_values` are as in the row: their mismatch may be why it is here.
    """

    id: int
    incarnation: UUID
    create_time: datetime | None
    topic: str | None
    key: bytes | None
    value: bytes | None
    value_bytes: int | None  # None: no value (a tombstone)
    header_keys: list[Any] | None
    header_values: list[Any] | None
    partition: int | None
    error: str
    attempts: int
    first_failed_at: datetime | None
    quarantined_at: datetime

    @property
    def identity(self) -> Identity:
        """What identifies the record."""
        return self.incarnation, self.id


def list_dead(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    chosen: DeadLetterFilter,
    *,
    values: bool = False,
    oldest_first: bool = False,
) -> list[DeadRecord]:
    """The chosen records, newest first by default; a limit leaves out the last ones.

    Raises OutboxError for an invalid pattern.
    """
    condition, parameters = where(shape, chosen)
    order = "ASC" if oldest_first else "DESC"
    limit = f" LIMIT {min(chosen.limit, _MOST):d}" if chosen.limit is not None else ""
    query = (
        f"SELECT {_columns(shape, values=values)} FROM {table.quarantine} q WHERE {condition}"
        f" ORDER BY q.quarantined_at {order}, q.id {order}{limit}"
    )
    with database_errors(f"read {table.quarantine}"):
        try:
            return _read(connection, query, *parameters)
        except psycopg.errors.InvalidRegularExpression as error:
            raise OutboxError(
                f"{chosen.error_pattern!r} is not a valid regular expression: {error.diag.message_primary}",
                hint="use the syntax of PostgreSQL's ~* operator, or search for a part of the message",
            ) from error


def lock_dead(
    connection: Connection, table: OutboxTable, shape: OutboxShape, identities: Sequence[Identity]
) -> list[DeadRecord]:
    """The given records that still exist, locked until the end of the transaction; without values."""
    incarnations, ids = split(identities)
    query = (
        f"SELECT {_columns(shape, values=False)} FROM {table.quarantine} q"
        f" WHERE {_NAMED} ORDER BY q.incarnation, q.id FOR UPDATE OF q"
    )
    return _read(connection, query, incarnations, ids)


def discard(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    identities: Sequence[Identity],
    keep: Callable[[list[DeadRecord]], None],
    *,
    values: bool = False,
) -> None:
    """Delete the records permanently. `keep` gets those that still existed before this is committed: if it raises,
    nothing is deleted.
    """
    incarnations, ids = split(identities)
    query = f"DELETE FROM {table.quarantine} q WHERE {_NAMED} RETURNING {_columns(shape, values=values)}"
    with database_errors(f"discard records of {table.quarantine}"), connection.transaction():
        records = _read(connection, query, incarnations, ids)
        keep(sorted(records, key=lambda record: (record.quarantined_at, record.id)))


def _read(connection: Connection, query: str, *parameters: object) -> list[DeadRecord]:
    """Dead records, from a query for `_columns`.

    A database in SQL_ASCII can hold text that is not valid, which may be why a record is here: it is read as bytes
    there, since the server would otherwise refuse the whole query because of one.
    """
    if connection.info.parameter_status("server_encoding") != "SQL_ASCII":
        return [DeadRecord(*row) for row in execute(connection, query, *parameters)]
    with connection.transaction():
        connection.execute("SET LOCAL client_encoding TO SQL_ASCII")
        cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
        rows = cursor.execute(query.encode(), parameters).fetchall()
        connection.execute("SET LOCAL client_encoding TO UTF8")
    return [
        replace(
            record,
            topic=_as_text(record.topic),
            header_keys=_as_text(record.header_keys),
            header_values=_as_text(record.header_values),
            error=_as_text(record.error),
        )
        for record in (DeadRecord(*row) for row in rows)
    ]


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def where(shape: OutboxShape, chosen: DeadLetterFilter) -> tuple[str, list[object]]:
    """The filter as a condition on q, and its parameters."""
    parts: list[str] = []
    parameters: list[object] = []

    def add(condition: str, value: object) -> None:
        parameters.append(value)
        parts.append(condition.replace("?", f"${len(parameters)}"))

    if chosen.topics:
        add("q.kafka_topic = ANY (?::text[])", list(chosen.topics))
    if chosen.ids:
        add("q.id = ANY (?::bigint[])", list(chosen.ids))
    if chosen.incarnation is not None:
        add("q.incarnation = ?", chosen.incarnation)
    if chosen.key is not None:
        is_bytes = shape.key_type == "bytea"
        add("q.kafka_key = ?" if is_bytes else "q.kafka_key = convert_from(?, 'UTF8')", chosen.key)
    if chosen.error is not None:
        add("position(lower(?::text) IN lower(q.error)) > 0", chosen.error)
    if chosen.error_pattern is not None:
        add("q.error ~* ?::text", chosen.error_pattern)
    if isinstance(chosen.since, timedelta):
        add("q.quarantined_at >= now() - ?::interval", chosen.since)
    elif chosen.since is not None:
        add("q.quarantined_at >= ?", chosen.since)
    return " AND ".join(parts) or "true", parameters


def split(identities: Sequence[Identity]) -> tuple[list[UUID], list[int]]:
    return [incarnation for incarnation, _ in identities], [record_id for _, record_id in identities]


def _columns(shape: OutboxShape, *, values: bool) -> str:
    key, value = as_bytes("q.kafka_key", shape.key_type), as_bytes("q.kafka_value", shape.value_type)
    return (
        f"q.id, q.incarnation, {_LOADABLE}, q.kafka_topic, {key}, {value if values else 'NULL::bytea'},"
        " octet_length(q.kafka_value), q.kafka_header_keys, q.kafka_header_values, q.kafka_partition, q.error,"
        " q.attempts, q.first_failed_at, q.quarantined_at"
    )
