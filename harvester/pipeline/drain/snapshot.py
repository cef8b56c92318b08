"""The transaction of a slice: selects the rows, exports its snapshot to the tasks, stays open until they are purged.

While it is open the outbox cannot be truncated, so an id means the same row when it is read, sent and purged. Raises
DatabaseUnavailable, SchemaError, TermLost.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from harvester.delivery.decode import Broken, Decoded, decode
from harvester.errors import OutboxError, TermLost
from harvester.outbox.connection import OutboxIdentity, connect, database_errors, read_place, sequence_oid
from harvester.outbox.libpq import copy_rows
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.drain import sql
from harvester.pipeline.drain.slices import DrainRules, Share, TopicLimits

_SILENCE_S = 300.0
_DOUBTFUL_RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The rows of a slice: all rows from the first to the last id, in this snapshot."""

    ids: list[int]
    shares: list[Share]
    snapshot: str
    left: int  # after them, at most
    shifted: bool = False  # a header array's lower bound is not 1

    @property
    def headers(self) -> tuple[int, int]:
        """The fewest and the most of a row."""
        return min(share.headers[0] for share in self.shares), max(share.headers[1] for share in self.shares)

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.shares)

    @property
    def largest_bytes(self) -> int:
        return max(share.largest_bytes for share in self.shares)


class Snapshot:
    """The transaction of one slice at a time, on its own connection. A context manager."""

    def __init__(self, dsn: str, table: OutboxTable, place: OutboxIdentity | None) -> None:
        self._dsn, self._table, self._place = dsn, table, place
        self._file: int | None = None

    def __enter__(self) -> Snapshot:
        self._connection = connect(self._dsn, application_name="harvester drain/slice", silence_s=_SILENCE_S)
        try:
            with database_errors("read the outbox"):
                self.shape: OutboxShape = inspect(self._connection, self._table)
                place = read_place(self._connection, self._table, sequence_oid(self.shape.sequence))
            if self._place is not None and (reason := place.why_not(self._place)) is not None:
                raise TermLost(f"the database has changed: {reason}")
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    def choose(self, limit: int, most_bytes: int, term: int, holder: UUID) -> SliceRows | None:
        """Begins a slice of at most `limit` records and, approximately, `most_bytes`; None if there are no rows."""
        with database_errors("select rows of the outbox"):
            self.end()
            self._connection.execute(sql.BEGIN)
            self._connection.execute(sql.SETTINGS)
            chosen = self._read(limit)
            while chosen is not None and chosen.bytes > 2 * most_bytes and len(chosen.ids) > 1:
                chosen = self._read(max(1, len(chosen.ids) * most_bytes // chosen.bytes))
            self._check(term, holder)
        return chosen

    def doubtful(
        self, ids: tuple[int, int], shares: list[tuple[Share, TopicLimits | None]], rules: DrainRules
    ) -> list[tuple[Decoded, int | None]]:
        """The first rows of these shares within `ids` that may be poison, each with its value's number of bytes."""
        query = sql.doubtful(self._table, self.shape, ids, shares, rules, _DOUBTFUL_RECORDS)
        with database_errors("inspect rows of the outbox"):
            rows = copy_rows(self._connection, query, _SILENCE_S)
        found: list[tuple[Decoded, int | None]] = []
        for record in decode(b"".join(raw for _, _, raw in rows)):
            value = None if isinstance(record, Broken) else record.value
            found.append((record, None if value is None else int(value)))
        return found

    def end(self) -> None:
        """Ends the transaction."""
        with database_errors("end a slice"):
            self._connection.rollback()

    def _read(self, limit: int) -> SliceRows | None:
        rows = self._connection.execute(sql.choose(self._table, self.shape, limit), binary=True).fetchall()
        if not rows:
            return None
        snapshot = self._connection.execute("SELECT pg_export_snapshot()").fetchone()
        highest = self._connection.execute(f"SELECT max(id) FROM {self._table.sql}").fetchone()
        assert snapshot is not None
        assert highest is not None
        ids = sorted(number for row in rows for number in row[10])
        shares = []
        for topic, records, size, largest, low, high, fewest, most, odd, *_ in rows:
            places = None if low is None else (low, high)
            shares.append(Share(topic, records, size, largest, places, (fewest, most), odd))
        return SliceRows(ids, shares, snapshot[0], highest[0] - ids[-1], any(row[9] for row in rows))

    def _check(self, term: int, holder: UUID) -> None:
        row = self._connection.execute(sql.standing(self._table, self.shape)).fetchone()
        if row is None or (row[0], row[1]) != (term, holder):
            raise TermLost(f"term {term} of this drain has ended: another process has taken it")
        file = row[2]
        if self._file is not None and file != self._file:
            raise OutboxError("the ids of the outbox have started again", hint="start the drain again")
        self._file = file
