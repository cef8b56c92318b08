"""What a shard does with its records: barrier, produce, acknowledgement, failure, retry.

Three threads call in: the shard's main thread with frames and due retries, the delivery thread with reports, the
purger with commits. One lock of this process orders them; it is never held while something waits. At most one
record of a key is unsettled on the wire, so whichever thread lowers a barrier may produce the next record itself.

Trust is looked at immediately before every produce (P12). Once it says no, everything queued is dropped and
everything that arrives is refused until the supervisor's next `Remark`: sending on after a gap would reorder keys.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from harvester.delivery.decode import Broken, decode
from harvester.delivery.failures import TOO_LARGE, Failure, Verdict, burns_attempt
from harvester.outbox.purge_session import Outcome, Poison
from harvester.relay.attempts import Attempts, Policy, Trial
from harvester.relay.barrier import Barrier, Entry
from harvester.relay.frames import (
    Dropped,
    FateUnknown,
    Frame,
    Parked,
    Poisoned,
    Quarantined,
    QueueTimedOut,
    Refused,
    Remark,
    Remarked,
    Settled,
    Stats,
)
from harvester.relay.stamps import Stamps, timestamp_ms
from harvester.telemetry.latency import Histogram

_BUFFER_RETRY_S = 0.05
RESERVED = "its topic is one of the harvester's own, where a record could pass for the harvester's word"


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a sender's decisions go. All are quick and safe from any thread."""

    send: Callable[[Frame], None]  # to the supervisor
    purge: Callable[[Sequence[int]], None]
    quarantine: Callable[[Poison], None]
    wake: Callable[[], None]  # the main thread, because a retry was scheduled
    fatal: Callable[[str], None]  # the producer is unusable: end the process
    trusted: Callable[[], bool]


