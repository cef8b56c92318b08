"""A shard's records and pending frames in exactly-once mode: everything the transactor shares with other threads.

The shard's main thread brings rows and the supervisor's frames, the purger's thread reports commits, and the transactor
(`exactly_once`) takes queued records into transactions and replies. One lock, that of `changed`, serialises them, and
no thread waits for anything while holding it.

Failed records are handled under the same lock, after the open transaction has been undone, so that all records are
queued: `Refusals` determines which one is at fault, and what happens to it and its key.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from confluent_kafka import KafkaError

from harvester.delivery.decode import Oversize, decode
from harvester.delivery.lane import Lane
from harvester.delivery.retries import NEVER, Attempts, Failure, Policy, RetryVerdict, burns_attempt
from harvester.outbox.purge_session import PoisonRow, QuarantineOutcome
from harvester.record import KafkaRecord
from harvester.relay.core import frames as f
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.purger import ShardHost
from harvester.relay.put_away import NOT_STORED, Outcome, PutAway
from harvester.telemetry.latency import Histogram

_MOST_BYTES = 1 << 23  # a commit must be over soon, or its outcome counts as unclear


class TransactionIntake:
    """A shard's records in exactly-once mode. The transactor uses public attributes under the lock, except for single
    reads.
    """

    doubted_at = -math.inf  # as in `Sender`; never set, since an uncommitted transaction has no effect

    def __init__(self, most: int, policy: Policy, shard: ShardHost, put_away: PutAway | None = None) -> None:
        """`most` records go into one transaction. `put_away`: see `Sender`."""
        self._shard, self._put_away = shard, put_away
        self.changed = threading.Condition(threading.Lock())
        self.batches = TransactionQueue(most, 0, _MOST_BYTES)
        self.refusals = Refusals(self.batches, policy, shard)
        self._attempts = self.refusals.attempts
        self.pending: f.Remark | None = None  # not yet answered by the transactor
        self.under: f.Remark | None = None  # the leadership to which the shard belongs
        self.ended = False
        self.lane: Lane | None = None  # the transactor's, while it is open
        self.low_water: int | None = None
        self._latency = Histogram()
        self._delivered = self._quarantined = 0
        self._seen: tuple[int, ...] = ()
        self._committed_at = time.monotonic()

    # -- frames; the shard's main thread

    def dispatch(self, frame: f.Dispatch) -> None:
        now = time.monotonic()
        sums: list[int] = []
        records = decode(frame.rows, sums) if self._put_away is None else self._put_away.decode(frame.rows, sums)
        entries = [QueuedRecord(row[0], row[1], row, now, row_sum) for row, row_sum in zip(records, sums, strict=True)]
        with self.changed:
            meant = self.pending or self.under
            blocked = meant is None or meant.term is None
            stale = meant is None or blocked or frame.epoch != meant.epoch
            self.low_water = frame.low_water
            if self._attempts.states:
                for entry in entries:
                    entry.alone = self._attempts.has_timed_out(entry.id)
            refused = [entry.id for entry in (entries if stale else self.batches.offer_all(entries))]
            if refused:
                self._shard.send(f.Dropped(refused) if blocked else f.Refused(frame.epoch, refused))
            self._store_oversize()
            self.changed.notify()

    def remark(self, frame: f.Remark) -> None:
        """Drop what is not committed; the transactor replies when the lane is ready for the frame's term."""
        with self.changed:
            self.pending = frame
            self.batches.drop_queue()
            self.changed.notify()

    def closed(self, epoch: int, record_id: int) -> None:
        """The supervisor has recorded this parked record; its key is accepted again."""
        with self.changed:
            if self.under is not None and epoch == self.under.epoch:
                self.batches.reopen(record_id)

    def stop(self) -> None:
        """Send nothing from now on; what is not being committed is dropped without a report."""
        with self.changed:
            self.ended, self.under = True, None
            self.batches.drop_queue()
            self.changed.notify()

    @property
    def unsettled(self) -> int:
        """Records in a transaction or not yet purged; read without the lock: briefly too many, never too few."""
        return self.batches.in_flight

    @property
    def is_awaited(self) -> bool:
        """Whether the shutdown waits for records to be settled; no other record does."""
        return self.under is None or self.pending is not None

    def due(self, _now: float) -> float | None:
        return None

    def check_queues(self, now: float) -> None:
        """Report the record that has waited for longer than queue_timeout while transactions could have been
        committed.
        """
        with self.changed:
            oldest, under = self.batches.oldest(), self.under
            if oldest is None or under is None or self.pending is not None or self.lane is None:
                return
            waited_s = now - max(oldest.since, self._committed_at)
            if waited_s >= self._attempts.policy.queue_timeout_s:
                self._shard.send(f.QueueTimedOut(under.epoch, oldest.id, waited_s))

    def stats(self) -> f.Stats | None:
        """Statistics for the supervisor, and a sign of life; None while nothing has changed and nothing is awaited."""
        with self.changed:
            batches = self.batches
            now = (batches.queued, batches.in_flight, 0, self._delivered, self.refusals.errors, self._quarantined)
            opening = self.pending is not None or (self.under is not None and self.lane is None)
            if now == self._seen and not (batches.in_flight or batches.queued) and not opening:
                return None
            self._seen = now
            latency, self._latency = self._latency, Histogram()
        stored = 0 if self._put_away is None else self._put_away.stored
        return f.Stats(*now[:4], self.refusals.retried, *now[4:], latency.pack().hex(), stored)

    # -- commits; the purger's thread

    def purged(self, ids: Sequence[int]) -> None:
        """The DELETE of these ids has committed."""
        with self.changed:
            self.batches.settle(ids)
            self._store_oversize()
            if self._attempts.states:
                self._attempts.settled(ids)
            self._shard.send(f.Settled(ids))  # in order with the answer to a remark
            self.changed.notify()  # there is room, and held keys may continue

    def quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        """The quarantine has committed with this outcome."""
        if outcome is QuarantineOutcome.FENCED:
            with self.changed:
                self.refusals.give_up(poison.id)
            return
        if outcome is QuarantineOutcome.MOVED:
            self._quarantined += 1
            self._shard.send(f.Quarantined(poison.id, poison.error))
        self.purged([poison.id])

    # -- values that are put away

    def _store_oversize(self) -> None:
        """Start storing the oversize records that have come up; the lock is held."""
        for entry in self.batches.to_store():
            assert self._put_away is not None
            assert isinstance(entry.record, Oversize)
            self._put_away.put(entry.record, partial(self._stored, entry))

    def _stored(self, entry: QueuedRecord, outcome: Outcome) -> None:
        """A value was stored, or could not be."""
        with self.changed:
            if not self.batches.is_oversize(entry):
                return  # dropped or parked in the meantime; its row may be back as another entry
            if isinstance(outcome, KafkaRecord):
                self.batches.stored(entry, outcome, time.monotonic())
            elif (meant := self.pending or self.under) is not None:
                self.refusals.not_stored(entry, outcome, meant)
            self._store_oversize()
            self.changed.notify()

    # -- the transactor

    def has_work(self) -> bool:
        if self.ended or self.pending is not None:
            return True
        return self.under is not None and (self.lane is None or self.batches.is_ready)

    def is_over(self) -> bool:
        """Whether the open transaction is no longer wanted."""
        return self.pending is not None or self.under is None

    def has_more(self) -> bool:
        """Whether the open transaction need not wait: there is another record, or it is no longer wanted."""
        return self.is_over() or self.batches.is_ready

    def commit(self, lane: int, now_us: int) -> None:
        """The open transaction has certainly committed on this lane: purge its records. The lock is held."""
        entries = self.batches.committed(lane)
        self._latency.add_all([now_us - entry.record[6] for entry in entries if isinstance(entry.record, KafkaRecord)])
        self._delivered += len(entries)
        self._committed_at = time.monotonic()
        self._shard.purge([entry.record for entry in entries])

    def judge(self, failed: Sequence[Failed]) -> None:
        """The transaction is undone: handle the records that failed. The lock is held."""
        under = self.under
        if under is None or self.pending is not None:
            self.batches.drop_queue()
        elif failed:
            self.refusals.judge(failed, under)

    def give_all_up(self) -> None:
        """Trust has expired: nothing is sent before the supervisor's next remark."""
        with self.changed:
            self.under = None
            self._shard.send(f.Dropped(self.batches.drop_queue(), in_doubt=True))


