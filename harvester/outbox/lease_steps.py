"""The common part of all stashers, whatever their driver: statements, parameters, and the meaning of results.

Steps are generators. Each yields a statement with its parameters, is sent the resulting rows, and returns its result;
`perform` and `async_perform` connect them to a driver. A stasher consists of three parts: the steps here, the methods
in `stasher` (blocking) or `async_stasher`, and a subclass per driver that opens transactions and executes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.types.numeric import Int8

from harvester.errors import LeaseError, SchemaError
from harvester.outbox.catalog import CATALOG_SQL, catalog_parameters, parse_catalog
from harvester.outbox.leases import (
    DEFAULT_LEASE_TIME,
    Course,
    Lease,
    Run,
    Stashed,
    checked_names,
    checked_position,
    lease_of,
)
from harvester.outbox.shape import INIT_HINT, column_shape
from harvester.outbox.sql import leases as lease_queries
from harvester.outbox.sql.insert import Insertion, Style, rewritten
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Steps = Generator[tuple[str, Any], Rows, T]
Fetch = Callable[[str, Any], Rows]  # executes a statement and returns its rows, none if it has no result
AsyncFetch = Callable[[str, Any], Awaitable[Rows]]

_UNDEFINED_TABLE = "42P01"


def perform(steps: Steps[T], fetch: Fetch) -> T:
    """Run the steps to their end; returns their result."""
    found: Any = None
    while True:
        try:
            request = steps.send(found)
        except StopIteration as done:
            result: T = done.value
            return result
        found = fetch(*request)


async def async_perform(steps: Steps[T], fetch: AsyncFetch) -> T:
    """Run the steps to their end; returns their result."""
    found: Any = None
    while True:
        try:
            request = steps.send(found)
        except StopIteration as done:
            result: T = done.value
            return result
        found = await fetch(*request)


class StasherCore:
    """The table and lease time of a stasher, and its driver's information about a connection."""

    _driver_errors: type[Exception] = psycopg.Error

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time
        self._insertions: WeakKeyDictionary[Any, Insertion] = WeakKeyDictionary()

    def _cache(self, connection: Any) -> tuple[MutableMapping[Any, Any], Any]:
        """The place to cache this connection's Insertion for the connection's lifetime: a mapping and a key."""
        return self._insertions, connection

    def _style(self, connection: Any) -> Style:
        return Style.PSYCOPG

    def _encoding(self, connection: Any) -> str:
        """The Python codec of the session's client_encoding."""
        encoding: str = connection.info.encoding
        return encoding

    def _look_up(self, connection: Any) -> Steps[Insertion]:
        """Read the table's columns, and prepare how to write its rows."""
        style = self._style(connection)
        row = (yield _bound(CATALOG_SQL, style, catalog_parameters(self.table)))[0]
        shape = column_shape(self.table, parse_catalog(tuple(row)))
        return Insertion.build(self.table, shape, self._encoding(connection), style)

    def _take(self, connection: Any, names: Iterable[str]) -> Steps[list[Lease]]:
        """Take leases in a separate transaction, in the order of the names."""
        asked, style = checked_names(names), self._style(connection)
        yield lease_queries.READ_COMMITTED, ()
        yield lease_queries.WAIT_FOR_COMMIT, ()
        values = {"names": asked, "seconds": self.lease_time.total_seconds()}
        found = yield _bound(lease_queries.take(self.table), style, values)
        leases = {row[0]: lease_of(row) for row in found}
        # More than are added, so that they cannot accumulate.
        yield _bound(lease_queries.sweep(self.table), style, {"rows": 2 * len(asked) + 100})
        return [leases[name] for name in asked]

    @contextmanager
    def _missing_table_named(self) -> Iterator[None]:
        try:
            yield
        except self._driver_errors as error:
            cause = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's error
            if _UNDEFINED_TABLE in (getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None)):
                raise SchemaError(f"there is no table {self.table.lease} in this database", hint=INIT_HINT) from error
            raise


def insert_one(insertion: Insertion, record: OutboxRecord) -> Steps[list[int]]:
    """Write one record; results in its id."""
    found = yield insertion.one_sql, insertion.parameters(record)
    return [insertion.one_id(found[0] if found else None)]