class Sender:
    """See the module's text."""

    def __init__(
        self,
        producer: Any,
        policy: Policy,
        outlets: Outlets,
        index: int = 0,
        header: str = "",
        reserved: frozenset[str] = frozenset(),
        dated: bool = False,
    ) -> None:
        """`dated`: a record's timestamp is its row's create_time; else the moment at which it is produced."""
        self._producer, self._reserved, self._dated = producer, reserved, dated
        self._stamps = Stamps(header, index)
        self._attempts = Attempts(policy)
        self._out = outlets
        self._lock = threading.Lock()
        self._barrier = Barrier()
        self._epoch = 0
        self._term: int | None = None
        self._holder: str | None = None
        self._blocked = True  # until the first Remark under a term
        self._retries: list[tuple[float, int, int]] = []  # due, tie-breaker, record id
        self._order = itertools.count()
        self._acked: list[Entry] = []  # acknowledged, and not yet collected; of the delivery thread
        self._too_large: list[tuple[Entry, KafkaError, tuple[str, int]]] = []  # refused as such, the same
        self._latency = Histogram()
        self._delivered = self._retried = self._errors = self._quarantined = 0
        self._acked_at = 0.0  # when the last acknowledgement came: the broker takes records
        self._seen = (0, 0, 0, 0, 0, 0)

    # -- frames

    def dispatch(self, epoch: int, rows: bytes, low_water: int | None = None) -> None:
        """Rows in id order: send what may be sent, queue the rest."""
        now, term = time.monotonic(), self._term  # which this thread alone changes
        entries = [Entry(record[0], record[1], record, now, term) for record in decode(rows)]
        self._stamps.set_low_water(low_water)
        if len(self._attempts):
            for entry in entries:
                entry.origin = self._attempts.origin_of(entry.id)
        ready: list[Entry] = []
        refused: list[int] = []
        with self._lock:
            stale = self._blocked or epoch != self._epoch
            offer = self._barrier.offer
            for entry in entries:
                answer = None if stale else offer(entry)
                if answer:
                    ready.append(entry)
                elif answer is None:
                    refused.append(entry.id)
            if refused:
                self._out.send(Dropped(refused) if self._blocked else Refused(epoch, refused))
        self._produce(ready)

    def remark(self, frame: Remark) -> None:
        """Drop what is not on the wire and answer with what is; go on under the frame's term."""
        with self._lock:
            if frame.term != self._term:
                self._attempts.clear()
            self._epoch = frame.epoch
            self._term, self._holder = frame.term, frame.holder
            self._stamps.begin(frame.term, frame.incarnation)
            self._blocked = frame.term is None
            self._retries.clear()
            held = self._barrier.held > 0
            on_the_wire = self._barrier.remark()
            self._out.send(Remarked(frame.epoch, on_the_wire, held))

    def closed(self, epoch: int, record_id: int) -> None:
        """The supervisor knows of this parked record; its key may come again."""
        with self._lock:
            if epoch == self._epoch:
                self._barrier.reopen(record_id)

    def stop(self) -> None:
        """Produce nothing from now on; what is queued is dropped without a word."""
        with self._lock:
            self._term = self._holder = None
            self._blocked = True
            self._retries.clear()
            self._barrier.remark()

    @property
    def unsettled(self) -> int:
        """Records on the wire or not yet purged; one read, so no lock."""
        return self._barrier.in_flight

    @property
    def is_awaited(self) -> bool:
        """Whether anything here waits for records to be settled: one of their keys, or the end."""
        return self._blocked or self._barrier.queued > 0

    # -- producing

    def _produce(self, entries: Iterable[Entry]) -> None:
        produce, reported, trusted = self._producer.produce, self._reported, self._out.trusted
        now, name, stamp, reserved = time.monotonic(), self._stamps.name, self._stamps.stamp, self._reserved
        dated = self._dated
        for entry in entries:
            record = entry.record
            if isinstance(record, Broken):
                self._poisoned(entry, record.reason)
                continue
            if entry.term != self._term or not trusted():
                self._run_out_of_trust(entry)
                continue
            entry.sent_at = now
            record_id, key, topic, value, headers, partition, created_us = record
            if topic in reserved:
                self._poisoned(entry, RESERVED)
                continue
            if name:
                if entry.origin is None:
                    entry.origin = stamp(record_id, created_us)
                headers = [*headers, (name, entry.origin)] if entry.origin else headers
            try:
                # By position: names cost a third of the call. They are: on_delivery, its alias, timestamp, headers.
                at_ms = timestamp_ms(created_us) if dated else 0
                produce(topic, value, key, partition, partial(reported, entry), None, at_ms, headers)
            except BufferError:
                self._put_off(entry)
            except KafkaException as error:
                self._failed(entry, error.args[0], local=True)
            except (ValueError, TypeError) as error:
                self._poisoned(entry, f"the client refused it: {error}")

    def _run_out_of_trust(self, entry: Entry) -> None:
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._blocked = True
            self._out.send(Dropped(self._barrier.drop_unsent(entry.id)))

    def _put_off(self, entry: Entry) -> None:
        """The producer's own queue is full: try again in a moment, without counting it as a failure."""
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._hold(entry.id, _BUFFER_RETRY_S)

    def _hold(self, record_id: int, wait_s: float) -> None:
        """Try it again from here; the lock is held."""
        self._barrier.hold(record_id)
        heapq.heappush(self._retries, (time.monotonic() + wait_s, next(self._order), record_id))
        self._out.wake()

    # -- reports

    def _reported(self, entry: Entry, error: KafkaError | None, message: Any) -> None:
        """Delivery report; runs on the delivery thread, which calls `collect` when it has served some."""
        if error is None:
            self._acked.append(entry)
        elif error.name() in TOO_LARGE and message is not None:
            self._too_large.append((entry, error, (message.topic(), message.partition())))
        else:
            self.collect()
            self._failed(entry, error)

    def collect(self) -> None:
        """See to the acknowledgements and refusals that were served since the last call. Delivery thread."""
        acked, self._acked = self._acked, []
        if acked:
            self._collect(acked)
        if self._too_large:
            self._collect_too_large()

    def _collect_too_large(self) -> None:
        """Of the records of one batch the largest is at fault; the others have not failed."""
        refused, self._too_large = self._too_large, []
        largest: dict[tuple[str, int], int] = {}
        for entry, _, where in refused:
            largest[where] = max(_size(entry), largest.get(where, 0))
        for entry, error, where in refused:
            self._failed(entry, error, innocent=_size(entry) < largest[where])

    def _collect(self, acked: list[Entry]) -> None:
        now_us = time.time_ns() // 1000
        with self._lock:
            self._latency.add_all([now_us - entry.record[6] for entry in acked if not isinstance(entry.record, Broken)])
            self._delivered += len(acked)
            self._acked_at = time.monotonic()
            self._barrier.acked(acked)
        self._out.purge([entry.id for entry in acked])

    def _failed(self, entry: Entry, error: KafkaError, *, local: bool = False, innocent: bool = False) -> None:
        failure = Failure(error.name(), error.fatal(), local, innocent)
        text = f"{error.name()}: {error.str()}"
        with self._lock:
            self._errors += 1
            verdict, trial = self._attempts.failed(entry.id, failure, datetime.now(UTC))
            trial.origin = entry.origin
            if verdict is Verdict.FATAL:
                self._out.send(FateUnknown(self._epoch, [entry.id], text))
            elif verdict is Verdict.RETRY:
                self._retry(entry, trial, text, counts=burns_attempt(failure))
                return
        if verdict is Verdict.FATAL:
            self._out.fatal(text)
        else:
            self._poisoned(entry, text)

    def _retry(self, entry: Entry, trial: Trial, text: str, *, counts: bool) -> None:
        """Send it again later; the lock is held.

        While nothing gets through at all it waits here, and with it its place in flight: nobody else could be sent
        either, and nothing more is taken from the table. But where others get through, it goes back to the
        supervisor, so that records that are stuck never use up what is shared.
        """
        if self._blocked:
            # Draining or fenced: no retry (P13). Its row is marked again by whoever leads next.
            self._give_up(entry.id)
            return
        wait_s = self._attempts.wait_s(trial, random.random())
        self._retried += 1
        if counts or self._acked_at > entry.sent_at:
            self._park(entry, trial, text, wait_s)
        else:
            self._hold(entry.id, wait_s)

    def _park(self, entry: Entry, trial: Trial, text: str, wait_s: float, *, held: bool = False) -> None:
        """Give it back to the supervisor until it is time; the lock is held."""
        behind = self._barrier.park(entry.id)
        self._out.send(Parked(self._epoch, entry.id, behind, text, wait_s, trial.attempts, held))

    def _poisoned(self, entry: Entry, text: str) -> None:
        """No further attempt would help: do what the policy says."""
        policy = self._attempts.policy
        if policy.poison == "quarantine":
            self._to_quarantine(entry, text)
            return
        with self._lock:
            if self._blocked:
                self._give_up(entry.id)
                return
            trial = self._attempts.impossible(entry.id, datetime.now(UTC))
            self._park(entry, trial, text, policy.retry_backoff_max_s, held=True)
            if policy.poison == "stop":
                self._out.send(Poisoned(entry.id, text))

    def _give_up(self, record_id: int) -> None:
        """Lower its barrier unsent, with all that stands behind it; the lock is held, so that the supervisor hears of
        it in order with the answer to a remark."""
        self._out.send(Dropped([record_id, *self._barrier.forget(record_id)]))

    def _to_quarantine(self, entry: Entry, error: str) -> None:
        with self._lock:
            trial = self._attempts.impossible(entry.id, datetime.now(UTC))
            term, holder = self._term, self._holder
            if term is None or holder is None:
                self._give_up(entry.id)
                return
            self._barrier.acked((entry,))
        origin = entry.origin or None
        self._out.quarantine(Poison(entry.id, error, trial.attempts, trial.first_failed_at, term, holder, origin))

    # -- commits

    def purged(self, ids: Sequence[int]) -> None:
        """The DELETE of these ids has committed: lower their barriers, send what follows. Purger's thread."""
        with self._lock:
            ready = self._barrier.settle(ids, time.monotonic())
            self._attempts.settled(ids)
            self._out.send(Settled(ids))  # in order with the answer to a remark
        self._produce(ready)

    def quarantined(self, poison: Poison, outcome: Outcome) -> None:
        """The outcome of a quarantine has committed. Purger's thread."""
        if outcome is Outcome.FENCED:
            with self._lock:
                self._give_up(poison.id)
            return
        if outcome is Outcome.MOVED:
            self._quarantined += 1
            self._out.send(Quarantined(poison.id, poison.error))
        self.purged([poison.id])

    # -- time

    def due(self, now: float) -> float | None:
        """Send the retries that are due; returns when the next one is."""
        while self._retries:
            with self._lock:
                if not self._retries:
                    break
                if self._retries[0][0] > now:
                    return self._retries[0][0]
                _, _, record_id = heapq.heappop(self._retries)
                entry = self._barrier.release(record_id)
            if entry is not None:
                self._produce((entry,))
        return None

    def check_queues(self, now: float) -> None:
        """Report the record that has been queued without progress for longer than queue_timeout."""
        with self._lock:
            waiting = self._barrier.longest_waiting()
            epoch = self._epoch
        if waiting is not None and now - waiting.since >= self._attempts.policy.queue_timeout_s:
            self._out.send(QueueTimedOut(epoch, waiting.id, now - waiting.since))

    def stats(self) -> Stats | None:
        """Figures for the supervisor; None while nothing has changed and nothing is unsettled."""
        with self._lock:
            barrier = self._barrier
            now = (barrier.queued, barrier.in_flight, barrier.held, self._delivered, self._errors, self._quarantined)
            if now == self._seen and not barrier.in_flight:
                return None
            self._seen = now
            latency, self._latency = self._latency, Histogram()
        return Stats(*now[:4], self._retried, *now[4:], latency.pack().hex())


def _size(entry: Entry) -> int:
    record = entry.record
    return 0 if isinstance(record, Broken) else len(record.key or b"") + len(record.value or b"")