Failed = tuple[QueuedRecord, KafkaError | str]  # a text if it is not a valid record, or the client refused it


class Refusals:
    """Determines which record of a failed transaction is at fault, and handles it. The lock is held."""

    def __init__(self, batches: TransactionQueue, policy: Policy, shard: ShardHost) -> None:
        self._batches, self._shard = batches, shard
        self.attempts = Attempts(policy)
        self.errors = self.retried = 0

    def judge(self, failed: Sequence[Failed], under: f.Remark) -> None:
        """These records failed in one transaction.

        A broker refuses a whole batch: one of its records is at fault, and is found by halving. Other errors concern
        the record that they name, or its partition. If they concern the whole transaction and no record is to blame,
        nothing gets through at all, and every record keeps its position.
        """
        for entry, reason in failed:
            if isinstance(reason, str):
                self.poison(entry, reason, under)
        errors = [(entry, reason) for entry, reason in failed if isinstance(reason, KafkaError)]
        refused = [(entry, error) for entry, error in errors if error.name() in NEVER]
        others = [(entry, error) for entry, error in errors if error.name() not in NEVER]
        if refused:
            culprit = self._batches.suspect([entry for entry, _ in refused])
            if culprit is not None:
                self.fail(culprit, refused[0][1], under, local=True)
        if len(others) >= self._batches.put_back and not any(burns_attempt(Failure(e.name())) for _, e in others):
            return
        for entry, error in others:
            self.fail(entry, error, under)

    def fail(self, entry: QueuedRecord, error: KafkaError, under: f.Remark, *, local: bool = False) -> None:
        """A queued record is at fault, or its partition is unavailable; `local`: no other record can be meant."""
        if entry not in self._batches:
            return  # removed together with another record of its key
        self.errors += 1
        text = f"{error.name()}: {error.str()}"
        failure = Failure(error.name(), local=local)
        verdict, retry = self.attempts.failed(entry.id, failure, datetime.now(UTC))
        if verdict is not RetryVerdict.RETRY:
            self.poison(entry, text, under)
            return
        self.retried += 1
        self._park(entry, text, self.attempts.wait_s(retry, random.random()), retry.attempts, under)

    def not_stored(self, entry: QueuedRecord, text: str, under: f.Remark) -> None:
        """The value of an oversize record could not be stored: retry for as long as it takes."""
        self.errors += 1
        self.retried += 1
        _, retry = self.attempts.failed(entry.id, NOT_STORED, datetime.now(UTC))
        self._park(entry, text, self.attempts.wait_s(retry, random.random()), retry.attempts, under)

    def poison(self, entry: QueuedRecord, text: str, under: f.Remark) -> None:
        """No further attempt would help this queued record: apply the policy."""
        if entry not in self._batches:
            return
        policy = self.attempts.policy
        retry = self.attempts.impossible(entry.id, datetime.now(UTC))
        if policy.poison != "quarantine":
            self._park(entry, text, policy.retry_backoff_max_s, retry.attempts, under, held=True)
            if policy.poison == "stop":
                self._shard.send(f.Poisoned(entry.id, text))
            return
        assert under.term is not None
        assert under.holder is not None
        self._batches.remove(entry)
        row = entry.record
        self._shard.quarantine(
            PoisonRow(
                entry.id, text, retry.attempts, retry.first_failed_at, under.term, under.holder,
                xmin=row.xmin, created_us=row.created_us,
            )
        )  # fmt: skip

    def give_up(self, record_id: int) -> None:
        """It could not be quarantined: the term belongs to another leader, which will handle it."""
        self._shard.send(f.Dropped(self._batches.give_up(record_id), in_doubt=True))

    def _park(
        self, entry: QueuedRecord, text: str, wait_s: float, attempts: int, under: f.Remark, *, held: bool = False
    ) -> None:
        """Give it back to the supervisor until its retry is due, with what is queued behind it in its key."""
        behind = self._batches.park(entry)
        self._shard.send(f.Parked(under.epoch, entry.id, behind, text, wait_s, attempts, held))
