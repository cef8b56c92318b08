"""The INSERTs of all stashers as text and parameters, for any driver (pure).

A batch is one INSERT … SELECT FROM unnest(…) ORDER BY position: PostgreSQL takes the ids from the sequence above the
sort, so they ascend in the order of the records, and sorting the ids, which RETURNING gives in any order, restores that
order. Header arrays differ in length, which unnest would not preserve, so they are passed as array literals.

Statements are written once, with psycopg's parameters: `%s`, `%b` (in binary form), `%(name)s`, and `%%` for a per cent
sign. For other drivers the finished text is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from harvester.errors import OutboxError
from harvester.outbox.shape import ColumnShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable
from harvester.outbox.validation import CheckedRow, check
from harvester.record import OutboxRecord

_PLACEHOLDER = re.compile(r"%(?:(%)|[sbt]|\((\w+)\)[sbt])")


class Style(Enum):
    """The driver that a statement is written for."""

    PSYCOPG = "psycopg"
    FORMAT = "format"  # psycopg2: no binary form, named parameters allowed
    DOLLAR = "dollar"  # asyncpg, and functions in the server: $1, $2, …


def rewritten(statement: str, style: Style, names: Iterable[str] = ()) -> str:
    """The statement for that driver; `names` are the parameters' names in the order in which DOLLAR numbers them.

    A statement has either only named parameters or none; unnamed ones are numbered in order.
    """
    if style is Style.PSYCOPG:
        return statement
    numbers = {name: number for number, name in enumerate(names, 1)}
    last = 0

    def placeholder(found: re.Match[str]) -> str:
        nonlocal last
        percent, name = found.groups()
        if percent:
            return "%" if style is Style.DOLLAR else "%%"
        if style is Style.FORMAT:
            return f"%({name})s" if name else "%s"
        last = numbers[name] if name else last + 1
        return f"${last}"

    return _PLACEHOLDER.sub(placeholder, statement)


def inlined(statement: str, expressions: Mapping[str, str]) -> str:
    """The statement with these SQL expressions in place of its named parameters."""

    def placeholder(found: re.Match[str]) -> str:
        percent, name = found.groups()
        return "%" if percent else expressions[name]

    return _PLACEHOLDER.sub(placeholder, statement)


# Client and server hold a statement's arrays several times over: keep them small relative to shared memory.
CHUNK_RECORDS = 5_000
CHUNK_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class Insertion:
    """How to write rows of one shape into one outbox, on sessions of one client encoding."""

    table: OutboxTable
    shape: ColumnShape
    encoding: str
    one_sql: str
    many_sql: str
    style: Style = Style.PSYCOPG

    @classmethod
    def build(cls, table: OutboxTable, shape: ColumnShape, encoding: str, style: Style = Style.PSYCOPG) -> Insertion:
        """`encoding` is the Python codec of the session's client_encoding."""
        fields = "topic, key, value, header_keys, header_values"
        selected = (
            f"now(), topic, {columns.stored(shape, 'key', 'value', 'header_keys::text[]', 'header_values::text[]')}"
        )
        arrays = f"%b::text[], %b::{shape.key_type}[], %b::{shape.value_type}[], %b::text[], %b::text[]"
        given = (f"%s::{shape.key_type}", f"%b::{shape.value_type}", "%s::text[]", "%s::text[]")
        one = f"now(), %s, {columns.stored(shape, *given)}"
        if shape.has_partition:
            one = f"{one}, %s::integer"
            fields, selected, arrays = f"{fields}, part", f"{selected}, part", f"{arrays}, %b::integer[]"
        # psycopg interprets every % of the query, even in a quoted name.
        into = f"INSERT INTO {table.sql.replace('%', '%%')} ({written_columns(shape)})"
        many = f"SELECT {selected} FROM unnest({arrays}) WITH ORDINALITY AS r({fields}, n) ORDER BY n"
        return cls(
            table=table,
            shape=shape,
            encoding=encoding,
            one_sql=rewritten(f"{into} VALUES ({one}) RETURNING id", style),
            many_sql=rewritten(f"{into} {many} RETURNING id", style),
            style=style,
        )

    def parameters(self, record: OutboxRecord) -> Sequence[Any]:
        """The parameters of `one_sql`; raises RecordRejected."""
        row = check(record, self.shape, encoding=self.encoding)
        fields = (row.topic, row.key, row.value, row.header_keys, row.header_values)
        return (*fields, row.partition) if self.shape.has_partition else fields

    def batches(self, records: Iterable[OutboxRecord]) -> list[Sequence[Any]]:
        """Parameters of `many_sql`, one entry per statement, in order; all are checked before any is returned."""
        rows = [check(record, self.shape, encoding=self.encoding, index=at) for at, record in enumerate(records)]
        return [self._arrays(chunk) for chunk in _chunks(rows)]

    def one_id(self, row: Sequence[Any] | None) -> int:
        """The id in the answer to `one_sql`."""
        if row is None:
            raise OutboxError(f"a row for {self.table} was not inserted", hint=_SUPPRESSED)
        return int(row[0])

    def many_ids(self, rows: Sequence[Sequence[Any]], parameters: Sequence[Any]) -> list[int]:
        """The ids in the answer to `many_sql`, in the order of the records."""
        if len(rows) != len(parameters[0]):
            raise OutboxError(
                f"{len(rows)} of {len(parameters[0])} rows for {self.table} were inserted", hint=_SUPPRESSED
            )
        return sorted(int(row[0]) for row in rows)

    def _arrays(self, rows: Sequence[CheckedRow]) -> Sequence[Any]:
        arrays: list[list[Any]] = [
            [row.topic for row in rows],
            [row.key for row in rows],
            [row.value for row in rows],
            [array_literal(row.header_keys) for row in rows],
            [array_literal(row.header_values) for row in rows],
        ]
        if self.shape.has_partition:
            arrays.append([row.partition for row in rows])
        return tuple(arrays)  # SQLAlchemy would take a list for many sets of parameters


_SUPPRESSED = "a trigger or rule of the table suppressed it; roll the transaction back"


def written_columns(shape: ColumnShape) -> str:
    """The columns of an INSERT: create_time, then those in the order of `Insertion.parameters`."""
    names = f"create_time, kafka_topic, {columns.written(shape)}"
    return f"{names}, kafka_partition" if shape.has_partition else names


def array_literal(texts: Iterable[str]) -> str:
    """Strings as the text form of a PostgreSQL array, all elements quoted."""
    return "{" + ",".join('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts) + "}"


def _chunks(rows: Sequence[CheckedRow]) -> Iterator[Sequence[CheckedRow]]:
    start, size = 0, 0
    for at, row in enumerate(rows):
        added = len(row.value or "") + len(row.key or "") + sum(map(len, row.header_values))
        if at > start and (at - start == CHUNK_RECORDS or size + added > CHUNK_BYTES):
            yield rows[start:at]
            start, size = at, 0
        size += added
    if start < len(rows):
        yield rows[start:]
