"""Taking the term: compare and set, and what is owed to the term before (rules P8, P19, P22, P24, P32, P37). Thin.

A term that is lent to a bulk drain, or asked for by one, is not taken: it is looked at again each second, for as long
as the group trusts this process (P32). An outbox of another leader group or Kafka cluster ends this harvester before it
touches anything, and so does a term that another member of its own group takes away again and again (P37).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from harvester.errors import LeadershipError, SchemaError, TermContested
from harvester.outbox.place import Place
from harvester.outbox.term_session import Owner, Session, TermRow, TermSession
from harvester.relay.hooks import Hooks
from harvester.relay.opening import Deposed, Superseded
from harvester.relay.reports import DatabaseTrouble, LoopDied, Report, TermGone, TermTaken
from harvester.relay.switching import Mode

_TURN_S = 0.1
_LENT_LOOK_S = 1.0
_MOST_LOST = 3  # terms in a row, to others of the group


@dataclass(frozen=True, slots=True)
class Voices:
    """Whom the taker asks and tells. `trusted`: whether the group still vouches for us; `turned`: it is alive."""

    report: Callable[[Report], None]
    trusted: Callable[[], bool]
    highest_term: Callable[[], int]  # that was seen in the leader topic
    turned: Callable[[], None]
    owner: Callable[[], Owner] = Owner  # whose this harvester is; raises BrokerError while the cluster does not say


@dataclass(frozen=True, slots=True)
class Taken:
    """A term that is ours in the row: what marks, and later take-overs, compare with."""

    term: int
    holder: UUID
    place: Place | None


class TermTaker:
    """See the module's text. For the mark loop's thread; `lent_to` may be read by any."""

    def __init__(
        self, session: TermSession, mode: Mode, name: str, voices: Voices, ended: threading.Event, hooks: Hooks
    ) -> None:
        self._session, self._mode, self._name = session, mode, name
        self._voices, self._ended, self._hooks = voices, ended, hooks
        self.taken: Taken | None = None  # the last one
        self.ids_restarted = False  # since then
        self.lent_to: str | None = None  # who has the term that is waited for

    def attempt(self, holder: UUID, ours: Sequence[Session], lost: int = 0) -> bool:
        """Read the row, check trust, compare and set; `ours`: the shards' sessions. False: it is to be tried again.

        `lost`: how many terms in a row this harvester has lost while it was trusted.

        Raises the database's errors and BrokerError, after which it is to be tried again as well.
        """
        session, voices = self._session, self._voices
        row = session.read_term()
        self._hooks.hit("marker.term_read", term=row.term)
        if not voices.trusted():
            voices.report(TermGone(holder))
            return True
        self.lent_to = row.lent_to
        if row.lent_to is not None:
            self._hooks.hit("marker.term_lent", term=row.term)
            voices.turned()
            self._ended.wait(_LENT_LOOK_S)
            return False
        seen, owner = voices.highest_term(), voices.owner()
        if not self._may_lead(row, owner, lost):
            return True
        term = session.take_term(row.term, seen, holder, self._name, ours, owner)
        if term is None:
            return False
        went_back = row.term < seen or self.ids_restarted
        session.renew_incarnation(went_back=went_back)
        self.ids_restarted = False
        incarnation = session.read_term().incarnation
        self.taken = Taken(term, holder, session.place)
        if self._settle_predecessor(row, term, holder, incarnation):
            mode, server = self._mode, str(session.place)
            session.note_delivery(term, holder, mode.delivery, mode.topic_id)
            in_doubt = mode.is_unreleased(row)
            voices.report(TermTaken(holder, term, server, went_back, incarnation, mode.lanes_now, in_doubt))
        return True

    def _may_lead(self, row: TermRow, owner: Owner, lost: int) -> bool:
        """Whether outbox and progress topic are this harvester's, and nobody contests the term; if not, it ends."""
        try:
            self._session.check_owner(row, owner)
            if lost > _MOST_LOST:
                group, holder = owner.group or "", row.name or str(row.holder)
                raise TermContested(self._session.table, group=group, holder=holder, lost=lost)
            self._mode.check(row)
        except (SchemaError, LeadershipError) as error:
            self._voices.report(LoopDied(error))
            return False
        return True

    def _settle_predecessor(self, row: TermRow, term: int, holder: UUID, incarnation: UUID) -> bool:
        """What the mode of the term before calls for; False when the term is not ours any more."""
        report, wait_s = self._voices.report, self._mode.wait_s(row)

        def is_over() -> bool:
            self._voices.turned()
            return self._ended.is_set() or not self._voices.trusted()

        def pause(seconds: float) -> None:
            self._ended.wait(seconds)

        deadline = time.monotonic() + wait_s
        if wait_s > 0:
            report(DatabaseTrouble(f"what the leader before may still send expires in {wait_s:.0f} s (P24, P37)"))
        while time.monotonic() < deadline and not is_over():
            pause(_TURN_S)
        try:
            self._mode.expect(self._session.place, term)
            self._mode.fence(row, term, holder, incarnation, is_over, pause, lambda text: report(DatabaseTrouble(text)))
        except (Superseded, Deposed):
            report(TermGone(holder))
            return False
        report(DatabaseTrouble(None))
        if is_over():
            report(TermGone(holder))
            return False
        return True
