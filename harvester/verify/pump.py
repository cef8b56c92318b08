"""Writes a planned load into the outbox with several writers, and counts it in the side table `<outbox>_pump`.

A transaction is one statement: it locks the rows of its keys in the side table in key order (to avoid deadlocks),
increments their counts and inserts the records, numbered accordingly, in the order of the plan. The server builds the
values, so little is sent over the connection.

The side table (key, topic, count) is the ground truth. A count is raised in the transaction that inserts the counted
records, under a lock on its row; so the records of one key are serialised, and the table is right whatever happens to
the pump.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import psycopg

from harvester.errors import ConfigurationError, OutboxError, Problem, SchemaError
from harvester.outbox.connection import Connection, connect, database_errors, fetch_row
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable, doubled
from harvester.verify.load import COMMITTED, LATE, PREFIX_BYTES, ROLLED_BACK, Ending, Load, due_s, key_name, plan

# Others may be waiting for the keys of a late transaction and so be unable to overtake it: then it gives up.
LATE_BOUND_S = 0.05
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class PumpReport:
    """What was done. `records` are committed; `overtaken` counts late transactions that a larger id came before."""

    records: int
    transactions: int
    late: int
    overtaken: int
    rolled_back_records: int
    duration_s: float
    complete: bool

    @property
    def rate_per_s(self) -> float:
        """Committed records per second."""
        return self.records / self.duration_s if self.duration_s > 0 else 0.0


def pump(
    dsn: str,
    table: OutboxTable,
    load: Load,
    *,
    append: bool = False,
    stop: threading.Event | None = None,
    on_progress: Callable[[int], None] = lambda records: None,
) -> PumpReport:
    """Write a load; returns early, with a correct report, if `stop` is set.

    `on_progress` is called with the number of committed records on the calling thread, some 20 times a second. Raises
    what `prepare` raises, SchemaError, and DatabaseUnavailable; records committed before an error remain and are
    counted, and another pump with `append` can continue from there.
    """
    with connect(dsn, application_name="harvester pump") as connection:
        shape = inspect(connection, table)
        prepare(connection, table, shape, load, append=append)
    run = _Run(dsn, table, shape, load, stop or threading.Event())
    return run.perform(on_progress)


def side_table(table: OutboxTable, shape: OutboxShape) -> OutboxTable:
    """The name of the side table, which is in the outbox's schema."""
    return OutboxTable(schema=shape.schema, name=f"{table.name}_pump")


def prepare(connection: Connection, table: OutboxTable, shape: OutboxShape, load: Load, *, append: bool) -> None:
    """Prepare the side table for a load, or refuse; requires an autocommit connection.

    Raises OutboxError if the outbox contains records that no pump wrote, if an earlier pump's counts exist and `append`
    is false, or if a key would change its topic; ConfigurationError if the values do not fit.
    """
    _check_sizes(shape, load)
    side = side_table(table, shape)
    with database_errors(f"prepare {side.sql}"), connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (side.sql,))
        # fillfactor leaves room on each page, so that updates of counts stay within it (heap-only updates).
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {side.sql} (key text PRIMARY KEY, topic text NOT NULL,"
            " count bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)"
        )
        counted = fetch_row(connection, f"SELECT coalesce(sum(count), 0) FROM {side.sql}")[0]
        if counted and not append:
            raise OutboxError(
                f"{side.sql} counts {counted} records of an earlier pump",
                hint=f"continue it with --append, or start over: empty {table.sql} and DROP TABLE {side.sql}",
            )
        strangers, first = fetch_row(connection, _strangers_sql(table, side, shape))
        if strangers:
            raise OutboxError(
                f"{table.sql} holds {strangers} records that no pump has counted (the first has id {first})",
                hint="drain the outbox, or give the pump its own outbox_table",
            )
        keys = [key_name(index) for index in range(load.keys)]
        topics = [load.topics[index % len(load.topics)] for index in range(load.keys)]
        connection.execute(
            f"INSERT INTO {doubled(side.sql)} (key, topic) SELECT * FROM unnest(%s::text[], %s::text[])"
            " ON CONFLICT DO NOTHING",
            (keys, topics),
        )
        moved = connection.execute(
            f"SELECT s.key, s.topic, w.topic FROM {doubled(side.sql)} s"
            " JOIN unnest(%s::text[], %s::text[]) AS w(key, topic) USING (key) WHERE s.topic <> w.topic LIMIT 1",
            (keys, topics),
        ).fetchone()
        if moved:
            raise OutboxError(
                f"key {moved[0]} went to topic {moved[1]!r} so far, but would now go to {moved[2]!r}",
                hint="name the same topics in the same order as before",
            )
    # Without statistics, the plan of the writers' statement is a guess that suits no size.
    with database_errors(f"analyze {side.sql}"):
        connection.execute(f"ANALYZE {side.sql}")


