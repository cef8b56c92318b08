"""The side table `<outbox>_pump`: how many records of each key were committed. This is the ground truth.

Columns: key (primary key), topic, count. A count is raised in the transaction that inserts the records it counts,
under a lock on its row; so the records of one key are serial, and the table is right whatever happens to the pump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from harvester.errors import ConfigurationError, OutboxError, Problem, SchemaError
from harvester.origin import decode
from harvester.outbox.connection import database_errors
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.verify.load import PREFIX_BYTES, ROLLED_BACK, Load, key_name, parse
from harvester.verify.sequences import Stream

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Truth:
    """One snapshot of the database. `pending` and `quarantined`: key -> numbers found there.

    `given_up`: streams and sequence numbers of what is in quarantine, for `sequences`.
    `foreign` says which rows of outbox and quarantine are not the pump's, at most a few of them, and
    `foreign_rows` how many there are.
    """

    counts: Mapping[str, int]
    topics: tuple[str, ...]
    pending: Mapping[str, set[int]]
    quarantined: Mapping[str, set[int]]
    foreign_rows: int
    foreign: tuple[str, ...]
    given_up: tuple[tuple[Stream, int], ...] = ()


def side_table(table: OutboxTable, shape: OutboxShape) -> OutboxTable:
    """The name of the side table; it stands in the schema in which the outbox was found."""
    return OutboxTable(schema=shape.schema, name=f"{table.name}_pump")


def prepare(connection: Connection, table: OutboxTable, shape: OutboxShape, load: Load, *, append: bool) -> None:
    """Make the side table ready for a load, or refuse; needs an autocommit connection.

    Raises OutboxError when the outbox holds records that no pump wrote, when an earlier pump's counts are there and
    `append` is false, or when a key would change its topic; ConfigurationError when the values do not fit.
    """
    _check_sizes(shape, load)
    side = side_table(table, shape)
    with database_errors(f"prepare {side.sql}"), connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (side.sql,))
        # fillfactor leaves room on each page, so that counting up stays within it (heap-only updates).
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {side.sql} (key text PRIMARY KEY, topic text NOT NULL,"
            " count bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)"
        )
        counted = _one(connection, f"SELECT coalesce(sum(count), 0) FROM {side.sql}")[0]
        if counted and not append:
            raise OutboxError(
                f"{side.sql} counts {counted} records of an earlier pump",
                hint=f"continue it with --append, or begin anew: empty {table.sql} and DROP TABLE {side.sql}",
            )
        strangers, first = _one(connection, _strangers_sql(table, side, shape))
        if strangers:
            raise OutboxError(
                f"{table.sql} holds {strangers} records that no pump has counted (the first has id {first})",
                hint="drain it, or give the pump an outbox_table of its own",
            )
        keys = [key_name(index) for index in range(load.keys)]
        topics = [load.topics[index % len(load.topics)] for index in range(load.keys)]
        connection.execute(
            f"INSERT INTO {side.sql} (key, topic) SELECT * FROM unnest(%s::text[], %s::text[]) ON CONFLICT DO NOTHING",
            (keys, topics),
        )
        moved = connection.execute(
            f"SELECT s.key, s.topic, w.topic FROM {side.sql} s"
            " JOIN unnest(%s::text[], %s::text[]) AS w(key, topic) USING (key) WHERE s.topic <> w.topic LIMIT 1",
            (keys, topics),
        ).fetchone()
        if moved:
            raise OutboxError(
                f"key {moved[0]} went to topic {moved[1]!r} so far and would now go to {moved[2]!r}",
                hint="name the same topics in the same order as before",
            )
    # Without statistics the plan of the writers' statement is a guess that suits no size.
    with database_errors(f"analyze {side.sql}"):
        connection.execute(f"ANALYZE {side.sql}")


def read_truth(connection: Connection, table: OutboxTable, shape: OutboxShape) -> Truth:
    """Everything the judge needs from the database, in one snapshot; needs an autocommit connection.

    Raises SchemaError when no pump has run on this outbox.
    """
    side = side_table(table, shape)
    pending, quarantined = _Rows(), _Rows()
    with database_errors(f"read {side.sql}"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        _require(connection, side)
        rows = connection.execute(f"SELECT key, count, topic FROM {side.sql}").fetchall()
        for name, found in ((table.sql, pending), (table.quarantine, quarantined)):
            with connection.cursor(name="pumped") as cursor:
                cursor.itersize = 20_000
                cursor.execute(f"SELECT id, kafka_key, {_prefix(shape)} FROM {name}")
                for row in cursor:
                    found.add(name, *row)
        origins = connection.execute(f"SELECT origin FROM {table.quarantine} WHERE origin IS NOT NULL").fetchall()
    return Truth(
        counts={key: count for key, count, _ in rows},
        topics=tuple(sorted({topic for _, count, topic in rows if count})),
        pending=pending.numbers,
        quarantined=quarantined.numbers,
        foreign_rows=pending.foreign_rows + quarantined.foreign_rows,
        foreign=tuple((pending.foreign + quarantined.foreign)[:10]),
        given_up=tuple((Stream.of(origin), origin.sequence) for (raw,) in origins if (origin := decode(raw))),
    )


def read_counts(connection: Connection, table: OutboxTable, shape: OutboxShape) -> dict[str, int]:
    """Only the counts, as they are now."""
    side = side_table(table, shape)
    with database_errors(f"read {side.sql}"):
        return dict(connection.execute(f"SELECT key, count FROM {side.sql}").fetchall())


class _Rows:
    """What stands in one table, sorted into the pump's and others'."""

    def __init__(self) -> None:
        self.numbers: dict[str, set[int]] = {}
        self.foreign: list[str] = []
        self.foreign_rows = 0

    def add(self, table: str, row_id: int, key: str | bytes | None, prefix: str | bytes | None) -> None:
        pumped = parse(prefix.encode() if isinstance(prefix, str) else prefix)
        if pumped is None or key is None or pumped.kind == ROLLED_BACK:
            self.foreign_rows += 1
            if len(self.foreign) < 10:
                self.foreign.append(f"row {row_id} of {table}")
            return
        name = key.decode(errors="replace") if isinstance(key, bytes) else key
        self.numbers.setdefault(name, set()).add(pumped.seq)


def _check_sizes(shape: OutboxShape, load: Load) -> None:
    problems = []
    if shape.value_max is not None and load.value_bytes > shape.value_max:
        problems.append(Problem("--size", f"{load.value_bytes} bytes do not fit", f"up to {shape.value_max}"))
    longest = len(key_name(load.keys - 1))
    if shape.key_max is not None and longest > shape.key_max:
        problems.append(Problem("--keys", f"keys of {longest} characters do not fit", f"up to {shape.key_max}"))
    if problems:
        raise ConfigurationError(problems, hint="the outbox's columns limit key and value")


def _require(connection: Connection, side: OutboxTable) -> None:
    if _one(connection, "SELECT to_regclass(%s)", side.sql)[0] is None:
        raise SchemaError(
            f"there is no table {side.sql}: no pump has written to this outbox",
            hint="`harvester pump` writes records that can be verified",
        )


def _prefix(shape: OutboxShape) -> str:
    if shape.value_type == "bytea":
        return f"substring(kafka_value from 1 for {PREFIX_BYTES})"
    return f"left(kafka_value, {PREFIX_BYTES})"


def _strangers_sql(table: OutboxTable, side: OutboxTable, shape: OutboxShape) -> str:
    key = "encode(o.kafka_key, 'escape')" if shape.key_type == "bytea" else "o.kafka_key"
    prefix = _prefix(shape)
    if shape.value_type == "bytea":
        prefix = f"encode({prefix}, 'escape')"
    # CASE, not OR: the cast must not see what the pattern has not approved.
    return f"""
        SELECT count(*), min(id) FROM (
            SELECT o.id, p.count, {key} AS key, p.key AS known, coalesce({prefix}, '') AS prefix
            FROM {table.sql} o LEFT JOIN {side.sql} p ON p.key = {key}) AS found
        WHERE CASE WHEN known IS NULL THEN true
                   WHEN prefix !~ '^[0-9]{{1,18}}:[0-9]+:[cl]:' THEN true
                   ELSE split_part(prefix, ':', 1)::bigint > count END"""


def _one(connection: Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    row = connection.execute(query, parameters or None).fetchone()
    if row is None:
        raise SchemaError(f"no answer to: {query}")
    return tuple(row)
