"""The term on loan: how a bulk drain borrows it from the harvesters, keeps it, and returns it (rule P32).

The term row records who has the term, and until when, by the database's clock (`lease_until`). No
harvester takes a term whose lease has not expired; each checks again once a second. So whatever the borrower does under
the term, it must have stopped when the lease ends, and then nobody needs to wait for anything.

1. *Ask.* `wanted_by` makes the leader finish what is on the wire and release the term, and keeps others from taking it.
   A leader sees it within a second, a busy one within five, one that has lost its database or its life not at all.
2. *Take*, by compare and set. A term that was not released in time is taken anyway. Until its leader has noticed and
   what it had on the wire has arrived, the borrower waits under the lease. Another borrower's unexpired lease is
   waited for first; an expired one left nothing behind, if that borrower had come as far as step 4.
3. *Settle* what an exactly-once predecessor left behind: `settle`, which fences all lanes and purges what they name.
   Only then does the row say that a drain has the term (`holder_kind`); until then a successor has to wait as well.
4. *Renew* while working; *release* at the end. If a borrower dies, others wait until its lease has expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import psycopg

from harvester.outbox.connection import database_errors
from harvester.outbox.leader_session import ANYONE, Owner, TermRow, TermSession
from harvester.outbox.tables import OutboxTable

_AT_LEAST_ONCE = "at-least-once"
_LOOK_S = 0.2
_ASK_AGAIN_S = 2.0
_STATEMENT_S = 30.0


@dataclass(frozen=True, slots=True)
class Loan:
    """A borrowed term. `until`: the end of the lease, by the database's clock."""

    term: int
    holder: UUID
    incarnation: UUID
    until: datetime


_Taken = tuple[TermRow, int, datetime]  # the previous row, the new term, the end of its lease


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for the leader to finish, and after that until nothing of it can arrive any more."""

    release_s: float
    expiry_s: float


class Borrower:
    """Borrows the term. A context manager; one thread only.

    `settle` receives the previous row, the new term, its holder and the incarnation. `owner`: who must own the outbox.
    Methods raise DatabaseUnavailable, SchemaError, TermLost; `take` also ForeignLeader.
    """

    def __init__(
        self,
        dsn: str,
        table: OutboxTable,
        name: str,
        lease: timedelta,
        patience: Patience,
        settle: Callable[[TermRow, int, UUID, UUID], None],
        owner: Owner = ANYONE,
    ) -> None:
        self._lease_s, self._patience = lease.total_seconds(), patience
        self._settle, self._owner = settle, owner
        self._session = TermSession(dsn, table, "harvester drain", _STATEMENT_S)
        self._holder = uuid4()
        self._name = f"{name} {str(self._holder)[:8]}"  # distinguishes two on one machine
        self._loan: Loan | None = None

    def __enter__(self) -> Borrower:
        with database_errors("connect"):
            self._session.open()
            self._session.refuse_pooler()
        return self

    def __exit__(self, *_error: object) -> None:
        self._session.close()

    @property
    def session(self) -> TermSession:
        """The session that holds the term, for statements under its fence."""
        return self._session

    def take(self, waiting: Callable[[str], None], is_over: Callable[[], bool]) -> Loan | None:
        """The loan; None if `is_over` returns True first. `waiting` is called once with each thing waited for."""
        with database_errors("borrow the term"):
            taken = self._take(_once(waiting), is_over)
            if taken is None:
                return None
            row, term, until = taken
            self._loan = Loan(term, self._holder, row.incarnation, until)  # from now on it can be given up
            self._session.renew_incarnation()
            incarnation = self._session.read_term().incarnation
            self._loan = replace(self._loan, incarnation=incarnation)
            self.renew()
            if row.holder is not None and row.kind != "drain" and row.delivery == _AT_LEAST_ONCE:
                waiting(f"term not released: what its leader sent may still arrive for {self._patience.expiry_s:.0f} s")
                if not self._wait(self._patience.expiry_s, is_over):
                    self.give_up()
                    return None
            self._settle(row, term, self._holder, incarnation)
            self._session.note_delivery(term, self._holder, _AT_LEAST_ONCE, None, "drain")
            return self.renew()

    def renew(self) -> Loan:
        """The same loan for a whole lease from now. Raises TermLost if the term belongs to another."""
        assert self._loan is not None, "take() comes first"
        loan = self._loan
        with database_errors("renew the lease of the term"):
            try:
                until = self._session.renew_loan(loan.term, loan.holder, self._lease_s)
            except psycopg.OperationalError:  # a new holder has ended our session (P7), or it was lost
                self._session.open()
                until = self._session.renew_loan(loan.term, loan.holder, self._lease_s)
        self._loan = replace(loan, until=until)
        return self._loan

    def release(self) -> None:
        """Nothing of the term is on its way any more: the next leader need not wait."""
        if self._loan is not None:
            with database_errors("release the term"):
                self._session.release(self._loan.term, self._loan.holder)
            self._loan = None

    def give_up(self) -> None:
        """Nothing more is sent under the term; what was sent, also by a predecessor, may still be on its way."""
        if self._loan is not None:
            with database_errors("give up the term"):
                self._session.end_loan(self._loan.term, self._loan.holder)
            self._loan = None

    def _take(self, waiting: Callable[[str], None], is_over: Callable[[], bool]) -> _Taken | None:
        deadline: float | None = None
        asked_at = -_ASK_AGAIN_S
        while not is_over():
            row, now = self._session.read_term(), time.monotonic()
            self._session.check_owner(row, self._owner)
            if row.lent_to not in (None, self._name):
                waiting(f"{row.lent_to} has borrowed the term, or asks for it")
            elif row.holder is None or row.kind != "harvester" or (deadline is not None and now >= deadline):
                # A drain does not read the leader topic, so it has seen no term there.
                taken = self._session.borrow_term(row.term, 0, self._holder, self._name, self._lease_s, self._owner)
                if taken is not None:
                    return row, *taken
                continue
            else:
                if deadline is None:
                    deadline = now + self._patience.release_s
                    waiting(f"the leader of term {row.term} is asked to finish, for {self._patience.release_s:.0f} s")
                if now - asked_at >= _ASK_AGAIN_S:
                    asked_at = now
                    self._session.want_term(self._name, _ASK_AGAIN_S * 4)
            time.sleep(_LOOK_S)
        with suppress(psycopg.Error):
            self._session.forget_wish(self._name)
        return None

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        renew_at = 0.0
        while (now := time.monotonic()) < deadline:
            if is_over():
                return False
            if now >= renew_at:
                renew_at = now + self._lease_s / 4
                self.renew()
            time.sleep(_LOOK_S)
        return True


def _once(tell: Callable[[str], None]) -> Callable[[str], None]:
    last: list[str] = []

    def told(text: str) -> None:
        if last != [text]:
            last[:] = [text]
            tell(text)

    return told
