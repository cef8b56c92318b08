"""Takes the term and settles what the previous term left behind (P8, P19, P22, P24, P32, P37).

The term is raised by compare-and-set. A term that is lent to a bulk drain, or that one asks for, is not taken: it is
checked again each second, for as long as the group trusts this process (P32). If the outbox belongs to another leader
group or Kafka cluster, this harvester ends before it touches anything; it also ends if another member of its own group
takes the term away repeatedly (P37).

What a take-over owes depends on the previous term's mode (`DeliveryHandover`):

- At least once: what a killed leader still had on the wire may arrive for a while, and nothing fences it. The first
  exactly-once term waits until the last of it has expired, unless the leader released its term in good order.
- A leader of another group that did not release its term before the outbox was moved (P37): nothing in Kafka connects
  the two groups, so any first term waits for the same time.
- Exactly once: lanes may have open transactions, or committed records that are not purged. If the new leader's shards
  do not open the lanes themselves, because it sends at least once, all lanes are fenced and purged here.
- A progress topic other than the one in the term row is refused: what was committed would be sent again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from uuid import UUID

from harvester.delivery.lane import Lanes
from harvester.delivery.opening import Deposed, Leadership, Opener, Superseded
from harvester.delivery.progress_topic import ProgressTopic, check_recorded
from harvester.errors import LeadershipError, SchemaError, TermContested
from harvester.failpoints import Failpoints
from harvester.outbox.connection import OutboxIdentity
from harvester.outbox.leader_session import Owner, Session, TermRow, TermSession
from harvester.outbox.purge_session import PurgeSession
from harvester.outbox.sql.queries import Row
from harvester.record import RowVersions
from harvester.relay.core.messages import LoopDied, Report, TermGone, TermTaken, TermWait

_TURN_S = 0.1
_LENT_LOOK_S = 1.0
_MOST_LOST = 3  # consecutive terms, to other members of the group


class TermHost(Protocol):
    """What the taker needs of the marker."""

    ended: threading.Event

    def report(self, report: Report, /) -> None: ...
    @property
    def trusted(self) -> bool: ...  # whether the group still vouches for us, and the relay waits for the term
    @property
    def highest_term(self) -> int: ...  # seen in the leader topic
    def owner(self) -> Owner: ...  # of this harvester; raises BrokerError while the cluster is unknown
    def turned(self) -> None: ...  # the taker is alive


@dataclass(frozen=True, slots=True)
class TakenTerm:
    """A term that is ours in the term row, for marks and later take-overs to compare with."""

    term: int
    holder: UUID
    place: OutboxIdentity | None


class TermTaker:
    """Takes the term. Runs on the mark loop's thread; any thread may read `lent_to`."""

    def __init__(
        self, session: TermSession, mode: DeliveryHandover, name: str, host: TermHost, failpoints: Failpoints
    ) -> None:
        self._session, self._mode, self._name = session, mode, name
        self._host, self._failpoints = host, failpoints
        self.taken: TakenTerm | None = None  # the last one
        self.ids_restarted = False  # since the last term was taken
        self._went_back = False  # with a term that was taken; the shards do not know it yet
        self.lent_to: str | None = None  # the borrower of the term that we wait for

    def attempt(self, holder: UUID, ours: Sequence[Session], lost: int = 0) -> bool:
        """Read the row, check trust, compare and set. `ours`: the shards' sessions. False: try again.

        `lost`: how many terms in a row this harvester has lost while it was trusted.

        Raises the database's errors and BrokerError; the caller tries again then, too.
        """
        session, host = self._session, self._host
        host.turned()
        row = session.read_term()
        self._failpoints.hit("marker.term_read", term=row.term)
        if not host.trusted:
            host.report(TermGone(holder))
            return True
        self.lent_to = row.lent_to
        if row.lent_to is not None:
            self._failpoints.hit("marker.term_lent", term=row.term)
            host.ended.wait(_LENT_LOOK_S)
            return False
        seen, owner = host.highest_term, host.owner()
        if not self._may_lead(row, owner, lost):
            return True
        was_locked = session.term_is_locked
        went_back = row.term < seen or self.ids_restarted
        term = session.take_term(row.term, seen, holder, self._name, ours, owner, went_back)
        if session.term_is_locked:
            self.trouble(f"a transaction holds a lock on {session.table.term}: no harvester can lead until it ends")
        elif was_locked:
            self.trouble(None)
        if term is None:
            return False
        if went_back:
            self.ids_restarted, self._went_back = False, True
        session.renew_incarnation()
        incarnation = session.read_term().incarnation
        self.taken = TakenTerm(term, holder, session.place)
        if self._settle_predecessor(row, Leadership(term, str(holder), incarnation)):
            mode, server = self._mode, str(session.place)
            session.note_delivery(term, holder, mode.delivery, mode.topic_id)
            in_doubt = mode.is_unreleased(row)
            host.report(TermTaken(holder, term, server, self._went_back, incarnation, mode.lanes_now, in_doubt))
            self._went_back = False
        return True

    def _may_lead(self, row: TermRow, owner: Owner, lost: int) -> bool:
        """Whether outbox and progress topic belong to this harvester and the term is not contested; if not, it ends."""
        try:
            self._session.check_owner(row, owner)
            if lost > _MOST_LOST:
                group, holder = owner.group or "", row.name or str(row.holder)
                raise TermContested(self._session.table, group=group, holder=holder, lost=lost)
            self._mode.check(row)
        except (SchemaError, LeadershipError) as error:
            self._host.report(LoopDied(error))
            return False
        return True

    def _settle_predecessor(self, row: TermRow, under: Leadership) -> bool:
        """Do what the previous term's mode requires; False if the term is no longer ours."""
        wait_s = self._mode.wait_s(row)
        deadline = time.monotonic() + wait_s
        if wait_s > 0:
            self.trouble(f"waiting {wait_s:.0f} s while records of the previous leader may still arrive (P24, P37)")
        while time.monotonic() < deadline and not self.is_over():
            self.pause(_TURN_S)
        try:
            self._mode.expect(self._session.place, under.term)
            self._mode.fence(row, under, self)
        except (Superseded, Deposed):
            self._host.report(TermGone(UUID(under.holder)))
            return False
        finally:
            self.trouble(None)
        if self.is_over():
            self._host.report(TermGone(UUID(under.holder)))
            return False
        return True

    # -- while it waits (`TakeOver`)

    def is_over(self) -> bool:
        self._host.turned()
        return self._host.ended.is_set() or not self._host.trusted

    def pause(self, seconds: float) -> None:
        self._host.ended.wait(seconds)

    def trouble(self, text: str | None) -> None:
        self._host.report(TermWait(text))

    def ids_given_again(self) -> None:
        """The next term begins another incarnation (P50); thread-safe."""
        self.ids_restarted = True


