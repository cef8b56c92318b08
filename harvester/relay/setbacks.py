"""What becomes of records that could not be sent: tried again, parked, held, quarantined or given back.

At-least-once mode; `harvester.relay.refusals` is of the other. The lock is the sender's. What says so is called with it
held, all else takes it.
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

from confluent_kafka import KafkaError

from harvester.delivery.decode import Broken
from harvester.delivery.failures import Failure, Verdict, burns_attempt, may_arrive
from harvester.outbox.purge_session import Poison
from harvester.relay.attempts import Attempts, Policy, Trial
from harvester.relay.barrier import Barrier, Entry
from harvester.relay.frames import Dropped, FateUnknown, InDoubt, Parked, Poisoned
from harvester.relay.outlets import Outlets

_BUFFER_RETRY_S = 0.05

TooLarge = tuple[Entry, KafkaError, tuple[str, int]]  # with topic and partition


@dataclass(slots=True)
class Standing:
    """Under whom a sender sends, if it does; changed under its lock."""

    epoch: int = 0
    term: int | None = None
    holder: str | None = None
    blocked: bool = True  # until the first Remark under a term


class Setbacks:
    """See the module's text."""

    def __init__(
        self, policy: Policy, barrier: Barrier, standing: Standing, lock: threading.Lock, outlets: Outlets
    ) -> None:
        self.attempts = Attempts(policy)
        self._barrier, self._standing, self._lock, self._out = barrier, standing, lock, outlets
        self._retries: list[tuple[float, int, int]] = []  # due, tie-breaker, record id
        self._order = itertools.count()
        self.errors = self.retried = 0
        self.acked_at = 0.0  # when the last acknowledgement came: the broker takes records

    # -- what went wrong

    def put_off(self, entry: Entry) -> None:
        """The producer's own queue is full: try again in a moment, without counting it as a failure."""
        with self._lock:
            if entry.id not in self._barrier:
                return
            self._hold(entry.id, _BUFFER_RETRY_S)

    def too_large(self, refused: Sequence[TooLarge]) -> None:
        """Of the records of one batch the largest is at fault; the others have not failed."""
        largest: dict[tuple[str, int], int] = {}
        for entry, _, where in refused:
            largest[where] = max(_size(entry), largest.get(where, 0))
        for entry, error, where in refused:
            self.failed(entry, error, innocent=_size(entry) < largest[where])

    def failed(self, entry: Entry, error: KafkaError, *, local: bool = False, innocent: bool = False) -> None:
        """The client, or the broker, says so of a record on the wire. `local`, `innocent`: as of `Failure`."""
        failure = Failure(error.name(), error.fatal(), local, innocent)
        text = f"{error.name()}: {error.str()}"
        with self._lock:
            self.errors += 1
            verdict, trial = self.attempts.failed(entry.id, failure, datetime.now(UTC))
            trial.origin = entry.origin
            if verdict is Verdict.FATAL:
                self._out.send(FateUnknown(self._standing.epoch, [entry.id], text))
            elif verdict is Verdict.RETRY:
                if entry.key is not None and may_arrive(failure):
                    self._out.send(InDoubt(entry.id))
                self._retry(entry, trial, text, counts=burns_attempt(failure))
                return
        if verdict is Verdict.FATAL:
            self._out.fatal(text)
        else:
            self.poisoned(entry, text)

    def poisoned(self, entry: Entry, text: str) -> None:
        """No further attempt would help: do what the policy says."""
        policy = self.attempts.policy
        if policy.poison == "quarantine":
            self._to_quarantine(entry, text)
            return
        with self._lock:
            if self._standing.blocked:
                self.give_up(entry.id)
                return
            trial = self.attempts.impossible(entry.id, datetime.now(UTC))
            self._park(entry, trial, text, policy.retry_backoff_max_s, held=True)
            if policy.poison == "stop":
                self._out.send(Poisoned(entry.id, text))

    # -- what follows

    def _retry(self, entry: Entry, trial: Trial, text: str, *, counts: bool) -> None:
        """Send it again later; the lock is held.

        While nothing gets through at all it waits here, and with it its place in flight: nobody else could be sent
        either, and nothing more is taken from the table. But where others get through, it goes back to the
        supervisor, so that records that are stuck never use up what is shared.
        """
        if self._standing.blocked:
            # Draining or fenced: no retry (P13). Its row is marked again by whoever leads next.
            self.give_up(entry.id)
            return
        wait_s = self.attempts.wait_s(trial, random.random())
        self.retried += 1
        if counts or self.acked_at > entry.sent_at:
            self._park(entry, trial, text, wait_s)
        else:
            self._hold(entry.id, wait_s)

    def _hold(self, record_id: int, wait_s: float) -> None:
        """Try it again from here; the lock is held."""
        self._barrier.hold(record_id)
        heapq.heappush(self._retries, (time.monotonic() + wait_s, next(self._order), record_id))
        self._out.wake()

    def _park(self, entry: Entry, trial: Trial, text: str, wait_s: float, *, held: bool = False) -> None:
        """Give it back to the supervisor until it is time; the lock is held."""
        behind = self._barrier.park(entry.id)
        self._out.send(Parked(self._standing.epoch, entry.id, behind, text, wait_s, trial.attempts, held))

    def give_up(self, record_id: int) -> None:
        """Lower its barrier unsent, with all that stands behind it; the lock is held, so that the supervisor hears of
        it in order with the answer to a remark."""
        self._out.send(Dropped([record_id, *self._barrier.forget(record_id)]))

    def _to_quarantine(self, entry: Entry, error: str) -> None:
        with self._lock:
            trial = self.attempts.impossible(entry.id, datetime.now(UTC))
            term, holder = self._standing.term, self._standing.holder
            if term is None or holder is None:
                self.give_up(entry.id)
                return
            self._barrier.acked((entry,))
        origin = entry.origin or None
        self._out.quarantine(Poison(entry.id, error, trial.attempts, trial.first_failed_at, term, holder, origin))

    # -- time

    def forget_retries(self) -> None:
        """What waits here is not tried again; the lock is held."""
        self._retries.clear()

    def due(self, now: float, produce: Callable[[Iterable[Entry]], None]) -> float | None:
        """Hand those whose time has come to `produce`, one by one; returns when the next one's comes."""
        while self._retries:
            with self._lock:
                if not self._retries:
                    break
                if self._retries[0][0] > now:
                    return self._retries[0][0]
                _, _, record_id = heapq.heappop(self._retries)
                entry = self._barrier.release(record_id, now)
            if entry is not None:
                produce((entry,))
        return None


def _size(entry: Entry) -> int:
    record = entry.record
    return 0 if isinstance(record, Broken) else len(record.key or b"") + len(record.value or b"")
