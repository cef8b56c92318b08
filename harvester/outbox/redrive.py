"""Puts quarantined records back into the outbox, in the order of their keys or not at all.

The new row and the removal are one transaction, so two redrives of one record make one row. The new row has a new id
(protocol P9) and a header that holds its origin. While order is to be kept, the outbox is locked against writers and
purges: nobody can commit a row with an id between ours and the ones checked. The lock is held for a few statements and
waited for only briefly, because all writers wait behind it.

Reading an archive may take minutes, so most of it is read before that, without the lock. A purge that archives
something has used the outbox before it ends, and is one transaction, whose beginning is its rows' `purged_at`. So once
the lock has been had for a moment, every later purge began no earlier than the wait for it, give or take the time
between a transaction's first statement and its purge. With the lock, only rows from then on are left to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from harvester.errors import OrderNotKept, OutboxError
from harvester.outbox.connection import database_errors, execute
from harvester.outbox.key_order import ORIGIN_HEADER, KeyNeighbours, Obstacle, Position, Reason, obstacle, summary
from harvester.outbox.quarantine import (
    Connection,
    DeadLetterFilter,
    DeadRecord,
    Identity,
    list_dead,
    lock_dead,
    split,
)
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable, as_bytes

LOCK_TIMEOUT_MS = 2_000
_LOCKED_MS = 30_000  # for each statement, while writers wait
_SLACK = timedelta(minutes=1)
_CURRENT_EPOCH = 2**31  # of the incarnation in the term row; others are lower, in the order of their first quarantine

_FIELDS = "id, kafka_key, kafka_header_keys, kafka_header_values"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


@dataclass(frozen=True, slots=True)
class PlannedRedrive:
    """A record, its position, and what prevents putting it back in order."""

    record: DeadRecord
    position: Position
    obstacle: Obstacle | None

    @property
    def is_unknown(self) -> bool:
        """Whether it is unknown if the order would be kept."""
        return self.obstacle is not None and self.obstacle.reason is Reason.UNKNOWN


@dataclass(frozen=True, slots=True)
class Redriven:
    """A record that was put back, its new id, and the obstacle, if it was put back regardless."""

    record: DeadRecord
    new_id: int
    obstacle: Obstacle | None = None


def plan(
    connection: Connection, table: OutboxTable, shape: OutboxShape, chosen: DeadLetterFilter, *, archive: bool
) -> list[PlannedRedrive]:
    """What a redrive of these records would do, in its order; changes and locks nothing.

    `archive`: purges write one now. If it holds anything older, it is assumed that it was never off since.
    """
    records = list_dead(connection, table, shape, chosen, oldest_first=True)
    with database_errors(f"plan a redrive into {table}"):
        return _plan(connection, table, shape, records, archive=archive)


def redrive(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    identities: Sequence[Identity],
    *,
    archive: bool,
    out_of_order: bool = False,
    unknown_ok: bool = False,
) -> list[Redriven]:
    """Put these records back, in order within each key; returns those that still existed, with their new ids.

    Raises OrderNotKept, and changes nothing, if one of them cannot keep its key's order, unless `out_of_order`. With
    `unknown_ok`, records for which this is unknown go back, too. Raises DatabaseUnavailable if a writer holds the
    outbox for too long.
    """
    with database_errors(f"put records back into {table}"):
        known = _read_ahead(connection, table, shape, identities) if archive and not out_of_order else None
        return _redrive(
            connection, table, shape, identities, known,
            archive=archive, out_of_order=out_of_order, unknown_ok=unknown_ok,
        )  # fmt: skip


def _redrive(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    identities: Sequence[Identity],
    known: _Archived | None,
    *,
    archive: bool,
    out_of_order: bool,
    unknown_ok: bool,
) -> list[Redriven]:
    with connection.transaction():
        if not out_of_order:
            _lock(connection, table)
        records = lock_dead(connection, table, shape, identities)
        planned = _plan(connection, table, shape, records, archive=archive, known=known)
        blocked = [entry.obstacle for entry in planned if entry.obstacle and not (unknown_ok and entry.is_unknown)]
        if blocked and not out_of_order:
            raise OrderNotKept(len(blocked), len(planned), summary(blocked))
        if not shape.has_partition and any(record.partition is not None for record in records):
            raise OutboxError(f"records name a partition, but {table} has no column kafka_partition any more")
        incarnations, ids = split([entry.record.identity for entry in planned])
        new_ids = sorted(row[0] for row in execute(connection, _move(table, shape), incarnations, ids))
        if len(new_ids) != len(planned):
            raise OutboxError(
                f"{table} took {len(new_ids)} of {len(planned)} records: nothing was put back",
                hint="a trigger or rule of the table suppressed the others",
            )
        # One INSERT takes its ids from the sequence in the order of its rows: ascending, as planned.
        return [Redriven(entry.record, new_id, entry.obstacle) for entry, new_id in zip(planned, new_ids, strict=True)]


def _lock(connection: Connection, table: OutboxTable) -> None:
    """Locks the outbox against writers and purges until the transaction ends."""
    connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
    connection.execute(f"SET LOCAL statement_timeout = {_LOCKED_MS}")
    connection.execute(f"LOCK TABLE {table.sql} IN SHARE ROW EXCLUSIVE MODE")


@dataclass(frozen=True, slots=True)
class _Archived:
    """The archive's rows of some keys. `begin`: when its oldest row was purged; `last`: the last position of each key.

    `epochs`: the incarnations, in the order in which the positions rank them. `until`: when it was read; the rows of
    purges that have ended by then are all in it.
    """

    keys: frozenset[bytes]
    epochs: tuple[tuple[object, ...], ...]
    begin: datetime | None
    last: Mapping[bytes, Position]
    until: datetime


def _read_ahead(
    connection: Connection, table: OutboxTable, shape: OutboxShape, identities: Sequence[Identity]
) -> _Archived | None:
    """Reads the archive's last positions of these records' keys, without the lock."""
    chosen = split(identities)
    with connection.transaction():
        until: datetime = execute(connection, "SELECT clock_timestamp()").fetchall()[0][0]
        _lock(connection, table)  # for a moment: every purge that began before has ended
    query = (
        f"SELECT {as_bytes('kafka_key', shape.key_type)}, min(quarantined_at) FROM {table.quarantine}"
        " WHERE (incarnation, id) IN (SELECT * FROM unnest($1::uuid[], $2::bigint[])) GROUP BY kafka_key"
    )
    rows = execute(connection, query, *chosen).fetchall()
    keys = frozenset(bytes(row[0]) for row in rows if row[0] is not None)
    if not keys:
        return None
    epochs, begin = _ranked(connection, table), _begin(connection, table)
    last = _last_archived(connection, table, shape, chosen, min(row[1] for row in rows))
    return _Archived(keys, epochs, begin, last, until)


def _begin(connection: Connection, table: OutboxTable) -> datetime | None:
    row = execute(connection, f"SELECT purged_at FROM {table.archive} ORDER BY id LIMIT 1").fetchone()
    return row[0] if row is not None else None


def _last_archived(
    connection: Connection, table: OutboxTable, shape: OutboxShape, chosen: tuple[object, object], since: datetime
) -> dict[bytes, Position]:
    rows = f"SELECT incarnation, {_FIELDS} FROM {table.archive} WHERE purged_at >= '{since.isoformat()}'"
    return _extremes(connection, table, shape, chosen, "max", rows, "", bytes_key=True)


def _ranked(connection: Connection, table: OutboxTable) -> tuple[tuple[object, ...], ...]:
    query = f"{_epochs(table)}SELECT incarnation, epoch FROM e ORDER BY epoch, incarnation"
    return tuple(execute(connection, query, [], []).fetchall())


def _plan(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    records: Sequence[DeadRecord],
    *,
    archive: bool,
    known: _Archived | None = None,
) -> list[PlannedRedrive]:
    """`known`: what was read of the archive before; None: nothing."""
    if not records:
        return []
    incarnations, ids = split([record.identity for record in records])
    chosen = (incarnations, ids)
    positions: dict[Identity, Position] = {
        (row[0], row[1]): (row[2][0], row[2][1])
        for row in execute(connection, f"{_epochs(table)}{_positions(table)}", *chosen)
    }
    outbox = f"SELECT NULL::uuid AS incarnation, {_FIELDS} FROM {columns.published(table, shape)} o"
    quarantine = f"SELECT incarnation, {_FIELDS} FROM {table.quarantine}"
    waiting = _extremes(connection, table, shape, chosen, "max", outbox, "")
    not_chosen = " AND (x.incarnation, x.id) NOT IN (SELECT * FROM chosen)"
    left = _extremes(connection, table, shape, chosen, "min", quarantine, not_chosen)
    archive_from, published = None, dict[bytes, Position]()
    if archive:
        oldest = min(record.quarantined_at for record in records)
        # Somebody may have changed a record's key since then, or a take-over the ranks of the incarnations.
        if (
            known is not None
            and known.keys >= {record.key for record in records if record.key is not None}
            and known.epochs == _ranked(connection, table)
        ):
            archive_from = known.begin
            newer = _last_archived(connection, table, shape, chosen, max(oldest, known.until - _SLACK))
            published = {**known.last}
            for key, position in newer.items():
                published[key] = max(position, published.get(key, position))
        else:
            archive_from = _begin(connection, table)
            published = _last_archived(connection, table, shape, chosen, oldest)
    newest = _newest(connection, table, shape)

    def judge(record: DeadRecord) -> Obstacle | None:
        if record.key is None:
            return None  # without a key there is no order
        found = KeyNeighbours(
            last_waiting=waiting.get(record.key),
            first_left=left.get(record.key),
            last_published=published.get(record.key),
            archive_reaches=archive_from is not None and archive_from <= record.quarantined_at,
            is_newest=newest is not None and record.incarnation == newest[0] and record.id >= newest[1],
        )
        return obstacle(positions[record.identity], found)

    # Another redrive may have put some of them back since they were listed.
    there = [record for record in records if record.identity in positions]
    planned = [PlannedRedrive(record, positions[record.identity], judge(record)) for record in there]
    return sorted(planned, key=lambda entry: (entry.position, entry.record.identity))


def _newest(connection: Connection, table: OutboxTable, shape: OutboxShape) -> tuple[object, int] | None:
    if shape.sequence is None:
        return None
    query = f"SELECT t.incarnation, s.last_value FROM {table.term} t, {shape.sequence} s"
    return execute(connection, query).fetchone()


def _epochs(table: OutboxTable) -> str:
    """CTEs: `chosen` from the parameters, and `e`, which ranks incarnations."""
    return (
        "WITH chosen AS (SELECT * FROM unnest($1::uuid[], $2::bigint[]) AS c(incarnation, id)),"
        f" e AS (SELECT incarnation, row_number() OVER (ORDER BY min(quarantined_at), incarnation) AS epoch"
        f" FROM {table.quarantine} WHERE incarnation <> (SELECT incarnation FROM {table.term}) GROUP BY incarnation"
        f" UNION ALL SELECT incarnation, {_CURRENT_EPOCH} FROM {table.term}) "
    )


# The position of x, a row with id, incarnation (NULL: the current one) and headers: that of its origin, if known. A
# header array of several dimensions, which cannot be published, cannot be searched.
_POSITION = f"""
    LEFT JOIN LATERAL (SELECT regexp_match(
        (x.kafka_header_values::text[])[CASE WHEN array_ndims(x.kafka_header_keys) = 1 THEN
            array_position(x.kafka_header_keys::text[], '{ORIGIN_HEADER}') END],
        '^({_UUID}):([0-9]{{1,18}})$') AS origin) h ON true
    LEFT JOIN e eo ON eo.incarnation::text = h.origin[1]
    LEFT JOIN e ex ON ex.incarnation = x.incarnation
    CROSS JOIN LATERAL (SELECT CASE WHEN eo.epoch IS NOT NULL THEN ARRAY[eo.epoch, h.origin[2]::bigint]
        ELSE ARRAY[coalesce(ex.epoch, {_CURRENT_EPOCH}), x.id::bigint] END AS place) p"""


def _positions(table: OutboxTable) -> str:
    return (
        f"SELECT x.incarnation, x.id, p.place FROM {table.quarantine} x{_POSITION}"
        " WHERE (x.incarnation, x.id) IN (SELECT * FROM chosen)"
    )


def _extremes(
    connection: Connection,
    table: OutboxTable,
    shape: OutboxShape,
    chosen: tuple[object, object],
    which: str,
    rows: str,
    condition: str,
    *,
    bytes_key: bool = False,
) -> dict[bytes, Position]:
    """The first or last position of each chosen key among these rows. One pass, however many are chosen."""
    key = as_bytes("k.kafka_key", shape.key_type)
    same = f"x.kafka_key = {key}" if bytes_key else "x.kafka_key = k.kafka_key"
    query = (
        f"{_epochs(table)}, k AS (SELECT DISTINCT q.kafka_key FROM {table.quarantine} q"
        " JOIN chosen c ON c.incarnation = q.incarnation AND c.id = q.id WHERE q.kafka_key IS NOT NULL)"
        f" SELECT {key}, {which}(p.place) FROM k JOIN ({rows}) x ON {same}{_POSITION}"
        f" WHERE true{condition} GROUP BY k.kafka_key"
    )
    return {bytes(row[0]): (row[1][0], row[1][1]) for row in execute(connection, query, *chosen)}


def _move(table: OutboxTable, shape: OutboxShape) -> str:
    """Quarantine → outbox in the order of the parameters; mismatched headers stay as they are."""
    extra, value = (", kafka_partition", ", g.kafka_partition") if shape.has_partition else ("", "")
    fits = (
        "coalesce(array_ndims(g.kafka_header_keys), 1) = 1 AND coalesce(array_ndims(g.kafka_header_values), 1) = 1"
        " AND coalesce(cardinality(g.kafka_header_keys), 0) = coalesce(cardinality(g.kafka_header_values), 0)"
        f" AND '{ORIGIN_HEADER}' <> ALL (coalesce(g.kafka_header_keys, '{{}}'))"
    )

    def header(column: str, item: str) -> str:
        return f"CASE WHEN {fits} THEN array_append(g.{column}, {item}) ELSE g.{column} END"

    names = header("kafka_header_keys", f"'{ORIGIN_HEADER}'::text")
    values = header("kafka_header_values", "g.incarnation::text || chr(58) || g.id")
    fields = columns.stored(shape, "g.kafka_key", "g.kafka_value", names, values, unpaired=True)
    return (
        "WITH chosen AS (SELECT * FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY AS c(incarnation, id, place)),"
        f" g AS (DELETE FROM {table.quarantine} q USING chosen c WHERE q.incarnation = c.incarnation AND q.id = c.id"
        " RETURNING q.*, c.place)"
        f" INSERT INTO {table.sql} (create_time, kafka_topic, {columns.written(shape)}{extra})"
        f" SELECT now(), g.kafka_topic, {fields}{value}"
        " FROM g ORDER BY g.place RETURNING id"
    )
