"""Waiting for the server through libpq's non-blocking calls, with a bound on its silence.

libpq's blocking calls hold the interpreter's lock while they wait; here the wait is in `poll`, so that no other thread,
heartbeats above all, ever waits for a query. And they wait for ever for a peer that is there and says nothing (a proxy
whose far side is gone): TCP is content with that, so the bound is here.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

import psycopg
from psycopg import pq


def prepare(pgconn: pq.abc.PGconn, name: bytes, statement: bytes, timeout_s: float) -> pq.abc.PGresult:
    """Prepare a statement; raises as `execute_prepared` does."""
    pgconn.send_prepare(name, statement)
    return _only_result(pgconn, timeout_s)


def execute_prepared(
    pgconn: pq.abc.PGconn, name: bytes, values: Sequence[bytes | None], timeout_s: float
) -> pq.abc.PGresult:
    """Run a prepared statement with binary parameters; raises psycopg.OperationalError after too long a silence."""
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
            raise psycopg.OperationalError(f"the server took no statement for {timeout_s:g} s")
        pgconn.consume_input()


def next_result(pgconn: pq.abc.PGconn, timeout_s: float) -> pq.abc.PGresult | None:
    """The next result of what was sent; None when there is none left."""
    while pgconn.is_busy():
        wait_for_server(pgconn, timeout_s)
        pgconn.consume_input()
    return pgconn.get_result()


def drain(pgconn: pq.abc.PGconn, timeout_s: float) -> None:
    """Read all results there are."""
    while next_result(pgconn, timeout_s) is not None:
        pass


def wait_for_server(pgconn: pq.abc.PGconn, timeout_s: float) -> None:
    """Wait until something has arrived."""
    if not wait_readable([pgconn.socket], timeout_s):
        raise psycopg.OperationalError(f"the server sent nothing for {timeout_s:g} s")


def wait_readable(fds: list[int], timeout_s: float) -> list[int]:
    """Those of the descriptors that are readable (or broken), as soon as one is; none when the time is up."""
    return _wait(select.POLLIN, fds, timeout_s)


def _wait(events: int, fds: list[int], timeout_s: float) -> list[int]:
    # poll, not select: a host with a thousand open files would break select.
    poller = select.poll()
    for fd in fds:
        poller.register(fd, events)
    return [fd for fd, _ in poller.poll(timeout_s * 1000)]
