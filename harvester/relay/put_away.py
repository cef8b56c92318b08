"""Stores values that are too large for Kafka (`[oversize] policy = "claim-check"`) before their records are sent.

It has its own thread in the shard, so that a slow or unreachable store holds up only the keys of such records. Each of
them waits with its key behind it: at least once *held* behind its barrier, exactly once outside the queue. Once its
value is durable in the store, it continues as a record with a reference. If the store fails, the record is not at
fault: it is parked like one whose partition is unavailable, and retried for as long as it takes, without using up
attempts.

An object's name is derived from the row alone, so storing it again, after a crash or an abort, writes the same object.
A row that never gets published may leave one behind; the store's lifecycle rules remove it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from harvester.claim_check.reference import StoreSettings, refer, replaced
from harvester.claim_check.stores import open_store
from harvester.delivery.decode import Decoded, Oversize, decode, set_apart
from harvester.delivery.retries import Failure
from harvester.errors import ClaimCheckError
from harvester.record import KafkaRecord
from harvester.relay.purger import ShardHost

NOT_STORED = Failure("_STORE")  # the record is not at fault
Outcome = KafkaRecord | str  # with a reference; or why the value could not be stored


@dataclass(frozen=True, slots=True)
class PutAwaySettings:
    """Values of more than `above` bytes are stored."""

    store: StoreSettings
    above: int


class PutAway:
    """Stores a shard's oversize values, one after the other."""

    def __init__(self, settings: PutAwaySettings, shard: ShardHost) -> None:
        self._above, self._shard = settings.above, shard
        self._store = open_store(settings.store)
        self._waiting: queue.SimpleQueue[tuple[Oversize, Callable[[Outcome], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stored = 0  # number of values, including repeats

    def decode(self, rows: bytes, sums: list[int] | None = None) -> list[Decoded | Oversize]:
        """Like `decode`, but sets oversize records apart."""
        records = decode(rows, sums)
        return set_apart(records, self._above) if len(rows) > self._above else [*records]

    def put(self, record: Oversize, done: Callable[[Outcome], None]) -> None:
        """Store the value soon; `done` is called on this thread. Thread-safe, never waits."""
        self._waiting.put((record, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="put-away", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                oversize, done = self._waiting.get()
                done(self._store_value(oversize.record))
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it records would wait forever
            self._shard.die(f"storing values failed: {error!r}")

    def _store_value(self, record: KafkaRecord) -> Outcome:
        try:
            reference = refer(record)
            self._store.put(reference.name, record.value or b"")
            published = replaced(record, reference, self._store.url)
        except ClaimCheckError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - no record may end the shard (P33)
            return f"its value cannot be stored: {error!r}"
        self.stored += 1
        self._shard.failpoints.hit("shard.stored", index=self._shard.index, id=record.id)
        return published
