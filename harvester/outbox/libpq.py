"""libpq without blocking: waits with a time limit, and rows read by COPY as the server sent them.

libpq's blocking calls hold the interpreter's lock while they wait; here the wait is in `poll`, so that no other thread,
above all heartbeats, ever waits for a query. And they wait forever for a peer that is reachable but silent (a proxy
that has lost its own peer): TCP does not object to that, so the time limit is here.

Also: `COPY … TO STDOUT (FORMAT BINARY)` read through libpq without copying rows individually, and rows that a crash
cannot undo. The relay forwards rows as the bytes that the server sent: a tuple is an int16 field count, then per field
an int32 length (-1 for NULL) and that many bytes (manual, COPY, "Binary Format"). `id` and `kafka_key` come first, so
that the supervisor reads both at fixed offsets and touches nothing else; the shard decodes the rest.

A row whose writer does not wait for its commit (`synchronous_commit = off`) is visible before it is durable. If it were
published at that point, a crash of the server could undo it and give its id to another row, which the purge of the
first would delete (P34). So `copy_durable_rows` returns only flushed rows: what a statement sees was committed, and so
written to the WAL, before the WAL insert position that the statement reads after taking its snapshot.
"""

from __future__ import annotations

import math
import select
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from harvester.outbox.sql.queries import WAL_POSITION, Row

if TYPE_CHECKING:
    from psycopg import Connection


def prepare(pgconn: pq.abc.PGconn, name: bytes, statement: bytes, timeout_s: float) -> pq.abc.PGresult:
    """Prepare a statement; raises like `execute_prepared`."""
    pgconn.send_prepare(name, statement)
    return _only_result(pgconn, timeout_s)


def execute_prepared(
    pgconn: pq.abc.PGconn, name: bytes, values: Sequence[bytes | None], timeout_s: float
) -> pq.abc.PGresult:
    """Run a prepared statement with binary parameters; raises psycopg.OperationalError if the server is silent too
    long.
    """
    pgconn.send_query_prepared(name, values, [pq.Format.BINARY] * len(values), pq.Format.BINARY)
    return _only_result(pgconn, timeout_s)


def _only_result(pgconn: pq.abc.PGconn, timeout_s: float) -> pq.abc.PGresult:
    flush(pgconn, timeout_s)
    result = next_result(pgconn, timeout_s)
    if result is None:
        raise psycopg.OperationalError("the server sent no result")
    drain(pgconn, timeout_s)
    return result


def flush(pgconn: pq.abc.PGconn, timeout_s: float) -> None:
    """Send what waits to be sent."""
    deadline = time.monotonic() + timeout_s
    while pgconn.flush():
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not _wait(select.POLLIN | select.POLLOUT, [pgconn.socket], left_s):
            raise psycopg.OperationalError(f"the server accepted no statement for {timeout_s:g} s")
        pgconn.consume_input()


def next_result(pgconn: pq.abc.PGconn, timeout_s: float) -> pq.abc.PGresult | None:
    """The next result of the statements sent; None if there are no more."""
    while pgconn.is_busy():
        wait_for_server(pgconn, timeout_s)
        pgconn.consume_input()
    return pgconn.get_result()


def drain(pgconn: pq.abc.PGconn, timeout_s: float) -> None:
    """Read all remaining results."""
    while next_result(pgconn, timeout_s) is not None:
        pass


def wait_for_server(pgconn: pq.abc.PGconn, timeout_s: float) -> None:
    """Wait until something has arrived."""
    if not wait_readable([pgconn.socket], timeout_s):
        raise psycopg.OperationalError(f"the server sent nothing for {timeout_s:g} s")


def wait_readable(fds: list[int], timeout_s: float) -> list[int]:
    """The readable (or broken) descriptors, as soon as there is one; none if the time is up."""
    return _wait(select.POLLIN, fds, timeout_s)


def _wait(events: int, fds: list[int], timeout_s: float) -> list[int]:
    # poll, not select: a host with a thousand open files would break select.
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    return [fd for fd, _ in poller.poll(timeout_s * 1000)]


_POSITIONS = (
    "SELECT noted, noted::pg_lsn <= pg_current_wal_flush_lsn()"
    f" FROM pg_catalog.current_setting('{WAL_POSITION}', true) AS noted"
)
_FLUSH = "SELECT pg_logical_emit_message(true, 'harvester', '')"  # the session waits for its commits to be flushed
_IS_FLUSHED = "SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn"
_WRITER_S = 0.01

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(_SIGNATURE) + 4 + 4
_TRAILER = b"\xff\xff"
_HEAD = struct.Struct(">hiIiqi")  # field count, xmin and id, each after its length, length of key
_HEAD_BYTES = _HEAD.size


