"""Filling a transaction: queued records go to the producer, each with its number. Thin.

The transactor's thread alone is here; the condition is that of its reception, around whatever other threads see.

A transaction's partitions are made known to its coordinator one millisecond after the first record, with one request;
until that is answered nothing is sent. So a transaction that has taken all there is waits as long for more: what comes
in time is sent with the first, what comes later waits for the whole of it. The partition of the lane's progress would
need a second such request at the end. So a progress record comes first already, which names earlier transactions only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from harvester.delivery.decode import Broken
from harvester.delivery.lane import Lane, Outcome
from harvester.relay.batches import Batches, Entry
from harvester.relay.refusals import INNOCENT, Failed
from harvester.relay.sender import INFERRED, RESERVED
from harvester.relay.stamps import Stamps, timestamp_ms

_LONGEST_S = 0.02  # of taking records into one transaction
_JOIN_S = 0.002  # as long as the coordinator takes to learn of the partitions
_SLICE = 256  # records taken under the lock at a time


class Filler:
    """See the module's text. `is_over`: the open transaction is not wanted any more; `dated` as a `Sender`'s.

    `low_water` is asked under the lock.
    """

    def __init__(
        self,
        batches: Batches,
        stamps: Stamps,
        reserved: frozenset[str],
        changed: threading.Condition,
        is_over: Callable[[], bool],
        low_water: Callable[[], int | None],
        dated: bool = False,
    ) -> None:
        self._batches, self._stamps, self._reserved = batches, stamps, reserved
        self._changed, self._is_over, self._low_water, self._dated = changed, is_over, low_water, dated
        self._sequence = self._last = 0  # of the last record committed, and of the last one handed over
        self.failed: list[Failed] = []  # of the open transaction

    def begin(self, term: int, incarnation: str) -> None:
        """A new scope of numbers."""
        self._stamps.begin(term, incarnation)
        self._sequence = 0

    def committed(self) -> None:
        """The numbers of this transaction count; those of one that does not end so are used again (P25)."""
        self._sequence = self._last

    def fill(self, lane: Lane) -> bool:
        """Hand over what is queued, until nothing is left or it is enough. False: the transaction cannot go on."""
        began = time.monotonic()
        self.failed, self._last = [], self._sequence
        self._stamps.rewind(self._sequence)
        room = True
        while room:
            with self._changed:
                if self._last > self._sequence and not self._has_more():
                    self._changed.wait_for(self._has_more, max(0.0, began + _JOIN_S - time.monotonic()))
                entries = [] if self._is_over() else self._batches.take(_SLICE)
                self._stamps.set_low_water(self._low_water())
            for entry in entries:
                try:
                    if not self._produce(lane, entry):
                        return False
                except Exception as error:  # noqa: BLE001 - no record may end the shard (P33)
                    self.failed.append((entry, f"the client refused it: {error}"))
                    return False
                self._last += 1
            room = bool(entries) and time.monotonic() - began < _LONGEST_S
        return True

    def _has_more(self) -> bool:
        return self._is_over() or self._batches.is_ready

    def _produce(self, lane: Lane, entry: Entry) -> bool:
        """False: the transaction cannot go on, because of this record or for another reason."""
        record = entry.record
        if isinstance(record, Broken):
            self.failed.append((entry, record.reason))
            return False
        record_id, key, topic, value, headers, partition, created_us = record
        if topic in self._reserved:
            self.failed.append((entry, RESERVED))
            return False
        if self._stamps.name:
            headers = [*headers, (self._stamps.name, self._stamps.stamp(record_id, created_us))]
        at_ms = timestamp_ms(created_us) if self._dated else 0
        while True:
            try:
                # By position: names cost a third of the call. They are: on_delivery, its alias, timestamp, headers.
                lane.produce(topic, value, key, partition, partial(self._reported, entry), None, at_ms, headers)
            except BufferError:
                if lane.poll(0.01) is not Outcome.DONE or self._is_over():
                    return False
            except KafkaException as error:
                self._reported(entry, error.args[0], None)
                return False
            else:
                return True

    def _reported(self, entry: Entry, error: KafkaError | None, message: Any) -> None:
        """Delivery report. Without an offset the client only infers it: the record may be nowhere (P45)."""
        if error is None:
            if message.offset() is None:
                self.failed.append((entry, INFERRED))
        elif error.name() not in INNOCENT:
            self.failed.append((entry, error))