def _check_sizes(shape: OutboxShape, load: Load) -> None:
    for column, kind in (("kafka_key", shape.key_stored), ("kafka_value", shape.value_stored)):
        if kind is not None:
            raise SchemaError(
                f"the pump writes plain text, which {column}, of type {kind}, does not accept",
                hint="give the pump its own outbox_table",
            )
    problems = []
    if shape.value_max is not None and load.value_bytes > shape.value_max:
        problems.append(Problem("--size", f"{load.value_bytes} bytes do not fit", f"up to {shape.value_max}"))
    longest = len(key_name(load.keys - 1))
    if shape.key_max is not None and longest > shape.key_max:
        problems.append(Problem("--keys", f"keys of {longest} characters do not fit", f"up to {shape.key_max}"))
    if problems:
        raise ConfigurationError(problems, hint="choose values that fit the outbox's columns")


def prefix_sql(shape: OutboxShape) -> str:
    """The beginning of a value, sufficient for `parse`."""
    if shape.value_type == "bytea":
        return f"substring(kafka_value from 1 for {PREFIX_BYTES})"
    return f"left(kafka_value, {PREFIX_BYTES})"


def _strangers_sql(table: OutboxTable, side: OutboxTable, shape: OutboxShape) -> str:
    key = "encode(o.kafka_key, 'escape')" if shape.key_type == "bytea" else "o.kafka_key"
    prefix = prefix_sql(shape)
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


