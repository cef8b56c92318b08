"""The marker: the thread that executes the state machine's requests on the leader's database session, in order.

In order means: a mark under way ends before a term is taken. A session that cannot be opened is retried here,
indefinitely and without telling the machine, since nothing was sent. A statement that was sent and failed is reported:
its fate is unknown (P4). A session with a different server, or with one whose term row is older than our term, is
reported too, and nothing is executed on it for the machine (P9). `term` describes how the term is taken.

*Reading* (`MarkReader`). The reader owns the scan (`core.scan`): each mark continues where the last one ended, so a
second one can be requested before the first one's rows have been handled. A new leader id or a new connection starts
from the bookmark in the term row, or from the head if there is none (P38). Between marks the reader lists the holders
of locks that could still fill a gap of the scan (P10). The same query shows whether ids have started again, and whether
somebody asks for the term (P32). A mark that returns nothing is repeated if a transaction that resting gaps wait for
has ended. A leader that can send nothing, or is paused, requests no marks: then the term row is read each second.

*Liveness* (P14). `is_working` is true while the loop turns, or waits within its own bounded retry or for a statement
limited by its own timeout. A thread that has died or hangs for longer ends the leadership. A term that cannot be taken
counts like a database that cannot be reached, until an attempt gets through. The count stands still during an attempt,
which may wait by design (P24), and between two leaderships, where nobody tries.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import psycopg

from harvester.errors import BrokerError, HarvesterError, OutboxError, TermLost
from harvester.failpoints import Failpoints
from harvester.neli.group import Group
from harvester.outbox.connection import one_line, why_another
from harvester.outbox.leader_session import Holders, MarkSession, Owner, Session, TermRow
from harvester.outbox.sql.queries import Row
from harvester.relay.core import messages as m
from harvester.relay.core.scan import LOWEST, Bookmark, Scan
from harvester.relay.ipc import TrustCell, Waker
from harvester.relay.term import AT_LEAST_ONCE, DeliveryHandover, TakenTerm, TermTaker

_STALL_MARGIN_S = 10.0
_TURN_S = 1.0  # the loop turns this often while it rests, however long that is
_GATHER_S = 0.001  # between marks that take everything there is

Work = m.Mark | m.Fetch | m.Look | m.SaveBookmark | m.TakeTerm | m.ReleaseTerm


_NOTIFIED_CEILING_S = 1.0  # how long to wait between empty marks if the trigger notifies us anyway


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Delays in seconds."""

    mark_backoff_s: float
    mark_backoff_max_s: float
    io_error_backoff_s: float
    statement_timeout_s: float
    writes: bool = True  # marks are written into the table; otherwise they are only remembered here


def idle_wait_s(idle: int, pace: RetryDelays, notified: bool) -> float:
    """How long to wait before the next mark after `idle` consecutive empty ones: doubles from floor to ceiling."""
    if idle <= 0:
        return 0.0
    ceiling_s = max(pace.mark_backoff_max_s, _NOTIFIED_CEILING_S) if notified else pace.mark_backoff_max_s
    return min(ceiling_s, pace.mark_backoff_s * 2.0 ** min(idle - 1, 40))


class Relay(Protocol):
    """What the marker works for: the supervisor."""

    trust: TrustCell

    def report(self, report: m.Report) -> None: ...
    def wants_term(self, holder: UUID) -> bool: ...  # whether it still waits for this take-over; thread-safe


