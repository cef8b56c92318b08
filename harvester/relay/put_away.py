"""Puts values away that are too large for Kafka (`[oversize] policy = "claim-check"`), before their records are sent.

A thread of the shard's own, so that a store that is slow or away holds up nobody but the keys of such records. Each of
them waits with its key behind it: at least once *held* behind its barrier, exactly once outside of the queue. Once its
value is durable in the store it goes on as a record with a reference. A store that fails is no fault of the record: it
is parked like one whose partition is away, and tried again for as long as it takes, without using up attempts.

The name of an object follows from the row alone, so whoever puts it away again, after a crash or an abort, writes the
same object. A row that never gets published may leave one behind; the store's rules for old objects remove it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from harvester.claim_check.reference import refer, replaced
from harvester.claim_check.settings import StoreSettings
from harvester.claim_check.stores import open_store
from harvester.delivery.decode import Decoded, Oversize, decode, set_apart
from harvester.delivery.retries import Failure
from harvester.errors import ClaimCheckError
from harvester.record import KafkaRecord
from harvester.relay.purger import ShardHost

NOT_STORED = Failure("_STORE")  # the record is not at fault
Outcome = KafkaRecord | str  # with a reference; or why it could not be put away


@dataclass(frozen=True, slots=True)
class PutAwaySettings:
    """Records of more than `above` bytes go to the store."""

    store: StoreSettings
    above: int


class PutAway:
    """A shard's values that are to be put away, one after the other."""

    def __init__(self, settings: PutAwaySettings, shard: ShardHost) -> None:
        self._above, self._shard = settings.above, shard
        self._store = open_store(settings.store)
        self._waiting: queue.SimpleQueue[tuple[Oversize, Callable[[Outcome], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stored = 0  # values, repeats included

    def decode(self, rows: bytes, sums: list[int] | None = None) -> list[Decoded | Oversize]:
        """As `decode`, with those set apart that are too large."""
        records = decode(rows, sums)
        return set_apart(records, self._above) if len(rows) > self._above else [*records]

    def put(self, record: Oversize, done: Callable[[Outcome], None]) -> None:
        """Put it away soon; `done` is called on this thread. Safe from any thread, never waits."""
        self._waiting.put((record, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="put-away", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                oversize, done = self._waiting.get()
                done(self._store_value(oversize.record))
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it they would wait for ever
            self._shard.die(f"putting values away failed: {error!r}")

    def _store_value(self, record: KafkaRecord) -> Outcome:
        try:
            reference = refer(record)
            self._store.put(reference.name, record.value or b"")
            published = replaced(record, reference, self._store.url)
        except ClaimCheckError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - no record may end the shard (P33)
            return f"its value cannot be put away: {error!r}"
        self.stored += 1
        self._shard.failpoints.hit("shard.stored", index=self._shard.index, id=record.id)
        return published