def copy_rows(connection: Connection, statement: str, timeout_s: float, most_bytes: float = math.inf) -> list[Row]:
    """Run one COPY; returns its rows as (id, key, raw tuple), sorted by id.

    Once more than `most_bytes` have arrived, further rows come without their raw tuple: it is empty.

    Raises psycopg.Error if the statement fails, and psycopg.OperationalError if the connection breaks or nothing
    arrives for `timeout_s`: in that case the statement may or may not have taken effect.
    """
    return _copy(connection.pgconn, statement, timeout_s, most_bytes)[0]


def copy_durable_rows(
    connection: Connection[Any], statement: str, timeout_s: float, most_bytes: float = math.inf
) -> list[Row]:
    """Like `copy_rows`, but returns once no crash of this server can undo the returned rows.

    `statement` records the WAL position (`queries.WAL_POSITION`); how far the WAL is flushed is read in the same round
    trip. If it is not flushed up to that position, a small commit of our own flushes it, together with everything that
    others have written in the meantime. If the role may not do that, the server's own writer does it in less than a
    second.
    """
    rows, positions = _copy(connection.pgconn, f"{statement}; {_POSITIONS}", timeout_s, most_bytes)
    if not rows:
        return rows
    assert positions is not None, "a second statement has a result"
    if positions.get_value(0, 1) != b"t":
        try:
            connection.execute(_FLUSH)
        except psycopg.errors.InsufficientPrivilege:
            position, deadline = (positions.get_value(0, 0) or b"").decode(), time.monotonic() + timeout_s
            while not _is_flushed(connection, position):
                if time.monotonic() > deadline:
                    raise psycopg.OperationalError(f"the server has not flushed its WAL for {timeout_s:g} s") from None
                time.sleep(_WRITER_S)
    return rows


def _copy(
    pgconn: pq.abc.PGconn, statements: str, timeout_s: float, most_bytes: float
) -> tuple[list[Row], pq.abc.PGresult | None]:
    """The rows of a COPY, and the result of the statement after it, if any.

    A database in SQL_ASCII can hold any bytes, and a server that has to convert them to UTF-8 refuses the whole
    statement because of one row (P33). So it sends them unconverted.
    """
    unconverted = pgconn.parameter_status(b"server_encoding") == b"SQL_ASCII"
    before = "SET LOCAL client_encoding TO SQL_ASCII; " if unconverted else ""
    pgconn.send_query((before + statements).encode())
    chunks: list[bytes] = []
    cut: list[Row] = []
    arrived = 0
    flush(pgconn, timeout_s)
    result = next_result(pgconn, timeout_s)
    if unconverted and result is not None and result.status == pq.ExecStatus.COMMAND_OK:
        result = next_result(pgconn, timeout_s)
    if result is None:
        raise psycopg.OperationalError("the server sent no result")
    if result.status != pq.ExecStatus.COPY_OUT:
        error = error_from_result(result, encoding="utf-8")
        drain(pgconn, timeout_s)
        raise error
    while True:
        size, data = pgconn.get_copy_data(1)
        if size > 0 and arrived <= most_bytes:
            chunks.append(bytes(data))
            arrived += size
        elif size > 0:
            cut += [(record_id, key, b"") for record_id, key, _ in parse([bytes(data)])]
        elif size == 0:
            wait_for_server(pgconn, timeout_s)
            pgconn.consume_input()
        else:
            break
    second: pq.abc.PGresult | None = None
    while (result := next_result(pgconn, timeout_s)) is not None:
        if result.status == pq.ExecStatus.TUPLES_OK:
            second = result
        elif result.status != pq.ExecStatus.COMMAND_OK:
            error = error_from_result(result, encoding="utf-8")
            drain(pgconn, timeout_s)
            raise error
    return sorted(parse(chunks) + cut) if cut else parse(chunks), second


def _is_flushed(connection: Connection[Any], position: str) -> bool:
    row = connection.execute(_IS_FLUSHED, (position,)).fetchone()
    return row is not None and bool(row[0])


def parse(chunks: list[bytes]) -> list[Row]:
    """The rows in a COPY's data messages (one row each; the first carries the header), sorted by id."""
    rows: list[Row] = []
    append = rows.append
    unpack = _HEAD.unpack_from
    for index, chunk in enumerate(chunks):
        raw = chunk
        if index == 0 and raw.startswith(_SIGNATURE):
            raw = raw[_HEADER_BYTES:]
        if raw == _TRAILER or not raw:
            continue
        _, _, _, _, record_id, key_bytes = unpack(raw)
        key = raw[_HEAD_BYTES : _HEAD_BYTES + key_bytes] if key_bytes >= 0 else None
        append((record_id, key, raw))
    rows.sort()
    return rows
