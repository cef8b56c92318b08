"""A minimal relay in Python: reads rows, produces them, deletes acknowledged ones. Runs in a worker.

One process and three threads, fully pipelined: no order of keys, no leader, no retries, and nothing that would survive
a crash. It shows what this machine can do beside both servers, with as many records in flight as the harvester may
have; the difference to the harvester is the price of its guarantees.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import Any

import psycopg
from psycopg import pq

from harvester.delivery.decode import Broken, decode
from harvester.outbox.libpq import copy_rows
from scripts.benchmarks._baselines import DELETE, SETTINGS, Progress, bigint_array, check
from scripts.benchmarks._worker import Gate

# As `decode` expects them.
_SELECT = (
    "SELECT xmin, id, kafka_key, create_time, '-9223372036854775808'::bigint, kafka_topic,"
    " kafka_header_keys, kafka_header_values, kafka_value FROM outbox"
)
_SILENCE_S = 30.0


def relay(gate: Gate, dsn: str, bootstrap: str, cap: int) -> Progress:
    """Empty the outbox; `cap` records at most are read and not deleted."""
    with psycopg.connect(dsn, autocommit=True) as reading, psycopg.connect(dsn, autocommit=True) as purging:
        reading.execute(SETTINGS)
        check(purging.pgconn.prepare(b"d", DELETE, None))
        bare = _Bare(bootstrap, purging.pgconn)
        gate.ready()
        return bare.run(reading, cap)


class _Bare:
    def __init__(self, bootstrap: str, purging: pq.abc.PGconn) -> None:
        from confluent_kafka import Producer

        self._producer: Any = Producer(
            {
                "bootstrap.servers": bootstrap,
                "broker.address.family": "v4",
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "max.in.flight.requests.per.connection": 2,
                "queue.buffering.max.messages": 1_000_000,
                "partitioner": "murmur2_random",
                "log_level": 0,
            }
        )
        self._producer.list_topics(timeout=30)
        self._purging = purging
        self._acked: deque[int] = deque()
        self._some, self._room, self._over = threading.Event(), threading.Condition(), threading.Event()
        self._read = self._deleted = self._failed = 0
        self._progress: Progress = []

    def run(self, reading: psycopg.Connection[Any], cap: int) -> Progress:
        threads = [threading.Thread(target=target, daemon=True) for target in (self._serve, self._purge)]
        for thread in threads:
            thread.start()
        self._progress.append((time.monotonic(), 0))
        high, batch = 0, max(1, cap // 4)
        while rows := copy_rows(reading, self._statement(high, batch), _SILENCE_S):
            self._produce(b"".join([row[2] for row in rows]))
            high = rows[-1][0]
            self._read += len(rows)
            self._wait_for(cap - batch)
        self._wait_for(0)
        self._over.set()
        for thread in threads:
            thread.join()
        if self._failed:
            raise SystemExit(f"{self._failed} records failed")
        return self._progress

    @staticmethod
    def _statement(high: int, batch: int) -> str:
        return f"COPY ({_SELECT} WHERE id > {high} ORDER BY id LIMIT {batch}) TO STDOUT (FORMAT BINARY)"

    def _produce(self, rows: bytes) -> None:
        produce, delivered = self._producer.produce, self._delivered
        for record in decode(rows):
            if isinstance(record, Broken):
                raise SystemExit(f"a row is broken: {record.reason}")
            record_id, key, topic, value, headers, partition, *_ = record
            produce(topic, value, key, partition, partial(delivered, record_id), None, 0, headers)

    def _wait_for(self, unsettled: int) -> None:
        with self._room:
            self._room.wait_for(lambda: self._read - self._deleted <= unsettled)

    def _delivered(self, record_id: int, error: Any, _message: Any) -> None:
        self._failed += error is not None
        self._acked.append(record_id)

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._producer.poll(0.1):
                self._some.set()

    def _purge(self) -> None:
        acked = self._acked
        while not self._over.is_set():
            self._some.wait(0.1)
            self._some.clear()
            while acked:
                ids = bigint_array([acked.popleft() for _ in range(len(acked))])
                done = check(self._purging.exec_prepared(b"d", [ids], [pq.Format.BINARY], pq.Format.BINARY))
                with self._room:
                    self._deleted += done.command_tuples or 0
                    self._room.notify()
                self._progress.append((time.monotonic(), self._deleted))
