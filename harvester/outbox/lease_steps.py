"""What all stashers share, whatever their driver: which statements with which parameters, and what comes of them.

Steps are generators. Each yields a statement with its parameters, is sent the rows that it gave, and returns its
result; `perform` and `async_perform` carry them to a driver. A stasher is made of three parts: the steps here, the
methods in `stasher` (blocking) or `async_stasher`, and a subclass for each driver that opens transactions and executes.
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
Fetch = Callable[[str, Any], Rows]  # executes a statement and returns its rows, none where it gives no result
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
    """The table and lease time of a stasher, and what its driver tells of a connection."""

    _driver_errors: type[Exception] = psycopg.Error

    def __init__(self, table: str | OutboxTable = "outbox", *, lease_time: timedelta = DEFAULT_LEASE_TIME) -> None:
        self.table = table if isinstance(table, OutboxTable) else OutboxTable.parse(table)
        self.lease_time = lease_time
        self._insertions: WeakKeyDictionary[Any, Insertion] = WeakKeyDictionary()

    def _cache(self, connection: Any) -> tuple[MutableMapping[Any, Any], Any]:
        """Where the Insertion of this connection is kept as long as the connection lives: a mapping and a key."""
        return self._insertions, connection

    def _style(self, connection: Any) -> Style:
        return Style.PSYCOPG

    def _encoding(self, connection: Any) -> str:
        """The Python codec of the session's client_encoding."""
        encoding: str = connection.info.encoding
        return encoding

    def _look_up(self, connection: Any) -> Steps[Insertion]:
        """Read the table's columns, and how to write rows of them."""
        style = self._style(connection)
        row = (yield _bound(CATALOG_SQL, style, catalog_parameters(self.table)))[0]
        shape = column_shape(self.table, parse_catalog(tuple(row)))
        return Insertion.build(self.table, shape, self._encoding(connection), style)

    def _take(self, connection: Any, names: Iterable[str]) -> Steps[list[Lease]]:
        """Take leases, in a transaction of their own; in the order of the names."""
        asked, style = checked_names(names), self._style(connection)
        yield lease_queries.READ_COMMITTED, ()
        yield lease_queries.WAIT_FOR_COMMIT, ()
        values = {"names": asked, "seconds": self.lease_time.total_seconds()}
        found = yield _bound(lease_queries.take(self.table), style, values)
        leases = {row[0]: lease_of(row) for row in found}
        # More than are added, so that they cannot pile up.
        yield _bound(lease_queries.sweep(self.table), style, {"rows": 2 * len(asked) + 100})
        return [leases[name] for name in asked]

    @contextmanager
    def _missing_table_named(self) -> Iterator[None]:
        try:
            yield
        except self._driver_errors as error:
            cause = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
            if _UNDEFINED_TABLE in (getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None)):
                raise SchemaError(f"there is no table {self.table.lease} in this database", hint=INIT_HINT) from error
            raise


def insert_one(insertion: Insertion, record: OutboxRecord) -> Steps[list[int]]:
    """Writes one record; results in its id."""
    found = yield insertion.one_sql, insertion.parameters(record)
    return [insertion.one_id(found[0] if found else None)]


def insert_many(insertion: Insertion, records: Iterable[OutboxRecord]) -> list[Steps[list[int]]]:
    """Write batches, one after the other; all records are checked when this returns."""

    def batch(parameters: Sequence[Any]) -> Steps[list[int]]:
        return insertion.many_ids((yield insertion.many_sql, parameters), parameters)

    return [batch(parameters) for parameters in insertion.batches(records)]


def not_apart() -> LeaseError:
    """The error for a lease that is asked for within a transaction.

    Were it rolled back after it was returned, the next one of the name would be given the same generation.
    """
    return LeaseError(
        "a lease is taken in a transaction of its own, and this connection is within one, or within a pipeline",
        hint="take the lease before the transaction begins, or over another connection",
    )


class Numbered:
    """What every leased stasher has: its lease, the last number given, and a way back."""

    def __init__(self, lease: Lease) -> None:
        self._course = Course(lease)
        self._statements: dict[tuple[Insertion, bool, bool], str] = {}

    @property
    def lease(self) -> Lease:
        """The lease with the last number used: save this to go on from here. `position` is as it was at the start."""
        return self._course.lease

    @property
    def sequence(self) -> int:
        """The number of the last record that was stashed, or attempted."""
        return self._course.sequence

    def seek(self, sequence: int) -> None:
        """The next record's number is the one after this: what came later was rolled back, or is to be sent again."""
        self._course.seek(sequence)

    @contextmanager
    def _taken_back(self) -> Iterator[SimpleNamespace]:
        """Takes the numbers given meanwhile back, unless `committed` is set by the end of the block."""
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
        """Stash batches, one after the other; all records have their numbers when this returns."""
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
        # In the order in which they are numbered. psycopg would give a number the smallest type that holds it, and each
        # other type would be another prepared statement.
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