class _Run:
    def __init__(self, dsn: str, table: OutboxTable, shape: OutboxShape, load: Load, stop: threading.Event) -> None:
        self._dsn = dsn
        self._table = table
        self._load = load
        self._stop = stop
        self._sql = _statement(table, shape, load)
        self._names = [key_name(index) for index in range(load.keys)]
        self._transactions = plan(load)
        self._taking = threading.Lock()
        self._failed = threading.Event()
        self._began_at = 0.0
        # Guarded by _changed; the highest committed id shows late transactions that they were overtaken.
        self._changed = threading.Condition()
        self._highest_id = 0
        self._records = self._committed = self._late = self._overtaken = self._rolled_back = 0

    def perform(self, on_progress: Callable[[int], None]) -> PumpReport:
        self._began_at = time.monotonic()
        with ThreadPoolExecutor(self._load.writers, thread_name_prefix="pump") as pool:
            writing = [pool.submit(self._write) for _ in range(self._load.writers)]
            try:
                while wait(writing, _TICK_S).not_done:
                    on_progress(self._records)
                on_progress(self._records)
            finally:
                self._failed.set()
        for written in writing:
            written.result()
        return PumpReport(
            records=self._records,
            transactions=self._committed,
            late=self._late,
            overtaken=self._overtaken,
            rolled_back_records=self._rolled_back,
            duration_s=time.monotonic() - self._began_at,
            complete=self._records == self._load.records,
        )

    def _write(self) -> None:
        """One writer, from connecting to the end of the plan."""
        try:
            with (
                connect(self._dsn, application_name="harvester pump") as connection,
                database_errors(f"write to {self._table.sql}"),
            ):
                while not self._ending():
                    with self._taking:
                        transaction = next(self._transactions, None)
                    if transaction is None:
                        return
                    if not self._wait_until(self._began_at + due_s(self._load, transaction)):
                        return
                    self._perform(connection, [self._names[key] for key in transaction.keys], transaction.ending)
        except Exception:
            self._failed.set()  # ends the other writers; the caller's thread raises it
            raise

    def _perform(self, connection: Connection, keys: list[str], ending: Ending) -> None:
        if ending is Ending.COMMIT:
            self._count(len(keys), self._insert(connection, keys, COMMITTED))
        elif ending is Ending.LATE:
            with connection.transaction():
                last_id = self._insert(connection, keys, LATE)
                overtaken = self._wait_overtaken(last_id)
            with self._changed:
                self._late += 1
                self._overtaken += overtaken
            self._count(len(keys), last_id)
        else:
            with connection.transaction(force_rollback=True):
                self._insert(connection, keys, ROLLED_BACK)
            with self._changed:
                self._rolled_back += len(keys)

    def _insert(self, connection: Connection, keys: list[str], kind: str) -> int:
        row = connection.execute(self._sql, {"keys": keys, "kind": kind}).fetchone()
        inserted, last_id = row if row is not None else (0, 0)
        if inserted != len(keys):
            raise psycopg.DataError(f"{inserted} of {len(keys)} records inserted: a key's row is missing")
        return int(last_id)

    def _count(self, records: int, last_id: int) -> None:
        with self._changed:
            self._records += records
            self._committed += 1
            if last_id > self._highest_id:
                self._highest_id = last_id
                self._changed.notify_all()

    def _wait_overtaken(self, last_id: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._highest_id > last_id, LATE_BOUND_S)

    def _wait_until(self, deadline: float) -> bool:
        """False if the run ends before that."""
        while not self._ending():
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            self._stop.wait(min(left, _TICK_S))
        return False

    def _ending(self) -> bool:
        return self._stop.is_set() or self._failed.is_set()


def _statement(table: OutboxTable, shape: OutboxShape, load: Load) -> str:
    """Parameters: keys (text[], in order, may repeat) and kind. Returns (records inserted, largest id)."""
    side = doubled(side_table(table, shape).sql)
    value = (
        "rpad(seq || ':' || (extract(epoch FROM clock_timestamp()) * 1000000)::bigint || ':' || %(kind)s::text || ':',"
        f" {load.value_bytes}, '.')"
    )
    value = f"convert_to({value}, 'UTF8')" if shape.value_type == "bytea" else value
    key = "convert_to(key, 'UTF8')" if shape.key_type == "bytea" else "key"
    header_keys = ", ".join(f"'pump-{index}'" for index in range(load.headers))
    header_values = ", ".join(f"'seed {load.seed}'" for _ in range(load.headers))
    fields = columns.stored(shape, key, value, f"ARRAY[{header_keys}]::text[]", f"ARRAY[{header_values}]::text[]")
    return f"""
        WITH wanted AS (
            SELECT key, place FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS w(key, place)
        ), locked AS MATERIALIZED (
            SELECT key, topic, count FROM {side} WHERE key = ANY(%(keys)s::text[]) ORDER BY key FOR UPDATE
        ), counted AS (
            UPDATE {side} AS s SET count = locked.count + more.rows
            FROM locked JOIN (SELECT key, count(*) AS rows FROM wanted GROUP BY key) AS more USING (key)
            WHERE s.key = locked.key
        ), numbered AS (
            SELECT place, key, topic, count + row_number() OVER (PARTITION BY key ORDER BY place) AS seq
            FROM wanted JOIN locked USING (key)
        ), inserted AS (
            INSERT INTO {doubled(table.sql)} (create_time, kafka_topic, {columns.written(shape)})
            SELECT clock_timestamp(), topic, {fields}
            FROM numbered ORDER BY place
            RETURNING id
        ) SELECT count(*), coalesce(max(id), 0) FROM inserted"""