AT_LEAST_ONCE: Literal["at-least-once"] = "at-least-once"
EXACTLY_ONCE: Literal["exactly-once"] = "exactly-once"


class TakeOver(Protocol):
    """What waits for a take-over: `TermTaker`, or a bulk drain."""

    def is_over(self) -> bool: ...
    def pause(self, seconds: float) -> None: ...
    def trouble(self, text: str | None) -> None: ...
    def ids_given_again(self) -> None: ...  # another record has the id of a published one


class _LaneOwner:
    """Opens a predecessor's lanes (a `LaneHost`) on its own database session."""

    def __init__(self, session: PurgeSession, taker: TakeOver) -> None:
        self._session, self._ids_given_again = session, taker.ids_given_again
        self.is_over, self.pause, self.trouble = taker.is_over, taker.pause, taker.trouble

    def term_row(self) -> tuple[int, str | None]:
        self._session.ready()
        return self._session.term()

    def progress_topic(self) -> str | None:
        self._session.ready()
        return self._session.progress_topic()

    def delete(self, rows: RowVersions) -> bool:
        self._session.ready()
        others = self._session.delete(rows)
        if others:
            self._ids_given_again()
            self._session.refuse_other(others[0])
        return True

    def delete_same(self, ids: Sequence[int], same: Callable[[list[Row]], RowVersions], incarnation: UUID) -> list[int]:
        self._session.ready()
        return self._session.delete_same(ids, same, incarnation)

    def fenced(self, lane: int) -> None:
        """Not needed here."""


@dataclass(slots=True)
class DeliveryHandover:
    """How this harvester delivers. `find` looks up the progress topic, creating it in exactly-once mode; its parameter:
    see `check_recorded`.
    """

    delivery: str
    expiry_s: float  # S + H + D: after this, nothing of an at-least-once leader is on the wire
    lanes: Lanes | None = None
    session: PurgeSession | None = None
    find: Callable[[str | None], ProgressTopic | None] = lambda _recorded: None
    progress: ProgressTopic | None = None

    @property
    def topic_id(self) -> str | None:
        """The progress topic to record in the term row; None: leave the recorded one."""
        return self.progress.id if self.progress is not None and self.delivery == EXACTLY_ONCE else None

    @property
    def lanes_now(self) -> int:
        return self.progress.lanes if self.progress is not None and self.delivery == EXACTLY_ONCE else 0

    def check(self, row: TermRow) -> None:
        """Raises SchemaError if the progress topic is not the one in the term row, or BrokerError."""
        if row.delivery == self.delivery == AT_LEAST_ONCE:
            return
        # each time: another harvester may have added lanes, or the topic may have been deleted
        self.progress = self.find(row.progress_topic)
        check_recorded(self.progress, row.progress_topic)

    @staticmethod
    def is_unreleased(row: TermRow) -> bool:
        """Whether what an at-least-once leader had on the wire may still arrive."""
        return row.holder is not None and row.delivery == AT_LEAST_ONCE

    def wait_s(self, row: TermRow) -> float:
        """For how long nothing may be marked after this row's term was taken."""
        waits = self.delivery == EXACTLY_ONCE or row.kind == "moved"
        return self.expiry_s if self.is_unreleased(row) and waits else 0.0

    def expect(self, place: OutboxIdentity | None, term: int) -> None:
        """The database on which the new term was taken: `fence` purges nothing elsewhere."""
        if self.session is not None and place is not None:
            self.session.expect(str(place), term)

    def fence(self, row: TermRow, under: Leadership, taker: TakeOver) -> None:
        """Fence and purge all lanes of an exactly-once predecessor. Raises Superseded, Deposed, or database errors."""
        if self.delivery == EXACTLY_ONCE or row.delivery != EXACTLY_ONCE or self.progress is None:
            return
        session, lanes = self.session, self.lanes
        assert session is not None
        assert lanes is not None
        opener = Opener(lanes, _LaneOwner(session, taker))
        try:
            for number in range(self.progress.lanes):
                opener.open(number, under, lambda _ids: None).close()
        finally:
            session.close()
