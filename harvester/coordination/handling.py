"""Gives records to an application's handler, and handles its exceptions. Thin.

`core.record_queues` decides what is handled next, and what a failure leads to. A single worker runs the handler in the
consumer's thread; as long as nothing waits for a retry, records go to it without a queue. Several workers run it in
their own threads, which only take from the queues: everything that concerns the consumer (events, commits) stays in its
thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harvester.clock import clock_s
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.core.record_queues import FailureAction, PendingRecord, RecordQueues
from harvester.coordination.dead_letters import DeadLetterWriter, dead_letter
from harvester.coordination.events import GivenUp
from harvester.coordination.session import Session
from harvester.coordination.settings import ConsumerSettings, Durations
from harvester.errors import BrokerError, BrokerUnavailable, InboxError, InboxFenced, InboxUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
IDLE_S = 0.1
_BUSY_S = 0.02  # between checks of what workers have done
TURN_S = 0.1  # how long queued records are handled before the consumer is attended to
_TIDY_S = 0.02
AHEAD = 2  # ready records per worker

Claim = PartitionBuffer | None  # the claim of a record; None: it had ended before the record was queued
Queued = PendingRecord[Claim]


class Handling:
    """The records that a handler has in hand or will be given again. For several threads at once."""

    def __init__(
        self, settings: ConsumerSettings, client_id: str, session: Session, is_paused: Callable[[GroupPartition], bool]
    ) -> None:
        self._settings, self._client_id, self._session, self._is_paused = settings, client_id, session, is_paused
        self.policy, self.at_most_once = settings.failure_policy, settings.at_most_once
        self.queues = RecordQueues[Claim]()
        self._done: deque[tuple[Queued, GivenUp | None]] = deque()  # for the consumer's thread to announce and commit
        self._announce_at = 0.0  # not before; not 0: nothing else is handled until then
        lock = threading.RLock()  # guards all of this
        self.changed = threading.Condition(lock)  # there may be something to handle
        self.finished = threading.Condition(lock)  # something has been handled
        self.error: BaseException | None = None  # the error that ends the consumer
        self.failures = self.retries = self.given_up = self.dead_letters = 0
        self.processing = Durations()
        self._claims: set[Claim] = set()
        self._tidy_at = 0.0
        self._writer: DeadLetterWriter | None = None
        if settings.on_error == "dead-letter":
            self._writer = DeadLetterWriter(settings.dead_letters, settings.kafka)

    def close(self) -> None:
        """To be called when the consumer's claims have ended."""
        if self._writer is not None:
            self._writer.close()

    def admit(self, record: Any, *, in_hand: bool = False, failed: bool = False) -> Queued:
        """A record was handed out, and is handled in its turn; or it is already in hand.

        `failed`: it was in the handler in the meantime, when its claim may have ended and another may have begun.
        """
        claim = self._session.buffer.get(GroupPartition(self._settings.group, record.topic(), record.partition()))
        if failed and claim is not None and not self.at_most_once:
            with self._session.lock:
                if not claim.has_open(record.offset()):
                    claim = None
        lane = self._lane(record)
        with self.changed:
            self._claims.add(claim)
            queued = self.queues.add(claim, lane, record, in_hand=in_hand)
            self.changed.notify()
        return queued

    def may_pass(self, offered: Any) -> bool:
        """Whether it can be handled at once: no record before it is ready, and none of its lane waits."""
        queues = self.queues
        if self._announce_at:
            return False
        return queues.is_empty or not (isinstance(offered, list) or queues.ready or queues.waits(self._lane(offered)))

    @property
    def is_due(self) -> bool:
        """Whether there is something to do apart from records that pass."""
        if self.queues.is_empty:
            return False
        now = clock_s()
        return now >= self._tidy_at or not self.queues.wait_s(now, IDLE_S)

    def take(self) -> Queued | None:
        """The next record to handle now; its claim has just been checked."""
        with self.changed:
            return None if self._announce_at else self.queues.take(clock_s(), self._may_handle)

    def attempt(self, handler: Callable[[Any], object], queued: Queued) -> None:
        """Handle it, whatever the outcome."""
        began = clock_s()
        try:
            handler(queued.record)
        except Exception as error:  # noqa: BLE001 - the application's; on_error decides what follows
            self.took(began)
            self.fail(queued, error)
        except BaseException as error:  # noqa: BLE001 - it ends the consumer, whatever the thread
            self.end(error)
        else:
            self.took(began)
            self.finish(queued)

    def took(self, began: float) -> None:
        """A handler call that began at `began` has ended."""
        took_s = clock_s() - began
        with self.changed:
            self.processing.add(took_s)

    def end(self, error: BaseException) -> None:
        """The consumer ends with the first such error."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def finish(self, queued: Queued, given_up: GivenUp | None = None) -> None:
        """The record is processed or given up."""
        with self.changed:
            self.queues.settle(queued)
            self._done.append((queued, given_up))
            self.finished.notify()

    def next_done(self) -> tuple[Queued, GivenUp | None] | None:
        """The next record to announce and commit, in the consumer's thread; None if there is none now.

        A record that was given up after its claim had ended is neither: the next holder tries it again.
        """
        if clock_s() < self._announce_at:
            return None
        self._announce_at = 0.0
        while self._done:
            queued, given_up = self._done.popleft()
            if given_up is None or not self._is_of_another(queued.claim):
                return queued, given_up
        return None

    def postpone(self, queued: Queued, given_up: GivenUp | None, error: InboxError) -> None:
        """The application could not take note of a record that is given up; raises the error if it never will."""
        if not self._passes(error):
            raise error
        self._done.appendleft((queued, given_up))
        wait_s = self.policy.wait_s(1)
        self._announce_at = clock_s() + wait_s
        _LOGGER.warning("`on_event` failed, and is called again in %g s: %s", wait_s, error)

    def fail(self, queued: Queued, error: BaseException) -> None:
        """The handler raised; waits until a dead letter has been written."""
        record, attempts = queued.record, queued.attempts + 1
        counts = self.policy.on_error == "stop" or not isinstance(error, InboxError)
        action = self._judge(error, attempts)
        if action in (FailureAction.DEAD_LETTER, FailureAction.SKIP) and self._is_of_another(queued.claim):
            action = FailureAction.RETRY
        where = f"{record.topic()}[{record.partition()}]@{record.offset()}"
        if action is not FailureAction.STOP:  # whose error is raised
            trace = error if attempts == 1 else None
            _LOGGER.warning("try %d of %s failed with %r: %s", attempts, where, error, action.value, exc_info=trace)
        if action is FailureAction.DEAD_LETTER:
            action, error = self._send(record, error, attempts)
        with self.changed:
            self.failures += 1
            match action:
                case FailureAction.RETRY:
                    self.retries += 1
                    self.queues.retry(queued, clock_s() + self.policy.wait_s(attempts), counts=counts)
                case FailureAction.STOP:
                    self.end(error)
                case _:
                    self.given_up += 1
                    self.dead_letters += action is FailureAction.DEAD_LETTER
                    self.finish(queued, GivenUp(record, error, attempts, action is FailureAction.DEAD_LETTER))

    def fail_at_once(self, record: Any, error: BaseException) -> None:
        """The handler raised on a record that was not queued, with none of its lane queued."""
        self.fail(self.admit(record, in_hand=True, failed=True), error)

    def fail_offered(self, offered: Any, error: BaseException) -> None:
        """Like `fail_at_once`. A list is retried record by record, so that one of them does not affect the others."""
        records = as_records(offered)
        again = len(records) > 1 and not self.at_most_once and self.policy.judge(1) is not FailureAction.STOP
        for record in records:
            if self.error is None:
                if again:
                    self.admit(record, failed=True)
                else:
                    self.fail_at_once(record, error)

    def tidy(self) -> None:
        """Forget what belongs to ended claims, and release those being given up. To be called in the consumer's thread,
        while it has nothing in hand itself.
        """
        now = clock_s()
        if now < self._tidy_at:
            return
        self._tidy_at = now + _TIDY_S
        with self.changed, self._session.lock:
            for claim in tuple(self._claims):
                if claim is None or claim.stopping_at is not None or not self._is_current(claim):
                    self.queues.drop(claim)
                    self._claims.discard(claim)
            for buffer in self._session.buffer.values():
                if buffer.stopping_at is not None and not (self._done or self.queues.holds(buffer)):
                    buffer.laid_down = True

    def wait_s(self) -> float:
        """How long the consumer's thread may wait for records."""
        if self.queues.in_hand or self.queues.ready:
            return _BUSY_S
        return self.queues.wait_s(clock_s(), IDLE_S)

    def _lane(self, record: Any) -> tuple[str, int, int, Any]:
        """What a record waits for: others of its key, of its partition, or nothing."""
        order, key = self._settings.order, record.key()
        if order == "none" or (order == "key" and key is None):
            return (record.topic(), record.partition(), record.offset(), None)
        return (record.topic(), record.partition(), -1, key if order == "key" else None)

    def _may_handle(self, claim: Claim) -> bool:
        session = self._session
        with session.lock:
            return (
                claim is not None
                and self._is_current(claim)
                and claim.stopping_at is None
                and session.error is None
                and clock_s() < session.holding(claim.place).hand_out_until(self._settings.pace)
                and not self._is_paused(claim.place)
            )

    def _judge(self, error: BaseException, attempts: int) -> FailureAction:
        """What the inbox refuses is no fault of the record: it may come in the wrong order, or belong to another by
        now; or the inbox's database is away.
        """
        if isinstance(error, InboxError) and self.policy.on_error != "stop":
            return FailureAction.RETRY if self._passes(error) else FailureAction.STOP
        return self.policy.judge(attempts)

    def _passes(self, error: InboxError) -> bool:
        """Whether the claim will have ended, or the database will be back."""
        return isinstance(error, InboxFenced | InboxUnavailable) and not self.at_most_once

    def _is_of_another(self, claim: Claim) -> bool:
        """At least once: the claim has ended, and the next holder tries the record again."""
        return not self.at_most_once and (claim is None or not self._is_current(claim))

    def _is_current(self, claim: PartitionBuffer) -> bool:
        return self._session.buffer.get(claim.place) is claim

    def _send(self, record: Any, error: BaseException, attempts: int) -> tuple[FailureAction, BaseException]:
        assert self._writer is not None
        letter = dead_letter(
            record, group=self._settings.group, client=self._client_id, error=error, attempts=attempts,
            now_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip
        try:
            self._writer.send(letter)
        except BrokerError as problem:
            passes = isinstance(problem, BrokerUnavailable) and not self.at_most_once
            _LOGGER.warning("%s could not be written as a dead letter yet: %s", letter.place, problem)
            return FailureAction.RETRY if passes else FailureAction.STOP, problem
        return FailureAction.DEAD_LETTER, error


class ConsumerRun:
    """One run of a consumer, in its thread: from its records to its commits.

    `handler` receives what is offered, a record or a list; `single` a record that was queued.
    """

    def __init__(
        self,
        handling: Handling,
        handler: Callable[[Any], object],
        single: Callable[[Any], object],
        *,
        workers: int,
        commit: Callable[[Any], None],
        announce: Callable[[GivenUp | None], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._handling, self._handler, self._single, self._workers = handling, handler, single, workers
        self._commit, self._announce, self._is_stopping = commit, announce, is_stopping

    def run(self, offers: Iterator[Any]) -> None:
        """Runs until there are no more offers; raises what ends the consumer."""
        handling = self._handling
        with self._threads():
            direct = self._workers == 1
            for offered in offers:
                if direct and offered is not None and handling.may_pass(offered):
                    began = clock_s()
                    try:
                        self._handler(offered)
                    except Exception as error:  # noqa: BLE001 - the application's; on_error decides what follows
                        handling.took(began)
                        handling.fail_offered(offered, error)
                    else:
                        handling.processing.add(clock_s() - began)  # no other thread adds to it
                        self._commit(offered)
                        if not handling.is_due:
                            continue
                elif offered is not None:
                    for record in as_records(offered):
                        handling.admit(record)
                self._turn()
                if handling.error is not None:
                    break
        if handling.error is not None:
            raise handling.error

    def _turn(self) -> None:
        handling = self._handling
        self._flush()
        if self._workers == 1:
            until = clock_s() + TURN_S
            while handling.error is None and not self._is_stopping() and clock_s() < until:
                queued = handling.take()
                if queued is None:
                    break
                handling.attempt(self._single, queued)
                self._flush()
        else:
            with handling.changed:
                enough = AHEAD * self._workers
                if handling.queues.ready >= enough:
                    handling.finished.wait(_BUSY_S)
            self._flush()
        handling.tidy()

    def _flush(self) -> None:
        while (done := self._handling.next_done()) is not None:
            queued, given_up = done
            try:
                self._announce(given_up)
            except InboxError as error:
                self._handling.postpone(queued, given_up, error)
            else:
                self._commit(queued.record)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        ended = threading.Event()
        names = range(self._workers) if self._workers > 1 else ()
        threads = [threading.Thread(target=self._work, args=(ended,), name=f"worker-{each}") for each in names]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            with self._handling.changed:
                self._handling.changed.notify_all()
            for thread in threads:
                thread.join()
            self._flush()  # also if the consumer raises: what was in hand is finished

    def _work(self, ended: threading.Event) -> None:
        handling = self._handling
        while not (ended.is_set() or handling.error is not None or self._is_stopping()):
            with handling.changed:
                queued = handling.take()
                if queued is None:
                    handling.changed.wait(handling.queues.wait_s(clock_s(), IDLE_S))
                    continue
            try:
                handling.attempt(self._single, queued)
            except Exception as error:  # noqa: BLE001 - the top frame of this thread; `run` raises it
                handling.end(error)


def as_records(offered: Any) -> Sequence[Any]:
    """The records of a list, or the single record."""
    return offered if isinstance(offered, list) else [offered]
