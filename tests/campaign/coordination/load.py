"""Records that keep coming to all partitions in turn, and where each of them stands in the end."""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Producer

from .history import Record

_FLUSH_S = 120.0
KEYS = 5  # of each partition


class Load:
    """`count` records, evenly over so many seconds. Nothing is lost on this side: idempotent, and patient."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, count: int, seconds: float) -> None:
        self.records: set[Record] = set()
        self.keys: dict[Record, int] = {}
        self._topic, self._partitions, self._count, self._seconds = topic, partitions, count, seconds
        self._failed = 0
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "broker.address.family": "v4",
                "acks": "all",
                "enable.idempotence": True,
                "delivery.timeout.ms": 300_000,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> list[str]:
        """Wait until all are written; what went wrong."""
        self._thread.join()
        left = self._producer.flush(_FLUSH_S)
        return [f"{left + self._failed} records could not be written"] if left or self._failed else []

    def _run(self) -> None:
        began = time.monotonic()
        for number in range(self._count):
            due = began + number * self._seconds / self._count
            while (wait_s := due - time.monotonic()) > 0:
                self._producer.poll(min(wait_s, 0.1))
            value, key = str(number).encode(), str(number // self._partitions % KEYS).encode()
            self._producer.produce(
                self._topic, value, key, partition=number % self._partitions, on_delivery=self._delivered
            )
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            record = message.partition(), message.offset()
            self.records.add(record)
            self.keys[record] = int(message.key())
        else:
            self._failed += 1
