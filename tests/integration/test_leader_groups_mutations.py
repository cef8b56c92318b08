"""P37 on the term row itself, where takers of terms meet: as it is, and broken in one place after the other."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from harvester import failpoints
from harvester.errors import ForeignLeader, TermContested
from harvester.outbox.leader_session import MarkSession, Owner, TermSession
from harvester.outbox.sql import queries
from harvester.relay import term as term_module
from harvester.relay.core.leadership import RelaySettings, Tenure
from harvester.relay.core.messages import LoopDied, Report, TakeTerm, TermGone, TermTaken, TermWait
from harvester.relay.core.state_machine import StateMachine
from harvester.relay.term import AT_LEAST_ONCE, DeliveryHandover, TermTaker

pytest_plugins = ["tests.support.scenes", "tests.support.mark_sessions"]

Patch = pytest.MonkeyPatch
Sessions = Callable[[], MarkSession]
Mutation = Callable[[Patch], None]
OURS, THEIRS = Owner("ours", "cluster"), Owner("theirs", "cluster")
EXPIRY_S = 0.3
TURNS = 20


def _as_it_is(_: Patch) -> None:
    """The rule holds."""


def _nobody_asks_whose_it_is(patch: Patch) -> None:
    patch.setattr(TermSession, "check_owner", lambda *_: None)


def _the_statement_does_not_ask(patch: Patch) -> None:
    patch.setattr(queries, "_OURS", "true")


def _neither_asks(patch: Patch) -> None:
    _nobody_asks_whose_it_is(patch)
    _the_statement_does_not_ask(patch)


def _sessions_of_any_term_are_ended(patch: Patch) -> None:
    whole = queries.end_sessions
    patch.setattr(queries, "end_sessions", lambda table: whole(table).replace("t.term = %(expected)s", "true"))


def _a_move_does_not_say_what_it_found(patch: Patch) -> None:
    whole = queries.move
    patch.setattr(queries, "move", lambda table: whole(table).replace("ELSE 'moved' END", "ELSE 'harvester' END"))


def _who_takes_the_term_forgets_the_move(patch: Patch) -> None:
    patch.setattr(queries, "_MOVED", "false")


def _nobody_waits_for_another_group(patch: Patch) -> None:
    wait_s = DeliveryHandover.wait_s
    patch.setattr(DeliveryHandover, "wait_s", lambda self, row: 0.0 if row.kind == "moved" else wait_s(self, row))


def _losses_are_not_counted(patch: Patch) -> None:
    patch.setattr(Tenure, "lose", lambda *_: None)


def _any_number_of_losses_is_borne(patch: Patch) -> None:
    patch.setattr(term_module, "_MOST_LOST", TURNS)


class Taking:
    """One that takes terms for a member of a group, and what it reports."""

    highest_term = 0

    def __init__(
        self, session: MarkSession, ours: Owner, meanwhile: Callable[[], object] = lambda: None, trusted: bool = True
    ) -> None:
        """`meanwhile`: happens between its look at the row and its statement. `trusted`: beyond the take-over, too."""
        self.ended = threading.Event()
        self.reports: list[Report] = []
        self._ours, self._meanwhile, self._lasts = ours, meanwhile, trusted
        self._taker = TermTaker(session, DeliveryHandover(AT_LEAST_ONCE, EXPIRY_S), "name", self, failpoints.load())

    def report(self, report: Report) -> None:
        self.reports.append(report)

    @property
    def trusted(self) -> bool:
        return self._lasts or self._taker.taken is None

    def owner(self) -> Owner:
        self._meanwhile()
        return self._ours

    def turned(self) -> None:
        """Nobody looks whether it is alive."""

    def take(self, command: TakeTerm | None = None) -> Taking:
        """As often as it takes, within reason."""
        command = command or TakeTerm(uuid.uuid4())
        for _ in range(3):
            if self._taker.attempt(command.holder, (), command.lost):
                break
        return self

    def of(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def failures(self) -> list[type[BaseException]]:
        return [type(report.error) for report in self.of(LoopDied)]

    @property
    def waited(self) -> bool:
        return any("P37" in (report.text or "") for report in self.of(TermWait))


def is_alive(session: MarkSession) -> bool:
    try:
        session.read_term()
    except psycopg.OperationalError:
        return False
    return True


def by_name(value: Any) -> str | None:
    return str(value.__name__).strip("_") if callable(value) else None


@pytest.mark.parametrize(
    ("mutation", "term", "alive", "failures"),
    [
        (_as_it_is, 1, True, [ForeignLeader]),
        (_nobody_asks_whose_it_is, 1, False, []),
        (_neither_asks, 2, False, []),
    ],
    ids=by_name,
)
def test_another_group_takes_no_term_and_ends_no_session(
    mutation: Mutation, term: int, alive: bool, failures: list[type], sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    leader = sessions()
    assert leader.take_term(0, 0, uuid.uuid4(), "leader", owner=OURS) == 1
    taking = Taking(sessions(), THEIRS).take()
    assert (sessions().read_term().term, is_alive(leader), taking.failures) == (term, alive, failures)


@pytest.mark.parametrize(
    ("mutation", "term", "failures"),
    [(_as_it_is, 1, [ForeignLeader]), (_the_statement_does_not_ask, 2, [])],
    ids=by_name,
)
def test_an_outbox_that_moves_under_a_take_over_is_not_taken(
    mutation: Mutation, term: int, failures: list[type], sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    before, mover, holder = sessions(), sessions(), uuid.uuid4()
    assert before.take_term(0, 0, holder, "before", owner=OURS) == 1
    before.release(1, holder)
    taking = Taking(sessions(), OURS, lambda: mover.move(mover.read_term(), THEIRS)).take()
    assert (mover.read_term().term, taking.failures) == (term, failures)


@pytest.mark.parametrize(
    ("mutation", "alive"), [(_as_it_is, True), (_sessions_of_any_term_are_ended, False)], ids=by_name
)
def test_who_comes_too_late_ends_no_session(
    mutation: Mutation, alive: bool, sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    leader = sessions()
    came: list[int | None] = []

    def lead() -> None:
        came.append(leader.take_term(0, 0, uuid.uuid4(), "leader", owner=THEIRS) if not came else None)

    taking = Taking(sessions(), OURS, lead).take()
    assert came[0] == 1
    assert (is_alive(leader), taking.failures) == (alive, [ForeignLeader])


@pytest.mark.parametrize(
    ("mutation", "waits"),
    [
        (_as_it_is, [True, True, False]),
        (_a_move_does_not_say_what_it_found, [False, False, False]),
        (_who_takes_the_term_forgets_the_move, [True, False, False]),
        (_nobody_waits_for_another_group, [False, False, False]),
    ],
    ids=by_name,
)
def test_the_first_leader_after_a_move_waits_though_one_before_it_was_cut_short(
    mutation: Mutation, waits: list[bool], sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    killed, mover = sessions(), sessions()
    assert killed.take_term(0, 0, uuid.uuid4(), "killed", owner=OURS) == 1
    assert mover.move(mover.read_term(), THEIRS)
    short = Taking(sessions(), THEIRS, trusted=False).take()
    began = time.monotonic()
    first = Taking(sessions(), THEIRS).take()
    assert not first.waited or time.monotonic() - began > EXPIRY_S
    second = Taking(sessions(), THEIRS).take()
    assert [each.waited for each in (short, first, second)] == waits
    assert [bool(each.of(TermTaken)) for each in (short, first, second)] == [False, True, True]
    assert short.of(TermGone)


@pytest.mark.parametrize(
    ("mutation", "ends"),
    [(_as_it_is, True), (_losses_are_not_counted, False), (_any_number_of_losses_is_borne, False)],
    ids=by_name,
)
def test_of_two_that_take_the_term_in_turns_one_ends(
    mutation: Mutation, ends: bool, sessions: Sessions, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    settings = RelaySettings(
        shards=1, max_in_flight_records=1, max_unsettled_records=1, mark_query_records=1, send_buffer=1,
        max_queued_per_key=1, records_per_shard=0, most_shards=1, answer_timeout_s=1.0, silence_timeout_s=1.0,
    )  # fmt: skip
    both = [StateMachine(settings, uuid.uuid4), StateMachine(settings, uuid.uuid4)]
    failures: list[type[BaseException]] = []
    for turn in range(TURNS):
        machine = both[turn % 2]
        commands = machine.acquire(0.0) if turn < 2 else machine.term_lost(True, 0.0)
        (command,) = [command for command in commands if isinstance(command, TakeTerm)]
        taking = Taking(sessions(), OURS).take(command)
        failures = taking.failures
        if failures:
            break
        (taken,) = taking.of(TermTaken)
        machine.term_taken(taken.holder, taken.term, taken.server, 0.0, incarnation=taken.incarnation)
    assert failures == ([TermContested] if ends else [])
    assert (sessions().read_term().term < 12) is ends
