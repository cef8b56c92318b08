"""The mark loop's thread: performs, one after the other, what the relay machine wants of the leader's session.

In order means: a reset is done before any later mark, and a mark that was under way is over before a term is taken.
A session that cannot be opened is retried here, without end and without telling the machine: nothing was sent. A
statement that was sent and failed is reported: its fate is unknown (P4).

Liveness (P14): `is_alive` is true while the loop turns, or waits inside its own bounded retry or for a statement
that its own timeout bounds. A thread that died or hangs beyond that is not alive, and leadership ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import psycopg

from harvester.errors import OutboxError, TermLost
from harvester.outbox.connect import one_line
from harvester.outbox.copying import Row
from harvester.outbox.marker import MarkSession
from harvester.outbox.queries import key_bytes_sql
from harvester.relay.commands import Mark, Reset, TakeTerm
from harvester.relay.hooks import Hooks
from harvester.relay.router import slice_sql
from harvester.relay.waking import Waker

_STALL_MARGIN_S = 10.0
_NOTIFIED_CEILING_S = 1.0  # how long to wait between empty marks when the trigger wakes us anyway


@dataclass(frozen=True, slots=True)
class TermTaken:
    """The term row names `holder` under `term`."""

    holder: UUID
    term: int


@dataclass(frozen=True, slots=True)
class TermGone:
    """The term row names somebody else, or could not be taken because trust was over."""

    holder: UUID


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark's rows, by id."""

    number: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """A mark statement was sent and failed."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class ResetFailed:
    """A reset was sent and failed."""

    error: str


@dataclass(frozen=True, slots=True)
class DatabaseTrouble:
    """What the loop waits for; None when it is over."""

    text: str | None


@dataclass(frozen=True, slots=True)
class LoopDied:
    """The loop ended by an error that nobody foresaw."""

    error: Exception


Report = TermTaken | TermGone | Marked | MarkFailed | ResetFailed | DatabaseTrouble | LoopDied


@dataclass(frozen=True, slots=True)
class Pace:
    """Waiting times in seconds."""

    mark_backoff_s: float
    mark_backoff_max_s: float
    io_error_backoff_s: float
    statement_timeout_s: float


def idle_wait_s(idle: int, pace: Pace, notified: bool) -> float:
    """How long to wait before the next mark after `idle` empty ones in a row: doubling from floor to ceiling."""
    if idle <= 0:
        return 0.0
    ceiling_s = max(pace.mark_backoff_max_s, _NOTIFIED_CEILING_S) if notified else pace.mark_backoff_max_s
    return min(ceiling_s, pace.mark_backoff_s * 2.0 ** min(idle - 1, 40))


class MarkLoop(threading.Thread):
    """See the module's text."""

    def __init__(
        self,
        session: MarkSession,
        pace: Pace,
        name: str,
        report: Callable[[Report], None],
        trusted: Callable[[], bool],
        highest_term: Callable[[], int],
        hooks: Hooks,
    ) -> None:
        super().__init__(name="marker", daemon=True)
        self._session, self._pace, self._instance = session, pace, name
        self._report, self._trusted, self._highest_term = report, trusted, highest_term
        self._hooks = hooks
        self._commands: deque[Mark | Reset | TakeTerm] = deque()
        self._waker = Waker()
        self._ended = threading.Event()
        self._turned_at = time.monotonic()
        self._unreachable_since: float | None = None

    def perform(self, command: Mark | Reset | TakeTerm) -> None:
        """Queue a command; safe from any thread."""
        self._commands.append(command)
        self._waker.set()

    def stop(self) -> None:
        """End the thread after what is running."""
        self._ended.set()
        if self.ident is None:  # never started
            self._waker.close()
        self._waker.set()

    def is_working(self, now: float) -> bool:
        """Whether the loop is live (P14)."""
        bound_s = self._pace.statement_timeout_s + _STALL_MARGIN_S
        return self.is_alive() and now - self._turned_at < bound_s

    def unreachable_s(self, now: float) -> float:
        """For how long the database has been out of reach; 0 when it is not."""
        since = self._unreachable_since
        return 0.0 if since is None else now - since

    def run(self) -> None:
        """The thread."""
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread
            self._report(LoopDied(error))
        finally:
            self._session.close()
            self._waker.close()

    def _loop(self) -> None:
        while not self._ended.is_set():
            self._turned_at = time.monotonic()
            if not self._commands:
                self._rest()
                continue
            command = self._commands.popleft()
            match command:
                case TakeTerm():
                    self._take(command)
                case Mark():
                    self._mark(command)
                case Reset():
                    self._reset(command)

    def _rest(self) -> None:
        """Nothing is wanted: wait for a command. A session that ends meanwhile is made anew when it is needed."""
        try:
            self._session.wait(1.0, self._waker.fd)
        except psycopg.Error:
            self._session.close()
        self._waker.clear()

    def _take(self, command: TakeTerm) -> None:
        """P8: read, check trust, compare and set; again while trusted."""
        while not self._ended.is_set() and self._connected():
            try:
                row = self._session.read_term()
                self._hooks.hit("marker.term_read", term=row.term)
                if not self._trusted():
                    self._report(TermGone(command.holder))
                    return
                term = self._session.take_term(row.term, self._highest_term(), command.holder, self._instance)
                if term is not None:
                    self._session.renew_incarnation()
                    self._report(TermTaken(command.holder, term))
                    return
            except (psycopg.Error, OutboxError) as error:
                self._lost(error)

    def _mark(self, mark: Mark) -> None:
        if not self._connected():
            return
        self._pause(mark)
        shape = self._session.shape
        closed_slices = None
        if mark.closed_shards and shape is not None:
            indexes = ", ".join(str(index) for index in sorted(mark.closed_shards))
            closed_slices = f"{slice_sql(key_bytes_sql(shape), 'o.id', mark.shards)} IN ({indexes})"
        self._turned_at = time.monotonic()
        self._hooks.hit("marker.mark", number=mark.number)
        try:
            rows = self._session.mark(
                term=mark.term,
                holder=mark.holder,
                leader_id=mark.leader_id,
                limit=mark.limit,
                closed_keys=mark.closed_keys,
                closed_slices=closed_slices,
                kept=mark.kept,
            )
        except TermLost:
            self._report(TermGone(mark.holder))
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)
            self._report(MarkFailed(mark.number, one_line(error)))
        else:
            self._hooks.hit("marker.marked", number=mark.number, rows=rows)
            self._report(Marked(mark.number, rows))

    def _reset(self, reset: Reset) -> None:
        if not self._connected():
            return
        try:
            self._session.reset(term=reset.term, holder=reset.holder, leader_id=reset.leader_id, ids=reset.ids)
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)
            self._report(ResetFailed(one_line(error)))

    def _pause(self, mark: Mark) -> None:
        """Wait before a mark that follows empty ones; a notification or a new command ends the wait."""
        notified = self._session.shape is not None and self._session.shape.has_notify
        wait_s = idle_wait_s(mark.idle, self._pace, notified)
        if wait_s <= 0:
            return
        try:
            self._waker.clear()
            if not self._commands:
                self._session.wait(wait_s, self._waker.fd)
        except psycopg.Error as error:
            self._lost(error)
            self._connected()

    def _connected(self) -> bool:
        """A session, however long it takes; False when the thread is to end."""
        while not self._ended.is_set():
            if self._session.is_open:
                return True
            self._turned_at = time.monotonic()
            try:
                self._session.open()
            except (psycopg.Error, OutboxError) as error:
                self._lost(error)
            else:
                self._unreachable_since = None
                self._report(DatabaseTrouble(None))
                return True
        return False

    def _lost(self, error: Exception) -> None:
        """Note the trouble, drop the session, wait a little."""
        self._turned_at = time.monotonic()
        self._session.close()
        if self._unreachable_since is None:
            self._unreachable_since = self._turned_at
        if isinstance(error, OutboxError) and error.hint:
            self._report(DatabaseTrouble(f"{one_line(error)} ({error.hint})"))
        else:
            self._report(DatabaseTrouble(one_line(error)))
        self._ended.wait(self._pace.io_error_backoff_s)