def insert_many(insertion: Insertion, records: Iterable[OutboxRecord]) -> list[Steps[list[int]]]:
    """Write batches, one after the other; all records are checked when this returns."""

    def batch(parameters: Sequence[Any]) -> Steps[list[int]]:
        return insertion.many_ids((yield insertion.many_sql, parameters), parameters)

    return [batch(parameters) for parameters in insertion.batches(records)]


def not_apart() -> LeaseError:
    """The error for taking a lease within a transaction.

    If it were rolled back after the lease was returned, the next lease of the name would get the same generation.
    """
    return LeaseError(
        "a lease is taken in its own transaction, but this connection is already in one, or in a pipeline",
        hint="take the lease before the transaction begins, or on another connection",
    )


class Numbered:
    """State of every leased stasher: its lease, the last number given out, and how to go back."""

    def __init__(self, lease: Lease) -> None:
        self._course = Course(lease)
        self._statements: dict[tuple[Insertion, bool, bool], str] = {}

    @property
    def lease(self) -> Lease:
        """The lease with the last number used: save it to continue from here. `position` is the one at the start."""
        return self._course.lease

    @property
    def sequence(self) -> int:
        """The number of the last record that was stashed or attempted."""
        return self._course.sequence

    def seek(self, sequence: int) -> None:
        """The next record gets the number after this one: later ones were rolled back, or will be sent again."""
        self._course.seek(sequence)

    @contextmanager
    def _taken_back(self) -> Iterator[SimpleNamespace]:
        """Takes back the numbers given out in the block, unless `committed` is set at its end."""
        before, outcome = self.sequence, SimpleNamespace(committed=False)
        try:
            yield outcome
        finally:
            if not outcome.committed:
                self.seek(before)

    def _one(
        self, insertion: Insertion, record: OutboxRecord, position: str | None, *, hopeful: bool = True
    ) -> Steps[list[Stashed]]:
        """Stash one record; it has its number when this returns."""
        row, position = insertion.parameters(record), checked_position(position)
        return self._steps(insertion, self._course.give(1), position, row, many=False, hopeful=hopeful)

    def _many(
        self, insertion: Insertion, records: Iterable[OutboxRecord], position: str | None, *, hopeful: bool = True
    ) -> list[Steps[list[Stashed]]]:
        """Stash batches one after the other; all records have their numbers when this returns."""
        batches, position = insertion.batches(records), checked_position(position)
        runs = [self._course.give(len(rows[0])) for rows in batches]
        return [
            self._steps(insertion, run, position if run is runs[-1] else None, rows, many=True, hopeful=hopeful)
            for run, rows in zip(runs, batches, strict=True)
        ]

    def _steps(
        self, insertion: Insertion, run: Run, position: str | None, row: Sequence[Any], *, many: bool, hopeful: bool
    ) -> Steps[list[Stashed]]:
        course = self._course
        # In the order of numbering. psycopg would give a number the smallest type that fits, and each other type would
        # need another prepared statement.
        number = Int8 if insertion.style is Style.PSYCOPG else int
        numbers = (course.start.id, course.start.generation, run.first, run.last)
        values = {
            **dict(zip(("lease", "generation", "first", "last"), map(number, numbers), strict=True)),
            "position": position,
            **dict(zip(lease_queries.MANY if many else lease_queries.ONE, row, strict=False)),
        }
        if hopeful and course.at is not None:
            found = yield self._bound(insertion, {**values, "at": course.at}, many=many, hopeful=True)
            if found:
                return course.hoped(run, tuple(found[0]))
        found = yield self._bound(insertion, values, many=many, hopeful=False)
        return course.decided(run, tuple(found[0]) if found else None)

    def _bound(self, insertion: Insertion, values: dict[str, Any], *, many: bool, hopeful: bool) -> tuple[str, Any]:
        key = (insertion, many, hopeful)
        if key not in self._statements:
            build = lease_queries.stash_many if many else lease_queries.stash_one
            text = build(insertion.table, insertion.shape, hopeful=hopeful)
            self._statements[key] = rewritten(text, insertion.style, values)
        return self._statements[key], _given(values, insertion.style)


def _bound(statement: str, style: Style, values: dict[str, Any]) -> tuple[str, Any]:
    return rewritten(statement, style, values), _given(values, style)


def _given(values: dict[str, Any], style: Style) -> Any:
    return tuple(values.values()) if style is Style.DOLLAR else values