class Marker(threading.Thread):
    """The mark loop. It is also the `TermHost` of the term taker."""

    def __init__(
        self,
        session: MarkSession,
        pace: RetryDelays,
        name: str,
        relay: Relay,
        group: Group,
        failpoints: Failpoints,
        mode: DeliveryHandover | None = None,
        group_id: str | None = None,
    ) -> None:
        """`group_id`: the group that must own the outbox; None: any."""
        super().__init__(name="marker", daemon=True)
        self.mode = mode if mode is not None else DeliveryHandover(AT_LEAST_ONCE, 0.0)
        self._relay, self._group, self._group_id = relay, group, group_id
        self._session, self._pace, self._failpoints = session, pace, failpoints
        self.report = relay.report
        self._commands: deque[Work] = deque()
        self._waker = Waker()
        self.ended = threading.Event()
        self.turned_at = time.monotonic()  # when the loop last turned
        self._taker = TermTaker(session, self.mode, name, self, failpoints)
        self._unreachable_since: float | None = None
        self._failing_since: float | None = None  # since when no attempt to take this leadership's term got through
        self._failed_s = 0.0  # for how long none had when the last one began
        self._refused = False  # what failed last was an attempt
        self._reader = MarkReader(session, self._taker, self.report, failpoints, writes=pace.writes)
        self._taking: UUID | None = None  # the holder for whom a term is being taken
        self._sessions: Sequence[Session] = ()
        self._unregistered = False
        self._doubted = False
        self._checked = True  # the session is known to be with the right database
        self._watched_at = 0.0  # when the term row was last read because nothing was requested

    def perform(self, command: Work) -> None:
        """Queue a command; thread-safe."""
        self._commands.append(command)
        self._waker.set()

    def register(self, sessions: Sequence[Session]) -> None:
        """The shards' sessions, to be recorded in the term row (P7); thread-safe."""
        self._sessions, self._unregistered = sessions, True

    def doubt(self) -> None:
        """The session may be with a different server from the others: open a new one for the next command (P9)."""
        self._doubted = True

    def ids_given_again(self) -> None:
        """The next term begins another incarnation (P50); thread-safe."""
        self._taker.ids_given_again()

    def log_in(self, dsn: str) -> None:
        """Use this DSN for new connections; thread-safe."""
        self._session.log_in(dsn)

    def stop(self) -> None:
        """End the thread once the running command is done."""
        self.ended.set()
        if self.ident is None:  # never started
            self._waker.close()
        self._waker.set()

    def is_working(self, now: float) -> bool:
        bound_s = self._pace.statement_timeout_s + _STALL_MARGIN_S
        return self.is_alive() and now - self.turned_at < bound_s

    @property
    def lent_to(self) -> str | None:
        """Who has borrowed the term that we wait for (P32)."""
        return self._taker.lent_to

    @property
    def trusted(self) -> bool:
        wanted = self._taking is not None and self._relay.wants_term(self._taking)
        return wanted and self._relay.trust.trusted

    @property
    def highest_term(self) -> int:
        return self._group.highest_term

    def owner(self) -> Owner:
        return Owner(self._group_id, self._group.cluster()) if self._group_id is not None else Owner()

    def turned(self) -> None:
        self.turned_at = time.monotonic()

    def unreachable_s(self, now: float) -> float:
        """For how long the database has been unreachable, or the term could not be taken; 0 if neither is so."""
        since = self._unreachable_since
        return self._failed_s if since is None else now - since

    @property
    def hindrance(self) -> str:
        """A clause for messages: what has lasted for `unreachable_s`."""
        return "the term could not be taken" if self._refused else "the database has been out of reach"

    def run(self) -> None:
        try:
            self._loop()
            for command in self._commands:  # what the end of a leadership asks for, in its order
                if isinstance(command, m.SaveBookmark):
                    self._save(command)
                elif isinstance(command, m.ReleaseTerm):
                    self._release(command)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread
            self.report(m.LoopDied(error))
        finally:
            self._session.close()
            self._waker.close()

    def _loop(self) -> None:
        while not self.ended.is_set():
            self.turned_at = time.monotonic()
            if not self._commands:
                self._rest()
                continue
            command = self._commands.popleft()
            match command:
                case m.TakeTerm():
                    self._take(command)
                case m.ReleaseTerm():
                    self._release(command)
                case m.Mark():
                    self._mark(command)
                case m.Fetch() | m.Look():
                    self._read(command)
                case m.SaveBookmark():
                    self._save(command)

    def _rest(self) -> None:
        """Nothing is requested: wait for a command. A session that ends meanwhile is reopened when needed.

        After an error it is reopened now: otherwise a harvester that only stands by would report it for ever.
        """
        if self._unreachable_since is not None:
            self._connected()
            return
        try:
            self._session.wait(_TURN_S, self._waker.fd)
        except psycopg.Error:
            self._session.close()
        self._waker.clear()
        taken, now = self._taker.taken, time.monotonic()
        if taken is not None and self._relay.wants_term(taken.holder) and now - self._watched_at >= _TURN_S:
            self._watched_at = now
            self._watch(taken)

    def _watch(self, taken: TakenTerm) -> None:
        """Report whether the term is lent, or asked for: what shards hold must not be sent beside a drain (P32)."""
        if self._commands or not self._connected():
            return
        try:
            row = self._session.read_term()
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)
            return
        if not self._is_where(taken, row):
            return
        if row.holder != taken.holder:
            self.report(m.TermGone(taken.holder))
        elif row.lent_to is not None:
            self.report(m.TermWanted(taken.holder, row.lent_to))

    def _take(self, command: m.TakeTerm) -> None:
        """Try until the term is taken, trust in us has expired, or the leadership is over (P8)."""
        self._taking = command.holder
        # An outage is none of this leadership: idle since it was lost, nobody may have looked for it again.
        self._failing_since = time.monotonic() - self._failed_s if self._failed_s else None
        self._unreachable_since, self._refused = self._failing_since, self._failing_since is not None
        try:
            while not self.ended.is_set() and self._connected():
                if self._failing_since is not None:
                    self._failed_s = time.monotonic() - self._failing_since
                    self._unreachable_since = None
                try:
                    is_over = self._taker.attempt(command.holder, self._sessions, command.lost)
                except (psycopg.Error, OutboxError, BrokerError) as error:
                    self._not_taken(error)
                    continue
                self._end_failing(got_through=not is_over or self.trusted)
                if is_over:
                    self._unregistered = True
                    return
        finally:
            self._taking = self._failing_since = None
            self._taker.lent_to = None
            if self._session.term_is_locked:  # that was the last attempt
                self._taker.trouble(None)

    def _not_taken(self, error: Exception) -> None:
        """An attempt failed. The session is kept if Kafka is to blame."""
        self._refused = True
        if isinstance(error, BrokerError):
            self.report(m.DatabaseTrouble(None))
            self._taker.trouble(f"it cannot be taken: {_with_hint(error)}")
            self._wait_after_failure()
        else:
            self._lost(error)
        if self._failing_since is None:
            self._failing_since = self._unreachable_since

    def _end_failing(self, *, got_through: bool) -> None:
        """An attempt returned; if it did not get through, the leadership is over: a standby has no such trouble."""
        if got_through:
            self._failed_s, self._refused = 0.0, False
        if self._failing_since is not None:
            self._failing_since = None
            self.report(m.DatabaseTrouble(None))
            if not self._session.term_is_locked:
                self._taker.trouble(None)

    def _release(self, release: m.ReleaseTerm) -> None:
        """Nothing of the term is left, so the next leader need not wait. Attempted once."""
        try:
            if self._session.is_open:
                self._session.release(release.term, release.holder)
        except (psycopg.Error, OutboxError):
            self._session.close()  # a standby must not show this as a trouble: nothing would clear it

    def _save(self, command: m.SaveBookmark) -> None:
        """Attempted once, on a session known to be with the right database."""
        try:
            if self._session.is_open and self._checked:
                self._reader.save(command)
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)

    def _read(self, command: m.Mark | m.Fetch | m.Look) -> None:
        """Execute a statement for the machine, on the right database."""
        if not self._connected() or not self._is_meant(command):
            return
        self.turned_at = time.monotonic()
        try:
            self._register(command)
            self._reader.perform(command)
        except TermLost:
            self.report(m.TermGone(command.holder))
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)
            self._fail(command, error)

    def _fail(self, command: m.Mark | m.Fetch | m.Look, error: Exception) -> None:
        """Report that a statement failed, and, unless it was a look, those requested next with it: the machine discards
        their results, and they may take just as long.
        """
        self.report(m.StatementFailed(command.number, one_line(error)))
        while (
            not isinstance(command, m.Look)
            and self._commands
            and isinstance(following := self._commands[0], m.Mark | m.Fetch | m.Look)
        ):
            self._commands.popleft()
            self.report(m.StatementFailed(following.number, one_line(error)))

    def _mark(self, mark: m.Mark) -> None:
        if not self._connected():
            return
        self._pause(mark)
        self._failpoints.hit("marker.mark", number=mark.number)
        self._read(mark)

    def _register(self, command: m.Mark | m.Fetch | m.Look) -> None:
        if self._unregistered:
            self._unregistered = False
            self._session.register(command.term, command.holder, self._sessions)

    def _is_meant(self, command: m.Mark | m.Fetch | m.Look) -> bool:
        """P9: whether the session is with the database on which the term was taken."""
        taken = self._taker.taken
        if taken is None or taken.holder != command.holder or self._checked:
            return True
        try:
            row = self._session.read_term()
        except (psycopg.Error, OutboxError) as error:
            self._lost(error)
            self._fail(command, error)
            return False
        return self._is_where(taken, row)

    def _is_where(self, taken: TakenTerm, row: TermRow) -> bool:
        """Whether the row is of the database on which the term was taken."""
        if self._checked:
            return True
        assert self._session.place is not None, "open() sets it"
        reason = why_another(self._session.place, row.term, taken.place, taken.term)
        self._checked = reason is None
        if reason is not None:
            self.report(m.ServerChanged(reason))
        return reason is None

    def _pause(self, mark: m.Mark) -> None:
        """Wait before a mark that follows empty ones; a notification or a new command ends the wait.

        With the trigger, it waits for rows as soon as it has taken everything there was. And marks do not follow each
        other faster than rows can gather: many small ones would cost the machine more than they gain.
        """
        if not mark.rested:
            return
        notified = self._session.shape is not None and self._session.shape.has_notify
        wait_s = idle_wait_s(max(mark.idle, int(notified)), self._pace, notified)
        try:
            for turn_s in self._turns(wait_s):
                self._waker.clear()
                if self._commands or self._session.wait(turn_s, self._waker.fd):
                    break
        except psycopg.Error as error:
            self._lost(error)
            self._connected()
        self.ended.wait(max(0.0, self._reader.marked_at + _GATHER_S - time.monotonic()))

    def _connected(self) -> bool:
        """Open a session, however long it takes; False if the thread is to end."""
        if self._doubted:
            self._doubted = False
            self._session.close()
        while not self.ended.is_set():
            if self._session.is_open:
                return True
            self.turned_at = time.monotonic()
            try:
                self._session.open()
            except (psycopg.Error, OutboxError) as error:
                self._refused = False
                self._lost(error)
            else:
                self._unreachable_since = self._failing_since  # an open session proves less than a taken term
                self._checked = False
                self._unregistered = True
                self._reader.restart()
                if self._failing_since is None:
                    self.report(m.DatabaseTrouble(None))
                return True
        return False

    def _lost(self, error: Exception) -> None:
        """Report the trouble, drop the session, wait a little."""
        self.turned_at = time.monotonic()
        self._session.close()
        self.report(m.DatabaseTrouble(_with_hint(error)))
        self._wait_after_failure()

    def _wait_after_failure(self) -> None:
        if self._unreachable_since is None:
            self._unreachable_since = self._failing_since or time.monotonic()
        for turn_s in self._turns(self._pace.io_error_backoff_s):
            self.ended.wait(turn_s)

    def _turns(self, wait_s: float) -> Iterator[float]:
        """How long to wait, again and again, until `wait_s` have passed or the thread is to end: a rest is no stall."""
        deadline = time.monotonic() + wait_s
        while not self.ended.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self.turned_at = time.monotonic()
            yield min(left_s, _TURN_S)


