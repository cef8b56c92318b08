"""The statements that read rows for the relay machine, on the leader's session: marks, fetches and looks. Thin.

The reader owns the scan (`harvester.relay.scan`): each mark goes on where the last one ended, so that a second one can
be asked for before the first one's rows have been seen to. A new leader id or a new connection starts from the bookmark
in the term row, or from the head if there is none (P38).

Between marks it lists the holders of locks that could still fill a gap of the scan (P10). The same list says whether
ids have started again, and that somebody asks for the term (P32). A mark that brings nothing is repeated if one of the
transactions is over that the scan's resting gaps wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

from harvester.outbox.copying import Row
from harvester.outbox.marker import Holders, MarkSession
from harvester.relay.commands import Fetch, Look, Mark, SaveBookmark
from harvester.relay.hooks import Hooks
from harvester.relay.reports import Fetched, Looked, Marked, Report, ServerChanged, TermWanted
from harvester.relay.scan import Bookmark, Scan
from harvester.relay.taking import TermTaker

_LIST_S = 0.05  # how often to list who could still fill a gap
_WATCH_S = 5.0  # how often to look at the sequence otherwise
_IDLE_WATCH_S = 1.0  # the same where no rows come: a sequence that was restarted is one reason for that
_MANY_GAPS = 100
_BOOKMARK_S = 0.5  # how often to report how far the scan has come


class Reader:
    """See the module's text. For the mark loop's thread, while the session is open; raises what the session raises."""

    def __init__(
        self, session: MarkSession, taker: TermTaker, report: Callable[[Report], None], hooks: Hooks, *, writes: bool
    ) -> None:
        """`writes`: marks are written into the table."""
        self._session, self._taker, self._report, self._hooks = session, taker, report, hooks
        self._writes = writes
        self.scan = Scan()
        self._leader_id: UUID | None = None  # whose scan it is
        self.marked_at = self.listed_at = 0.0  # when the last mark was sent, and the last list
        self._bookmarked_at = 0.0
        self._last_seen: Holders | None = None

    def perform(self, command: Mark | Fetch | Look) -> None:
        """One statement; its result is reported."""
        match command:
            case Mark():
                self._mark(command)
            case Fetch(number, term, holder, ids):
                self._report(Fetched(number, self._session.fetch(term=term, holder=holder, ids=ids)))
            case Look():
                self._look(command)

    def save(self, command: SaveBookmark) -> None:
        """Keep a bookmark in the term row."""
        bookmark = command.bookmark
        ids = [edge for ends in bookmark.open for edge in ends]
        self._session.save_bookmark(command.term, command.holder, bookmark.high, ids)

    def _mark(self, mark: Mark) -> None:
        scan = self.scan
        if mark.leader_id != self._leader_id or not scan.is_listed:
            self._leader_id = mark.leader_id
            self._begin()
        self.marked_at = time.monotonic()
        rows = self._ask(mark)
        while not rows and self._session.over:
            scan.ended(self._session.over)
            rows = self._ask(mark)
        scan.read([row[0] for row in rows], mark.limit, writes=self._writes)
        self._hooks.hit("marker.marked", number=mark.number, rows=rows)
        now = time.monotonic()
        bookmark = None
        if now - self._bookmarked_at >= _BOOKMARK_S:
            self._bookmarked_at, bookmark = now, scan.bookmark()
        self._report(Marked(mark.number, rows, scan.floor, bookmark))
        every_s = _LIST_S if scan.gaps else _WATCH_S if rows else _IDLE_WATCH_S
        if len(scan.gaps) > _MANY_GAPS or now - self.listed_at >= every_s:
            self._list_holders()

    def _begin(self) -> None:
        """Start the scan. The locks are listed before its first mark, which need not be repeated for its gaps then."""
        kept = self._session.read_bookmark()
        if kept is None:
            self.scan.restart()
        else:
            high, edges = kept
            self.scan.restart(Bookmark(high, tuple(zip(edges[::2], edges[1::2], strict=True))))
        self._list_holders()

    def _ask(self, mark: Mark) -> list[Row]:
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
        """Who could still fill a gap (P10); and whether ids have started again."""
        self.listed_at = time.monotonic()
        found, before = self._session.holders(), self._last_seen
        self._last_seen = found
        self.scan.listed(found.transactions, found.last_value)
        if found.wanted_by is not None and self._taker.taken is not None:
            self._report(TermWanted(self._taker.taken.holder, found.wanted_by))
        if before is None:
            return
        if found.table != before.table:
            self._ids_restarted("the outbox is another table than before")
        if found.last_value is None or before.last_value is None:
            return
        if found.last_value < before.last_value or found.sequence_file != before.sequence_file:
            given = f"{before.last_value} was the last, now it is {found.last_value}"
            self._ids_restarted(f"ids have started again: {given}")

    def _ids_restarted(self, reason: str) -> None:
        self.scan.restart()
        self._taker.ids_restarted = True
        self._report(ServerChanged(reason))

    def _look(self, look: Look) -> None:
        scan, found = self.scan, []
        if scan.high is not None:
            found = scan.passed_over(self._session.all_ids(scan.high))
        self._report(Looked(look.number, found))
