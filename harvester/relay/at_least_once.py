"""Sends a shard's records at least once: barrier, produce, acknowledgement, failures.

Three threads call in: the shard's main thread with frames and due retries, the delivery thread with reports, and this
one or the purger's with commits. One lock serialises them; no thread waits for anything while holding it. At most one
record of a key is unsettled on the wire, so the thread that lowers a barrier may produce the next record itself.

Trust is checked immediately before every produce (P12). Once it has expired, everything queued is dropped and
everything that arrives is refused until the supervisor's next `Remark`: resuming after a gap would reorder keys.

An acknowledgement counts only if it carries an offset, which only the broker that appended the record can supply (P45).
The client also reports a record as delivered, without an offset, when the broker temporarily refused its request and
then accepted a later one for the same partition: a broker that has no state for the producer accepts any first sequence
number (KAFKA-15591), so the record is in no log. Its fate is unknown, as after a timeout, and it is sent again.

An exception while handling a record affects only that record, never the shard (P33). A record that could not be sent is
retried here (held), handed back to the supervisor until its retry is due (parked), quarantined, or given up. While
nothing at all gets through, it is held: no other record could be sent either, and nothing more is read from the table.
If other records get through, or the record itself is at fault, it is parked, so that stuck records never use up shared
capacity.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from harvester.delivery.decode import Broken, Oversize, decode, size_of
from harvester.delivery.retries import (
    TOO_LARGE,
    Attempts,
    Failure,
    Policy,
    RetryState,
    RetryVerdict,
    burns_attempt,
    may_arrive,
)
from harvester.origin import Stamps, timestamp_ms
from harvester.outbox.purge_session import PoisonRow, QuarantineOutcome
from harvester.record import KafkaRecord
from harvester.relay.core import frames as f
from harvester.relay.core.barrier import Barrier, BarrierEntry
from harvester.relay.purger import ShardHost
from harvester.relay.put_away import NOT_STORED, Outcome, PutAway
from harvester.telemetry.latency import Histogram

RESERVED = "its topic is one of the harvester's own: the record could be mistaken for one written by the harvester"
INFERRED = KafkaError(KafkaError._MSG_TIMED_OUT, "the client inferred its acknowledgement from that of a later record")

_BUFFER_RETRY_S = 0.05
_REPORT_RECORDS = 64

TooLarge = tuple[BarrierEntry, KafkaError, tuple[str, int]]  # with topic and partition


class Sender:
    """Sends and settles a shard's records in at-least-once mode."""

    def __init__(
        self,
        producer: Any,
        policy: Policy,
        shard: ShardHost,
        header: str = "",
        reserved: frozenset[str] = frozenset(),
        dated: bool = False,
        put_away: PutAway | None = None,
        report_s: float = 0.005,
    ) -> None:
        """`dated`: a record's timestamp is its row's create_time, otherwise the time at which it is produced.

        `put_away` stores the values of records that are too large; None: no values are stored. `report_s`: for how long
        the supervisor is not told of settled records while the next ones of their keys follow at once.
        """
        self._producer, self._reserved, self._dated, self._put_away = producer, reserved, dated, put_away
        self._stamps = Stamps(header, shard.index)
        self._shard = shard
        self._lock = threading.Lock()
        self._barrier = Barrier()
        # Epoch and term of the leader it sends for, if any.
        self._epoch = 0
        self._term: int | None = None
        self._holder: str | None = None
        self._blocked = True  # until the first Remark under a term
        self._attempts = Attempts(policy)
        self._timers: list[tuple[float, int, int]] = []  # due, tie-breaker, id of a held record
        self._order = itertools.count()
        self.acked_at = 0.0  # time of the last acknowledgement: the broker accepts records
        self.doubted_at = -math.inf  # time of the last timeout of a record that may still arrive
        self._report_s = report_s
        self._settled: list[int] = []  # not reported yet
        self._reported_at = 0.0
        # Used by the delivery thread only: reports not yet collected.
        self._acked: list[BarrierEntry] = []
        self._too_large: list[TooLarge] = []
        # Metrics.
        self._latency = Histogram()
        self._delivered = self._quarantined = self._errors = self._retried = 0
        self._seen = (0, 0, 0, 0, 0, 0)

    # -- frames

    def dispatch(self, frame: f.Dispatch) -> None:
        """Rows in id order: send those that may be sent, queue the others."""
        now, term = time.monotonic(), self._term  # only this thread changes it
        records = decode(frame.rows) if self._put_away is None else self._put_away.decode(frame.rows)
        entries = [BarrierEntry(record[0], record[1], record, now, term) for record in records]
        self._stamps.set_low_water(frame.low_water)
        if self._attempts.states:
            for entry in entries:
                entry.origin = self._attempts.origin_of(entry.id)
        ready: list[BarrierEntry] = []
        refused: list[int] = []
        with self._lock:
            stale = self._blocked or frame.epoch != self._epoch
            offer = self._barrier.offer
            for entry in entries:
                answer = None if stale else offer(entry)
                if answer:
                    ready.append(entry)
                elif answer is None:
                    refused.append(entry.id)
            if refused:
                self._say(f.Dropped(refused) if self._blocked else f.Refused(frame.epoch, refused))
        self._produce(ready)

    def remark(self, frame: f.Remark) -> None:
        """Drop what is not on the wire and reply with what is; continue under the frame's term."""
        with self._lock:
            if frame.term != self._term:
                self._attempts.states.clear()
            self._epoch, self._term, self._holder = frame.epoch, frame.term, frame.holder
            self._stamps.begin(frame.term, frame.incarnation, random.getrandbits(32))
            self._blocked = frame.term is None
            self._timers.clear()
            held = self._barrier.held > 0
            on_the_wire = self._barrier.remark()
            self._say(f.Remarked(frame.epoch, on_the_wire, held))

    def closed(self, epoch: int, record_id: int) -> None:
        """The supervisor has recorded this parked record; its key is accepted again."""
        with self._lock:
            if epoch == self._epoch:
                self._barrier.reopen(record_id)

    def stop(self) -> None:
        """Produce nothing from now on; what is queued is dropped without a report."""
        with self._lock:
            self._term = self._holder = None
            self._blocked = True
            self._timers.clear()
            self._report_settled()
            self._barrier.remark()

    @property
    def unsettled(self) -> int:
        """Records on the wire or not yet purged. Takes no lock: it is a single read."""
        return len(self._barrier.unsettled)

    @property
    def is_awaited(self) -> bool:
        """Whether anything here waits for records to be settled: a later record of their keys, or the shutdown."""
        return self._blocked or self._barrier.queued > 0

    # -- producing

    def _produce(self, entries: Iterable[BarrierEntry]) -> None:
        produce, reported, trusted = self._producer.produce, self._reported, self._shard.trusted
        now, name, stamp, reserved = time.monotonic(), self._stamps.name, self._stamps.stamp, self._reserved
        dated = self._dated
        for entry in entries:
            record = entry.record
            if not isinstance(record, KafkaRecord):
                self._divert(entry, record)
                continue
            if entry.term != self._term or not trusted():
                self._run_out_of_trust(entry)
                continue
            entry.sent_at = now
            record_id, key, topic, value, headers, partition, created_us, _ = record
            if topic in reserved:
                self._poison(entry, RESERVED)
                continue
            try:
                if name:
                    if entry.origin is None:
                        entry.origin = stamp(record_id, created_us)
                    headers = [*headers, (name, entry.origin)] if entry.origin else headers
                # Positional arguments: keywords would cost a third of the call. They are on_delivery, its alias,
                # timestamp, headers.
                at_ms = timestamp_ms(created_us) if dated else 0
                produce(topic, value, key, partition, partial(reported, entry), None, at_ms, headers)
            except BufferError:
                self._put_off(entry)
            except KafkaException as error:
                self._failed(entry, error.args[0], local=True)
            except Exception as error:  # noqa: BLE001 - no record may end the shard (P33)
                self._poison(entry, f"the client refused it: {error}")

    def _divert(self, entry: BarrierEntry, record: Broken | Oversize) -> None:
        """Handle a record that cannot be sent, or cannot be sent yet."""
        if isinstance(record, Broken):
            self._poison(entry, record.reason)
            return
        assert self._put_away is not None
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._barrier.hold(entry.id)
            self._report_settled()
        self._put_away.put(record, partial(self._stored, entry))

    def _stored(self, entry: BarrierEntry, outcome: Outcome) -> None:
        """The value was stored, or could not be."""
        with self._lock:
            if self._barrier.unsettled.get(entry.id) is not entry:
                return  # dropped in the meantime; its row may be back as another entry
            if isinstance(outcome, str):
                self._errors += 1
                _, retry = self._attempts.failed(entry.id, NOT_STORED, datetime.now(UTC))
                self._retry(entry, retry, outcome, counts=True)
                return
            entry.record = outcome
            self._barrier.release(entry.id, time.monotonic())
        self._produce((entry,))

    def _run_out_of_trust(self, entry: BarrierEntry) -> None:
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._blocked = True
            in_doubt = self._barrier.held > 0 or entry.id in self._attempts.states
            self._say(f.Dropped(self._barrier.drop_unsent(entry.id), in_doubt))

    # -- reports

    def _reported(self, entry: BarrierEntry, error: KafkaError | None, message: Any) -> None:
        """Delivery report; runs on the delivery thread, which calls `collect` after it has served some."""
        if error is None and message.offset() is not None:
            self._acked.append(entry)
        elif error is not None and error.name() in TOO_LARGE and message is not None:
            self._too_large.append((entry, error, (message.topic(), message.partition())))
        else:
            self.collect()
            try:
                self._failed(entry, error or INFERRED)
            except Exception as unforeseen:  # noqa: BLE001 - no record may end the shard (P33)
                self._poison(entry, f"its delivery report cannot be handled: {unforeseen!r}")

    def collect(self) -> None:
        """Process the acknowledgements and refusals served since the last call. Delivery thread."""
        acked, self._acked = self._acked, []
        refused, self._too_large = self._too_large, []
        if acked:
            now_us = time.time_ns() // 1000
            with self._lock:
                ages = [now_us - entry.record[6] for entry in acked if isinstance(entry.record, KafkaRecord)]
                self._latency.add_all(ages)
                self._delivered += len(acked)
                self.acked_at = time.monotonic()
                self._barrier.acked(acked)
            self._shard.purge([entry.record for entry in acked])
        # The largest record of a batch is at fault; the others have not failed.
        largest: dict[tuple[str, int], int] = {}
        for entry, _, where in refused:
            largest[where] = max(_size(entry), largest.get(where, 0))
        for entry, error, where in refused:
            self._failed(entry, error, innocent=_size(entry) < largest[where])

    # -- commits

    def purged(self, ids: Sequence[int]) -> None:
        """The DELETE of these ids has committed: lower their barriers and send what follows. On the purging thread."""
        with self._lock:
            now = time.monotonic()
            ready = self._barrier.settle(ids, now)
            if self._attempts.states:
                self._attempts.settled(ids)
            self._settled += ids
            is_due = len(self._settled) >= _REPORT_RECORDS or now - self._reported_at >= self._report_s
            if is_due or not ready or self._shard.is_crowded:
                self._report_settled()
        self._produce(ready)

    def _say(self, frame: f.Frame) -> None:
        """Tell the supervisor, after what has been settled. The lock is held, so that frames reach it in order."""
        self._report_settled()
        self._shard.send(frame)

    def _report_settled(self) -> None:
        """Tell the supervisor what has been settled; the lock is held.

        While the next records of the keys follow at once, and there is room for others, it need do nothing about it.
        Then it is told now and then.
        """
        if self._settled:
            self._shard.send(f.Settled(self._settled))
            self._settled, self._reported_at = [], time.monotonic()

    def quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        """The quarantine has committed with this outcome. Purger's thread."""
        if outcome is QuarantineOutcome.FENCED:
            with self._lock:
                self._give_up(poison.id)
            return
        if outcome is QuarantineOutcome.MOVED:
            self._quarantined += 1
            with self._lock:
                self._say(f.Quarantined(poison.id, poison.error))
        self.purged([poison.id])

    # -- failures

    def _put_off(self, entry: BarrierEntry) -> None:
        """The producer's own queue is full: try again shortly, without counting a failure."""
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._hold(entry.id, _BUFFER_RETRY_S)

    def _failed(self, entry: BarrierEntry, error: KafkaError, *, local: bool = False, innocent: bool = False) -> None:
        """Handle a failure that the client or the broker reported for a record on the wire. `local`, `innocent`: see
        `Failure`.
        """
        failure = Failure(error.name(), error.fatal(), local, innocent)
        text = f"{error.name()}: {error.str()}"
        with self._lock:
            self._errors += 1
            if may_arrive(failure):
                self.doubted_at = time.monotonic()
            verdict, retry = self._attempts.failed(entry.id, failure, datetime.now(UTC))
            retry.origin = entry.origin
            if verdict is RetryVerdict.FATAL:
                self._say(f.FateUnknown(self._epoch, [entry.id], text))
            elif verdict is RetryVerdict.RETRY:
                if entry.key is not None and may_arrive(failure):
                    self._say(f.InDoubt(entry.id))
                self._retry(entry, retry, text, counts=burns_attempt(failure))
                return
        if verdict is RetryVerdict.FATAL:
            self._shard.die(text)
        else:
            self._poison(entry, text)

    def _poison(self, entry: BarrierEntry, text: str) -> None:
        """No further attempt would help: apply the policy."""
        policy = self._attempts.policy
        if policy.poison == "quarantine":
            self._to_quarantine(entry, text)
            return
        with self._lock:
            if self._blocked:
                self._give_up(entry.id)
                return
            retry = self._attempts.impossible(entry.id, datetime.now(UTC))
            self._park(entry, retry, text, policy.retry_backoff_max_s, held=True)
            if policy.poison == "stop":
                self._say(f.Poisoned(entry.id, text))

    def _retry(self, entry: BarrierEntry, retry: RetryState, text: str, *, counts: bool) -> None:
        """Send it again later; the lock is held. `counts`: the record itself is at fault."""
        if self._blocked:
            # Draining or fenced: no retry (P13). The next leader marks its row again.
            self._give_up(entry.id)
            return
        wait_s = self._attempts.wait_s(retry, random.random())
        self._retried += 1
        if counts or self.acked_at > entry.sent_at:
            self._park(entry, retry, text, wait_s)
        else:
            self._hold(entry.id, wait_s)

    def _hold(self, record_id: int, wait_s: float) -> None:
        """Retry it from here; the lock is held."""
        self._barrier.hold(record_id)
        self._report_settled()
        heapq.heappush(self._timers, (time.monotonic() + wait_s, next(self._order), record_id))
        self._shard.wake()

    def _park(self, entry: BarrierEntry, retry: RetryState, text: str, wait_s: float, *, held: bool = False) -> None:
        """Give it back to the supervisor until its retry is due; the lock is held."""
        behind = self._barrier.park(entry.id)
        self._say(f.Parked(self._epoch, entry.id, behind, text, wait_s, retry.attempts, held))

    def _give_up(self, record_id: int) -> None:
        """Lower its barrier without sending it, and drop everything behind it. The lock is held, so this message
        and the reply to a remark reach the supervisor in order.
        """
        self._say(f.Dropped([record_id, *self._barrier.forget(record_id)], in_doubt=True))

    def _to_quarantine(self, entry: BarrierEntry, error: str) -> None:
        with self._lock:
            retry = self._attempts.impossible(entry.id, datetime.now(UTC))
            term, holder = self._term, self._holder
            if term is None or holder is None:
                self._give_up(entry.id)
                return
            self._barrier.acked((entry,))
        origin, row = entry.origin or None, entry.record
        self._shard.quarantine(
            PoisonRow(
                entry.id, error, retry.attempts, retry.first_failed_at, term, holder, origin, row.xmin, row.created_us
            )
        )

    # -- time

    def due(self, now: float) -> float | None:
        """Send the held records that are due; returns when the next one is."""
        while self._timers:
            with self._lock:
                if not self._timers:
                    break
                if self._timers[0][0] > now:
                    return self._timers[0][0]
                _, _, record_id = heapq.heappop(self._timers)
                entry = self._barrier.release(record_id, now)
            if entry is not None:
                self._produce((entry,))
        return None

    def check_queues(self, now: float) -> None:
        """Report the record that has been queued without progress for longer than queue_timeout."""
        with self._lock:
            waiting = self._barrier.longest_waiting()
            if waiting is not None and now - waiting.since >= self._attempts.policy.queue_timeout_s:
                self._say(f.QueueTimedOut(self._epoch, waiting.id, now - waiting.since))

    def stats(self) -> f.Stats | None:
        """Statistics for the supervisor; None while nothing has changed and nothing is unsettled."""
        with self._lock:
            self._report_settled()
            barrier, unsettled = self._barrier, self.unsettled
            now = (barrier.queued, unsettled, barrier.held, self._delivered, self._errors, self._quarantined)
            if now == self._seen and not unsettled:
                return None
            self._seen = now
            latency, self._latency = self._latency, Histogram()
        stored = 0 if self._put_away is None else self._put_away.stored
        return f.Stats(*now[:4], self._retried, *now[4:], latency.pack().hex(), stored)


def _size(entry: BarrierEntry) -> int:
    record = entry.record
    return size_of(record) if isinstance(record, KafkaRecord) else 0