def _with_hint(error: Exception) -> str:
    hint = error.hint if isinstance(error, HarvesterError) else None
    return f"{one_line(error)} ({hint})" if hint else one_line(error)


_LIST_S = 0.05  # how often to list who could still fill a gap
_WATCH_S = 5.0  # how often to check the sequence otherwise
_IDLE_WATCH_S = 1.0  # the same while no rows come: a restarted sequence is one possible reason
_MANY_GAPS = 100
_BOOKMARK_S = 0.5  # how often to report how far the scan has come


class MarkReader:
    """Executes marks, fetches and looks, and owns the scan. Raises what the session raises."""

    def __init__(
        self,
        session: MarkSession,
        taker: TermTaker,
        report: Callable[[m.Report], None],
        failpoints: Failpoints,
        *,
        writes: bool,
    ) -> None:
        """`writes`: marks are written into the table."""
        self._session, self._taker, self._report, self._failpoints = session, taker, report, failpoints
        self._writes = writes
        self.scan = Scan()
        self._leader_id: UUID | None = None  # the leader id of the scan
        self.marked_at = self.listed_at = 0.0  # when the last mark was sent, and when locks were last listed
        self._bookmarked_at = 0.0
        self._last_seen: Holders | None = None
        # no crash of the server can give out an id up to this one again: a row had it, or none will
        self._settled_id = 0

    def perform(self, command: m.Mark | m.Fetch | m.Look) -> None:
        """Execute one statement and report its result."""
        match command:
            case m.Mark():
                self._mark(command)
            case m.Fetch(number, term, holder, ids):
                self._report(m.Fetched(number, self._session.fetch(term=term, holder=holder, ids=ids)))
            case m.Look():
                self._look(command)

    def save(self, command: m.SaveBookmark) -> None:
        bookmark = command.bookmark
        ids = [edge for ends in bookmark.open for edge in ends]
        self._session.save_bookmark(command.term, command.holder, bookmark.high, ids)

    def _mark(self, mark: m.Mark) -> None:
        scan = self.scan
        if mark.leader_id != self._leader_id or not scan.is_listed:
            self._leader_id = mark.leader_id
            self._begin()
        self.marked_at = time.monotonic()
        rows = self._ask(mark)
        while not rows and self._session.over:
            scan.ended(self._session.over)
            rows = self._ask(mark)
        # An empty mark that is no proof has not been checked for its reason. It may be the fence: nothing is passed
        # (P25).
        if rows or mark.is_proof or scan.watched:
            scan.read([row[0] for row in rows], mark.limit, writes=self._writes)
            self._settled_id = max(self._settled_id, (scan.floor or 1) - 1, rows[-1][0] if rows else 0)
        self._failpoints.hit("marker.marked", number=mark.number, rows=rows)
        now = time.monotonic()
        bookmark = None
        if now - self._bookmarked_at >= _BOOKMARK_S:
            self._bookmarked_at, bookmark = now, scan.bookmark()
        self._report(m.Marked(mark.number, rows, scan.floor, bookmark))
        every_s = _LIST_S if scan.gaps else _WATCH_S if rows else _IDLE_WATCH_S
        if len(scan.gaps) > _MANY_GAPS or now - self.listed_at >= every_s:
            self._list_holders()

    def _begin(self) -> None:
        """Start the scan. Locks are listed before its first mark, so that this mark need not be repeated for its
        gaps.
        """
        kept = self._session.read_bookmark()
        if kept is None:
            self.scan.restart()
        else:
            high, edges = kept
            self.scan.restart(Bookmark(high, tuple(zip(edges[::2], edges[1::2], strict=True))))
        self._list_holders()

    def _ask(self, mark: m.Mark) -> list[Row]:
        return self._session.mark(
            term=mark.term,
            holder=mark.holder,
            leader_id=mark.leader_id if self._writes else None,
            limit=mark.limit,
            high=self.scan.high,
            gaps=self.scan.ranges(),
            kept=mark.kept,
            watched=self.scan.watched,
            checks_term=mark.is_proof,
        )

    def _list_holders(self) -> None:
        """List who could still fill a gap (P10), and check whether ids have started again."""
        self.listed_at = time.monotonic()
        found, before = self._session.holders(), self._last_seen
        self._last_seen = found
        self.scan.listed(found.transactions, found.last_value)
        if found.wanted_by is not None and self._taker.taken is not None:
            self._report(m.TermWanted(self._taker.taken.holder, found.wanted_by))
        if before is None:
            place = self._session.place  # the place of this process's first marks
            if place is not None and not found.are_in(place.space):
                self._ids_restarted("ids have started again since this session began")
            return
        if found.table != before.table:
            self._ids_restarted("the outbox is a different table from before")
        if found.last_value is None or before.last_value is None:
            return
        if found.last_value < min(before.last_value, self._settled_id) or found.sequence_file != before.sequence_file:
            given = f"{before.last_value} was the last, now it is {found.last_value}"
            self._ids_restarted(f"ids have started again: {given}")
        elif found.last_value < before.last_value:
            # A crash of the server has undone ids that were given out and that no commit had made durable (P34).
            self.restart()

    def restart(self) -> None:
        """Restart the scan: passed ids may be given out again, or the session is a new one."""
        self.scan.restart()
        self._report(m.ScanRestarted())

    def _ids_restarted(self, reason: str) -> None:
        self.scan.restart()
        self._settled_id = 0
        self._taker.ids_restarted = True
        self._report(m.ServerChanged(reason))

    def _look(self, look: m.Look) -> None:
        scan = self.scan
        if scan.high is None or scan.high < LOWEST:
            self._report(m.Looked(look.number, []))
            return
        high = scan.high if look.high is None else min(look.high, scan.high)
        low = LOWEST if look.width is None else max(LOWEST, high - look.width + 1)
        ids = self._session.ids_between(low, high)
        if ids is None:
            self._report(m.StatementFailed(look.number, "it took too long"))
        else:
            self._report(m.Looked(look.number, scan.passed_over(ids), low - 1 if low > LOWEST else None))
