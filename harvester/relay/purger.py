"""The purger: a shard's database thread. It deletes acknowledged rows and quarantines those that cannot be published.

A batch is whatever came in while the last statement ran, so batches grow by themselves under load. With many shards,
each sees few acknowledgements at a time, and statements would be many and small; so a batch waits a moment for more:
while something waits for what it would free, until it is half of what is in flight (not at all if little is); otherwise
until it is worth a statement by itself. A statement's callback runs only when its commit has come back (P1, P2).

While little is in flight and the next record of a key waits, each step of the way is felt. Then the thread that serves
the producer's reports runs the statement itself (`purge_here`), unless the purger's thread is at one; both hold
`_using` while they use the session. Whatever takes more than one statement is left to the purger's thread: a broken
session, rows locked by others, quarantines.

A purge is idempotent and not fenced by the term. It is repeated, over a new connection if need be, until it succeeds:
an acknowledged record must leave the outbox. It deletes only the row that was read, not another one that has its id by
now (P50). A row locked by another session holds up only its own key: after a short wait the other rows are deleted
without it, and it is retried separately.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar
from uuid import UUID

import psycopg

from harvester.delivery.decode import row_versions
from harvester.errors import OutboxError
from harvester.failpoints import Failpoints
from harvester.outbox.connection import one_line
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome
from harvester.outbox.sql.queries import Row
from harvester.record import ReadRow, RowVersions
from harvester.relay.core.frames import Frame, Trouble

_GATHER_FROM_RECORDS = 16
_WORTH_RECORDS = 16
_GATHER_MAX_S = 0.02
_LOCKED_AGAIN_S = 0.5
_LOOK_S = 1.0
_BY_ID = attrgetter("id")

T = TypeVar("T")


class ShardRecords(Protocol):
    """A shard's records, notified about their rows on the purger's thread: `Sender` or `TransactionIntake`."""

    @property
    def unsettled(self) -> int: ...  # handed to the producer and not settled
    @property
    def is_awaited(self) -> bool: ...  # whether anything here waits for a record to be settled
    def purged(self, ids: Sequence[int]) -> None: ...  # their DELETE has committed
    def quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None: ...


class ShardHost(Protocol):
    """A shard as its parts use it (`harvester.relay.shard.Shard`). All methods are thread-safe, and all but
    `purge`, which may take a statement, are quick.
    """

    index: int
    failpoints: Failpoints

    @property
    def records(self) -> ShardRecords: ...
    def trusted(self) -> bool: ...  # whether a record may be produced now; called for every record
    def send(self, frame: Frame, /) -> None: ...  # to the supervisor
    def purge(self, rows: Sequence[ReadRow], /) -> None: ...  # as `Purger.purge` or `Purger.purge_here`
    def quarantine(self, poison: PoisonRow, /) -> None: ...  # as `Purger.quarantine`
    def wake(self) -> None: ...  # wakes the main thread, because a retry was scheduled
    @property
    def is_crowded(self) -> bool: ...  # so much is in flight over all shards that every purge lets something continue
    def die(self, reason: str, /) -> None: ...  # nothing can be sent or settled any more: end the process


class Purger(threading.Thread):
    """A shard's thread for purges, quarantines and other uses of its session."""

    def __init__(self, session: PurgeSession, backoff_s: float, shard: ShardHost) -> None:
        super().__init__(name="purger", daemon=True)
        self._session, self._backoff_s, self._shard = session, backoff_s, shard
        self._acked: deque[ReadRow] = deque()
        self._locked: list[ReadRow] = []  # rows locked by other sessions
        self._locked_due = 0.0
        self._poison: deque[tuple[PoisonRow, float]] = deque()  # with the time of the next attempt
        self._calls: deque[Callable[[], None]] = deque()  # other threads' requests to use the session
        self._using = threading.Lock()  # held by the thread that uses the session, and changes `_locked`
        self._work = threading.Event()
        self._enough = threading.Event()
        self._ended = threading.Event()
        self._troubles: set[str] = set()
        self.connected = threading.Event()

    def purge(self, rows: Sequence[ReadRow]) -> None:
        """Delete these rows soon; thread-safe, cheap."""
        self._acked.extend(rows)
        self._wake()

    def purge_here(self, rows: Sequence[ReadRow]) -> None:
        """Delete these rows: on the caller's thread if something waits for them and little is in flight, else `purge`.

        Takes one statement, or a few if rows are locked or missing. Whatever fails is left to the purger's thread.
        """
        self._acked.extend(rows)
        few = self._shard.records.unsettled < _GATHER_FROM_RECORDS
        if few and self._is_worth_a_statement() and self._using.acquire(blocking=False):
            try:
                self._purge_once()
            finally:
                self._using.release()
        if self._acked or self._locked:
            self._wake()

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()
        self.hurry()

    def hurry(self) -> None:
        """Something may be waiting now."""
        if self._acked and self._is_worth_a_statement():
            self._enough.set()

    def _is_worth_a_statement(self) -> bool:
        records = self._shard.records
        if not (self._shard.is_crowded or records.is_awaited):
            return len(self._acked) >= _WORTH_RECORDS
        in_flight = records.unsettled
        return in_flight < _GATHER_FROM_RECORDS or 2 * len(self._acked) >= in_flight

    def quarantine(self, poison: PoisonRow) -> None:
        """Move this row to quarantine; thread-safe."""
        self._poison.append((poison, 0.0))
        self._work.set()

    def ask(self, action: Callable[[], T]) -> T | None:
        """Run `action` on this thread, with the session ready, until it succeeds; None if the thread ends first."""
        answer: Future[T] = Future()
        self._calls.append(lambda: answer.set_result(action()))
        self._work.set()
        self._enough.set()
        while not answer.done():
            wait((answer,), _LOOK_S)
            if not self.is_alive() and not answer.done():
                return None
        return answer.result()

    def term(self) -> tuple[int, str | None] | None:
        """Term and holder as currently in the term row, read on this thread; None: see `ask`."""
        return self.ask(self._session.term)

    def progress_topic(self) -> str | None:
        """The id of the progress topic that the term row records, empty if it records none; None: see `ask`."""
        return self.ask(lambda: self._session.progress_topic() or "")

    def delete(self, rows: RowVersions) -> bool:
        """Delete these rows now, on this thread; False if the thread ends first, as when other rows have their ids."""

        def delete() -> bool:
            self._refuse(self._session.delete(rows))
            return True

        return self.ask(delete) is not None

    def delete_same(
        self, ids: Sequence[int], same: Callable[[list[Row]], RowVersions], incarnation: UUID
    ) -> list[int] | None:
        """Calls `PurgeSession.delete_same` on this thread; None: see `ask`."""
        return self.ask(lambda: self._session.delete_same(ids, same, incarnation))

    def stop(self) -> None:
        """End the thread once the running statement has ended."""
        self._ended.set()
        self._work.set()
        self._enough.set()

    def run(self) -> None:
        try:
            if self._attempt(lambda: None):
                self.connected.set()
            while not self._ended.is_set():
                self._work.wait(self._until_next_s())
                self._gather()
                with self._using:
                    batch = self._acknowledged()
                    if batch and self._attempt(partial(self._purge_rows, batch)):
                        self._settled(batch)
                    self._retry_locked()
                    self._settle_poison()
                    while self._calls:
                        self._attempt(self._calls.popleft())
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would settle
            self._shard.die(f"the purger failed: {error!r}")
        finally:
            with self._using:
                self._session.close()

    def _gather(self) -> None:
        """Wait a moment for a batch that is worth a statement."""
        self._enough.clear()
        if not self._poison and not self._calls and not self._is_worth_a_statement():
            self._enough.wait(_GATHER_MAX_S)
        self._work.clear()

    # -- purges

    def _acknowledged(self) -> list[ReadRow]:
        """Take what has come in, sorted: all sessions lock rows in the same order."""
        return sorted((self._acked.popleft() for _ in range(len(self._acked))), key=_BY_ID)

    def _purge_once(self) -> None:
        """Delete what has come in; a session that is not ready, or fails, leaves it where it was."""
        batch = self._acknowledged() if self._session.is_ready() else []
        if not batch:
            return
        try:
            self._purge_rows(batch)
        except (psycopg.Error, OutboxError):
            self._acked.extend(batch)
        else:
            self._settled(batch)

    def _purge_rows(self, batch: list[ReadRow]) -> None:
        try:
            others = self._session.delete(row_versions(batch))
        except psycopg.errors.LockNotAvailable:
            self._delete_unlocked(batch)
        else:
            self._refuse(others)

    def _delete_unlocked(self, batch: list[ReadRow]) -> None:
        locked, others = self._session.delete_unlocked(row_versions(batch))
        self._refuse(others)
        is_locked = set(locked)
        self._locked += [row for row in batch if row.id in is_locked]
        self._locked_due = time.monotonic() + _LOCKED_AGAIN_S

    def _refuse(self, others: list[int]) -> None:
        """Other records have these ids: unless another process leads by now, nothing continues here."""
        if others:
            self._session.refuse_other(others[0])

    def _retry_locked(self) -> None:
        if not self._locked or time.monotonic() < self._locked_due:
            return
        batch, self._locked = sorted(self._locked, key=_BY_ID), []
        if self._attempt(partial(self._delete_unlocked, batch)):
            self._settled(batch)

    def _settled(self, batch: list[ReadRow]) -> None:
        """The statement has committed; rows that it skipped are not settled."""
        locked = {row.id for row in self._locked}
        self._note("locked", f"database: another session holds a lock on record {min(locked)}" if locked else None)
        settled = [row.id for row in batch if row.id not in locked] if locked else [row.id for row in batch]
        if settled:
            self._shard.failpoints.hit("shard.purged", index=self._shard.index, ids=settled)
            self._shard.records.purged(settled)

    # -- quarantine

    def _settle_poison(self) -> None:
        """Try each record that is due once: one that cannot be moved must not block purges."""
        now = time.monotonic()
        for _ in range(len(self._poison)):
            poison, due = self._poison.popleft()
            if due > now:
                self._poison.append((poison, due))
                continue
            try:
                self._session.ready()
                outcome = self._session.quarantine(poison)
            except (psycopg.Error, OutboxError) as error:
                self._note("quarantine", f"quarantine: record {poison.id} cannot be moved: {one_line(error)}")
                self._poison.append((poison, now + self._backoff_s))
                continue
            self._note("quarantine", None)
            self._shard.records.quarantined(poison, outcome)

    # -- attempts

    def _until_next_s(self) -> float | None:
        due = [at for _, at in tuple(self._poison)]  # others add to it
        if self._locked:
            due.append(self._locked_due)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Run `action` until it succeeds (True) or the thread is to end (False)."""
        while not self._ended.is_set():
            try:
                self._session.ready()
                action()
            except (psycopg.Error, OutboxError) as error:
                self._note("database", f"database: {one_line(error)}")
                self._ended.wait(self._backoff_s)
            else:
                self._note("database", None)
                return True
        return False

    def _note(self, what: str, trouble: str | None) -> None:
        """Report a trouble; report its end when no trouble is left."""
        if trouble is not None:
            self._troubles.add(what)
            self._shard.send(Trouble(trouble))
        elif what in self._troubles:
            self._troubles.discard(what)
            if not self._troubles:
                self._shard.send(Trouble(None))
