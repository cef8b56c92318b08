"""PostgreSQL and Kafka alone: the strongest loops that we can write, each over one connection, in a worker.

Marking and reading come in two forms, of which the better one counts: a binary COPY (which cannot be prepared or
pipelined), and a prepared statement with binary results in libpq's pipeline, where the server works on the next batch
while this process looks at the last. Deletes are prepared, `= ANY($1)`, and committed one by one, as purges are. These
loops fetch whole rows and look only at the id. A third form, `cursor`, is an ordinary Python program: the driver's
cursor, prepared and binary, all columns as Python values, one statement after the other.

A loop returns its progress, [[seconds of CLOCK_MONOTONIC, records so far], …], from its start to its end.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from struct import Struct, pack
from typing import Any

import psycopg
from psycopg import pq

from scripts.benchmarks._worker import Gate

Progress = list[tuple[float, int]]

_COLUMNS = "id, kafka_key, kafka_topic, kafka_value, kafka_header_keys, kafka_header_values, create_time"
_ARRAY = Struct(">iiiii")  # dimensions, has NULLs, element type, elements, lower bound
_BIGINT, _UUID, _BIGINT_ARRAY = 20, 2950, 1016
_ID = Struct(">q")
_COPY_HEADER_BYTES = 19
_COPY_ID = Struct(">hiq")  # field count, length, id
DELETE = b"DELETE FROM outbox WHERE id = ANY ($1)"
# The mark of a relay that writes: the next rows from a cursor that lags one batch behind, so the condition is needed.
_MARK = (
    "UPDATE outbox SET leader_id = {leader} WHERE id = ANY (ARRAY(SELECT id FROM outbox WHERE id > {high}"
    " AND leader_id IS DISTINCT FROM {leader} ORDER BY id LIMIT {batch} FOR UPDATE)) RETURNING " + _COLUMNS
)
_READ = "SELECT " + _COLUMNS + " FROM outbox WHERE id > {high} ORDER BY id LIMIT {batch}"
SETTINGS = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off"


def mark_delete(gate: Gate, dsn: str, batch: int, form: str) -> Progress:
    """Mark by UPDATE … RETURNING and delete, until nothing is left."""
    return _loop(gate, dsn, batch, form, _MARK)


def read_delete(gate: Gate, dsn: str, batch: int, form: str) -> Progress:
    """SELECT and delete, until nothing is left."""
    return _loop(gate, dsn, batch, form, _READ)


def _loop(gate: Gate, dsn: str, batch: int, form: str, template: str) -> Progress:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SETTINGS)
        pgconn = connection.pgconn
        check(pgconn.prepare(b"d", DELETE, [_BIGINT_ARRAY]))
        leader = uuid.uuid4()
        if form == "pipeline":
            text = template.format(leader="$2", high="$1", batch=batch)
            check(pgconn.prepare(b"m", text.encode(), [_BIGINT, _UUID] if "$2" in text else [_BIGINT]))
        gate.ready()
        progress: Progress = [(time.monotonic(), 0)]
        if form == "cursor":
            _by_cursor(connection, template.format(leader="%(leader)s", high="%(high)s", batch=batch), leader, progress)
        elif form == "copy":
            _by_copy(pgconn, lambda high: template.format(leader=f"'{leader}'", high=high, batch=batch), progress)
        else:
            _by_pipeline(pgconn, [leader.bytes] if template is _MARK else [], progress)
        return progress


def _by_copy(pgconn: pq.abc.PGconn, statement: Callable[[int], str], progress: Progress) -> None:
    high = done = 0
    while True:
        pgconn.send_query(f"COPY ({statement(high)}) TO STDOUT (FORMAT BINARY)".encode())
        check(pgconn.get_result())
        ids: list[int] = []
        while True:
            size, data = pgconn.get_copy_data(0)
            if size < 0:
                break
            row = bytes(data)
            if not ids and row.startswith(b"PGCOPY"):
                row = row[_COPY_HEADER_BYTES:]
            if len(row) > 2:
                ids.append(_COPY_ID.unpack_from(row)[2])
        check(pgconn.get_result())
        pgconn.get_result()
        if not ids:
            return
        high = max(ids)
        check(pgconn.exec_prepared(b"d", [bigint_array(ids)], [pq.Format.BINARY], pq.Format.BINARY))
        done += len(ids)
        progress.append((time.monotonic(), done))


def _by_cursor(connection: psycopg.Connection[Any], statement: str, leader: uuid.UUID, progress: Progress) -> None:
    high = done = 0
    with connection.cursor(binary=True) as cursor:
        while True:
            cursor.execute(statement, {"leader": leader, "high": high}, prepare=True)
            ids = [row[0] for row in cursor.fetchall()]
            if not ids:
                return
            high = max(ids)
            cursor.execute("DELETE FROM outbox WHERE id = ANY (%s)", (ids,), prepare=True)
            done += len(ids)
            progress.append((time.monotonic(), done))


def _by_pipeline(pgconn: pq.abc.PGconn, extra: list[bytes], progress: Progress) -> None:
    """The next mark and the last delete are under way while the rows of this mark are looked at.

    Two marks at a time where they see each other's mark; a read has to wait for the end of the one before.
    """
    pgconn.enter_pipeline_mode()
    sent: deque[int | None] = deque()  # None: a mark; else a delete of so many

    def send(name: bytes, values: list[bytes], rows: int | None = None) -> None:
        pgconn.send_query_prepared(name, values, [pq.Format.BINARY] * len(values), pq.Format.BINARY)
        pgconn.pipeline_sync()
        sent.append(rows)

    high = done = 0
    for _ in range(2 if extra else 1):
        send(b"m", [_ID.pack(high), *extra])
    while sent:
        deleted = sent.popleft()
        result = _pipelined(pgconn)
        if deleted is not None:
            done += deleted
            progress.append((time.monotonic(), done))
            continue
        ids = [_ID.unpack(result.get_value(row, 0) or b"")[0] for row in range(result.ntuples)]
        if ids:
            high = max(high, *ids)
            send(b"m", [_ID.pack(high), *extra])
            send(b"d", [bigint_array(ids)], len(ids))


def _pipelined(pgconn: pq.abc.PGconn) -> Any:
    """The result of one statement that has a sync of its own."""
    result = check(pgconn.get_result())
    pgconn.get_result()  # None: the end of the statement
    check(pgconn.get_result())  # the sync
    return result


def produce(gate: Gate, bootstrap: str, topic: str, records: int, keys: int, size: int) -> Progress:
    """Produce with a callback and one header each; acks=all and idempotence, as ever."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 0,
        }
    )
    producer.list_topics(topic, timeout=30)
    names = [f"k-{index}".encode() for index in range(keys)]
    value = b"." * size
    headers: list[tuple[str, str | bytes | None]] = [("source", b"bench")]
    progress: Progress = []
    done = failed = 0

    def delivered(error: Any, _message: Any) -> None:
        nonlocal done, failed
        failed += error is not None
        done += 1
        if done % 500 == 0:
            progress.append((time.monotonic(), done))

    gate.ready()
    progress.append((time.monotonic(), 0))
    for number in range(records):
        while True:
            try:
                producer.produce(topic, value, names[number % keys], on_delivery=delivered, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 500 == 0:
            producer.poll(0)
    producer.flush(120)
    if failed or done < records:
        raise SystemExit(f"{failed} of {records} records failed, {records - done} were not delivered")
    return [*progress, (time.monotonic(), done)]


def one_by_one(gate: Gate, dsn: str, bootstrap: str, topic: str, records: int) -> Progress:
    """What one key costs at the least: produce, wait for the acknowledgement, delete, wait for the commit."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "log_level": 0,
        }
    )
    producer.list_topics(topic, timeout=30)
    headers: list[tuple[str, str | bytes | None]] = [("source", b"bench")]
    with psycopg.connect(dsn, autocommit=True) as connection:
        pgconn = connection.pgconn
        check(pgconn.prepare(b"d", DELETE, [_BIGINT_ARRAY]))
        rows = connection.execute("SELECT id, kafka_value FROM outbox ORDER BY id LIMIT %s", (records,)).fetchall()
        gate.ready()
        progress: Progress = [(time.monotonic(), 0)]
        for done, (record_id, value) in enumerate(rows, 1):
            producer.produce(topic, value, b"hot", headers=headers)
            producer.flush(60)
            check(pgconn.exec_prepared(b"d", [bigint_array([record_id])], [pq.Format.BINARY], pq.Format.BINARY))
            progress.append((time.monotonic(), done))
        return progress


def bigint_array(ids: list[int]) -> bytes:
    # Each element as its length, 8, and its value: one call for all of them.
    flat = [number for record_id in sorted(ids) for number in (8, record_id)]
    return _ARRAY.pack(1, 0, _BIGINT, len(ids), 1) + pack(">" + "iq" * len(ids), *flat)


def check(result: Any) -> Any:
    if result is None or result.status in (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED):
        raise SystemExit(f"a statement failed: {result.error_message.decode() if result is not None else 'no result'}")
    return result
