"""What leased stashers share, whatever their driver: which statements with which parameters, and what comes of them.

Steps are generators. Each yields a statement with its parameters, is sent what that has found, and returns its result;
`perform` and `async_perform` carry them to a driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from psycopg.types.numeric import Int8

from harvester.errors import SchemaError
from harvester.outbox.leases import Course, Lease, Run, Stashed, checked_names, checked_position, lease_of
from harvester.outbox.shape import INIT_HINT
from harvester.outbox.sql import leases as lease_queries
from harvester.outbox.sql.insert import Insertion, Style, rewritten
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Steps = Generator[tuple[str, Any], Rows, T]

_UNDEFINED_TABLE = "42P01"


def perform(steps: Steps[T], fetch: Callable[[str, Any], Rows]) -> T:
    """Run them; `fetch` executes a statement and returns its rows, none where it gives no result."""
    found: Rows | None = None
    while True:
        try:
            statement, values = next(steps) if found is None else steps.send(found)
        except StopIteration as done:
            result: T = done.value
            return result
        found = fetch(statement, values)


async def async_perform(steps: Steps[T], fetch: Callable[[str, Any], Awaitable[Rows]]) -> T:
    """See `perform`."""
    found: Rows | None = None
    while True:
        try:
            statement, values = next(steps) if found is None else steps.send(found)
        except StopIteration as done:
            result: T = done.value
            return result
        found = await fetch(statement, values)


def take(table: OutboxTable, names: Iterable[str], lease_time: timedelta, style: Style) -> Steps[list[Lease]]:
    """Take leases, in a transaction of their own; in the order of the names."""
    asked = checked_names(names)
    yield lease_queries.READ_COMMITTED, ()
    yield lease_queries.WAIT_FOR_COMMIT, ()
    found = yield _bound(lease_queries.take(table), style, {"names": asked, "seconds": lease_time.total_seconds()})
    leases = {row[0]: lease_of(row) for row in found}
    # More than are added, so that they cannot pile up.
    yield _bound(lease_queries.sweep(table), style, {"rows": 2 * len(asked) + 100})
    return [leases[name] for name in asked]


def no_table(table: OutboxTable, error: Exception) -> SchemaError | None:
    """What to raise where a driver's error says that the table of leases is missing; None for any other error."""
    if _UNDEFINED_TABLE in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None)):
        return SchemaError(f"there is no table {table.lease} in this database", hint=INIT_HINT)
    return None


class Numbered:
    """What every leased stasher has: its lease, the last number that it gave, and a way back."""

    def __init__(self, lease: Lease) -> None:
        self._course = Course(lease)
        self._statements: dict[tuple[Insertion, bool, bool], str] = {}

    @property
    def lease(self) -> Lease:
        """The lease with the last number used: save this to go on from here. `position` is as it was at the start."""
        return self._course.lease

    @property
    def sequence(self) -> int:
        """The number of the last record that was stashed, or tried to be."""
        return self._course.sequence

    def seek(self, sequence: int) -> None:
        """The next record's number is the one after this: what came later was rolled back, or is to be sent again."""
        self._course.seek(sequence)

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
        course, values = self._course, _parameters(self._course.start, run, position, row, insertion.style, many=many)
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


def _parameters(
    lease: Lease, run: Run, position: str | None, row: Sequence[Any], style: Style, *, many: bool
) -> dict[str, Any]:
    """In the order in which they are numbered. psycopg would give a number the smallest type that holds it.

    Each other type would be another prepared statement.
    """
    number = Int8 if style is Style.PSYCOPG else int
    named = {"lease": number(lease.id), "generation": number(lease.generation)}
    named |= {"first": number(run.first), "last": number(run.last)}
    return {
        **named,
        "position": position,
        **dict(zip(lease_queries.MANY if many else lease_queries.ONE, row, strict=False)),
    }
