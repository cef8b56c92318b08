"""The stasher: write outbox rows inside the transaction that they belong to (seeds 001/004, `stasher`).

    with connection.transaction():
        connection.execute("UPDATE account SET …")
        Stasher("outbox").stash(connection, OutboxRecord("billing.paid", key="42", value="{…}"))

The row commits and rolls back with that transaction. On an autocommit connection outside a transaction the row
commits by itself: nothing then ties it to any other change.

A bad record is refused (RecordRejected) before anything is sent, so the transaction can go on. What PostgreSQL
itself refuses is raised as psycopg raises it, since the transaction is the caller's to handle.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import tuple_row

from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.insertion import Insertion
from harvester.outbox.shape import column_shape
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

Target = psycopg.Connection[Any] | psycopg.Cursor[Any]


class Stasher:
    """Writes records into one outbox. Safe to share between threads; keep one for the life of the program.

    The table's columns are looked up once per connection, with its first use; after a change of the table
    connect again. A cursor that is passed in is not used itself: its results stay as they are.
    """

    def __init__(self, table: str | OutboxTable = "outbox") -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self._insertions: WeakKeyDictionary[psycopg.Connection[Any], Insertion] = WeakKeyDictionary()

    def stash(self, target: Target, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises RecordRejected, SchemaError or psycopg's errors."""
        connection = _connection(target)
        insertion = self._insertion(connection)
        parameters = insertion.parameters(record)
        return insertion.one_id(_cursor(connection).execute(insertion.one_sql, parameters).fetchone())

    def stash_many(self, target: Target, records: Iterable[OutboxRecord]) -> list[int]:
        """Write records in order; returns their ids, which grow in that order. All are checked first.

        One statement for every few thousand records; all or none are written, on autocommit connections too.
        """
        connection = _connection(target)
        insertion = self._insertion(connection)
        batches = insertion.batches(records)
        ids: list[int] = []
        with connection.transaction() if len(batches) > 1 else nullcontext():
            for parameters in batches:
                rows = _cursor(connection).execute(insertion.many_sql, parameters).fetchall()
                ids += insertion.many_ids(rows, parameters)
        return ids

    def prepare(self, target: Target) -> PreparedStasher:
        """A stasher bound to one connection that uses a prepared statement, for many single records."""
        connection = _connection(target)
        return PreparedStasher(connection, self._insertion(connection))

    def _insertion(self, connection: psycopg.Connection[Any]) -> Insertion:
        insertion = self._insertions.get(connection)
        if insertion is None:
            row = _cursor(connection).execute(CATALOG_SQL, catalog_parameters(self.table)).fetchone()
            assert row is not None, "the query has no condition on its one row"
            shape = column_shape(self.table, parse_catalog(row))
            insertion = Insertion.build(self.table, shape, connection.info.encoding)
            self._insertions[connection] = insertion
        return insertion


class PreparedStasher:
    """Made by `Stasher.prepare`; use it with that connection's thread and no longer than the connection."""

    def __init__(self, connection: psycopg.Connection[Any], insertion: Insertion) -> None:
        self._cursor = _cursor(connection)
        self._insertion = insertion

    def stash(self, record: OutboxRecord) -> int:
        """Write one record; returns its id. Raises as `Stasher.stash`."""
        parameters = self._insertion.parameters(record)
        answer = self._cursor.execute(self._insertion.one_sql, parameters, prepare=True)
        return self._insertion.one_id(answer.fetchone())


def _connection(target: Target) -> psycopg.Connection[Any]:
    if isinstance(target, psycopg.Connection):
        return target
    if isinstance(target, psycopg.Cursor):
        return target.connection
    raise TypeError(f"a psycopg Connection or Cursor is needed, not {type(target).__name__} (see AsyncStasher)")


def _cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    # Of a known class: the connection's own factories may be for dictionaries or another placeholder style.
    return psycopg.Cursor(connection, row_factory=tuple_row)
