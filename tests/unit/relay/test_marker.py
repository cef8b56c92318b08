"""How long the marker waits between empty marks, and what it makes of a session."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester import failpoints
from harvester.errors import BrokerError, HarvesterError, SchemaError
from harvester.outbox.connection import OutboxIdentity
from harvester.outbox.leader_session import Holders
from harvester.outbox.sql.queries import IdSpace
from harvester.relay.core.leadership import HandOver
from harvester.relay.core.messages import (
    DatabaseTrouble,
    Fetch,
    Look,
    Looked,
    Mark,
    ReleaseTerm,
    Report,
    ServerChanged,
    StatementFailed,
    TakeTerm,
    TermWait,
)
from harvester.relay.core.scan import LOWEST
from harvester.relay.marker import Marker, MarkReader, RetryDelays, idle_wait_s

PACE = RetryDelays(mark_backoff_s=0.001, mark_backoff_max_s=0.016, io_error_backoff_s=1, statement_timeout_s=1)


def test_it_doubles_from_the_floor_to_the_ceiling() -> None:
    waits = [idle_wait_s(idle, PACE, notified=False) for idle in range(8)]
    assert waits == [0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.016, 0.016]


def test_with_notifications_the_ceiling_is_higher() -> None:
    assert idle_wait_s(50, PACE, notified=True) == 1.0


def test_a_higher_ceiling_of_the_user_stays() -> None:
    assert idle_wait_s(50, RetryDelays(0.001, 5.0, 1, 1), notified=True) == 5.0


def test_a_floor_above_the_ceiling_is_cut() -> None:
    assert idle_wait_s(1, RetryDelays(2.0, 0.5, 1, 1), notified=False) == 0.5


@given(st.integers(-1, 10**9), st.floats(1e-6, 1), st.floats(1e-6, 10), st.booleans())
def test_it_is_bounded_and_never_shrinks(idle: int, floor_s: float, ceiling_s: float, notified: bool) -> None:
    pace = RetryDelays(floor_s, ceiling_s, 1, 1)
    wait_s, longer_s = (idle_wait_s(n, pace, notified) for n in (idle, idle + 1))
    assert 0 <= wait_s <= longer_s <= max(ceiling_s, 1.0 if notified else 0)
    assert (wait_s == 0) == (idle <= 0)


# -- ids that start again


class Begun:
    """A session that was opened when the sequence's file was 300; the first list of locks finds this one."""

    place = OutboxIdentity((1, 1), IdSpace(table=100, sequence=200, file=300))
    over = ()

    def __init__(self, table: int, file: int) -> None:
        self.table, self.file = table, file

    def read_bookmark(self) -> None:
        """There is none."""

    def holders(self) -> Holders:
        return Holders({}, 50, self.file, None, self.table)

    def mark(self, **_: Any) -> list[Any]:
        return []


@pytest.mark.parametrize(("table", "file", "again"), [(100, 300, False), (100, 301, True), (101, 300, True)])
def test_ids_that_start_again_before_the_first_look_are_noticed(table: int, file: int, again: bool) -> None:
    """Its marks are fenced by what it was opened with: they would bring nothing, and say that nothing is there."""
    said: list[Report] = []
    taker: Any = SimpleNamespace(taken=SimpleNamespace(holder=uuid4()), ids_restarted=False)
    reader = MarkReader(cast(Any, Begun(table, file)), taker, said.append, failpoints.load(), writes=False)
    reader.perform(Mark(1, 1, uuid4(), uuid4(), 100, idle=1, rested=True))
    assert any(isinstance(report, ServerChanged) for report in said) is again
    assert taker.ids_restarted is again


def test_a_term_that_cannot_be_released_is_no_trouble_of_a_standby() -> None:
    """It has nothing to do with the database until it leads again, and so nothing that would end the trouble."""
    said: list[Report] = []
    closed: list[bool] = []

    def release(*_: Any) -> None:
        raise psycopg.OperationalError("the connection is lost")

    session: Any = SimpleNamespace(is_open=True, release=release, close=lambda: closed.append(True))
    relay: Any = SimpleNamespace(report=said.append)
    marker = Marker(session, PACE, "name", relay, cast(Any, None), failpoints.load(), cast(Any, None))
    marker._release(ReleaseTerm(1, uuid4()))
    assert said == []
    assert closed == [True]


def test_an_outage_of_long_ago_is_none_of_the_next_leadership() -> None:
    """Nobody has used the database since, and so nobody has noticed that it is back."""
    seen: list[float] = []

    def read_term() -> Any:
        seen.append(marker.unreachable_s(time.monotonic()))
        marker.ended.set()
        raise psycopg.OperationalError("enough")

    session: Any = SimpleNamespace(is_open=True, term_is_locked=False, read_term=read_term, close=lambda: None)
    relay: Any = SimpleNamespace(report=lambda _: None, wants_term=lambda _: True)
    marker = Marker(session, PACE, "name", relay, cast(Any, None), failpoints.load(), cast(Any, None))
    marker._unreachable_since = time.monotonic() - 3_600
    marker._take(TakeTerm(uuid4()))
    assert seen == [0.0]


class Refused:
    """A leader whose attempts at the term last 1 s each by its own clock, and do what `attempt` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attempt: Callable[[], bool]) -> None:
        self.now_s, self.trusted = 1.0, True
        self.said: list[Report] = []
        self.opened = 0
        self._attempt = attempt
        session: Any = SimpleNamespace(is_open=False, term_is_locked=False)
        session.open, session.close = lambda: self._open(session), lambda: setattr(session, "is_open", False)
        relay: Any = SimpleNamespace(report=self.said.append, wants_term=lambda _: True, trust=self)
        pace = RetryDelays(0.001, 0.016, io_error_backoff_s=0, statement_timeout_s=1)
        self.marker = Marker(session, pace, "name", relay, cast(Any, None), failpoints.load())
        monkeypatch.setattr(self.marker._taker, "attempt", self.attempt)
        monkeypatch.setattr("harvester.relay.marker.time", SimpleNamespace(monotonic=lambda: self.now_s))

    def _open(self, session: Any) -> None:
        session.is_open = True
        self.opened += 1

    def attempt(self, *_: Any) -> bool:
        self.now_s += 1.0
        return self._attempt()

    @property
    def unreachable_s(self) -> float:
        return self.marker.unreachable_s(self.now_s)

    def texts(self, kind: type[DatabaseTrouble | TermWait]) -> list[str | None]:
        return [report.text for report in self.said if isinstance(report, kind)]


DENIED = BrokerError("the progress topic cannot be described", hint="allow it to this user")
NO_UPDATE = psycopg.errors.InsufficientPrivilege("permission denied for table outbox_term")
NO_COLUMN = SchemaError("a column is missing", hint="run init")


@pytest.mark.parametrize("error", [DENIED, NO_UPDATE, NO_COLUMN], ids=["broker", "database", "schema"])
def test_a_term_that_cannot_be_taken_counts_until_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: an open session is no progress, and the trouble does not come and go with it."""
    seen: list[float] = []
    hindrances: list[str] = []

    def attempt() -> bool:
        seen.append(leader.unreachable_s)
        hindrances.append(leader.marker.hindrance)
        if len(seen) < 5:
            raise error
        return True

    leader = Refused(monkeypatch, attempt)
    leader.marker._take(TakeTerm(uuid4()))
    assert seen == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert hindrances[1:] == ["the term could not be taken"] * 4
    assert leader.unreachable_s == 0.0
    hint = error.hint if isinstance(error, HarvesterError) else None
    source, other = (TermWait, DatabaseTrouble) if error is DENIED else (DatabaseTrouble, TermWait)
    *troubles, last = leader.texts(source)[0 if error is DENIED else 1 :]
    shown = f"{error} ({hint})" if hint else str(error)
    assert len(troubles) == 4
    assert all((text or "").endswith(shown) for text in troubles)
    assert last is None
    assert set(leader.texts(other)) == {None}
    assert leader.opened == (1 if error is DENIED else 5)


def test_a_wait_by_design_is_no_failure_to_take_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """P24: it may be longer than what makes a leader hand over, and the next one would have to wait again."""
    seen: list[float] = []

    def attempt() -> bool:
        if leader.now_s < 3.0:
            raise NO_UPDATE
        leader.now_s += 60.0
        seen.append(leader.unreachable_s)
        return True

    leader = Refused(monkeypatch, attempt)
    leader.marker._take(TakeTerm(uuid4()))
    assert seen == [0.0]


def test_a_term_that_cannot_be_taken_is_handed_over_after_twice_as_long_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P14: the count goes on with the next leadership; what lies between the two is no part of it."""
    hand_over = HandOver(2.0, 300.0)

    def attempt() -> bool:
        if hand_over.due(leader.unreachable_s):
            leader.trusted = False
            return True
        assert leader.now_s < began_s + 60.0, "it is never handed over"
        raise DENIED

    leader = Refused(monkeypatch, attempt)
    lasted: list[float] = []
    for _ in range(3):
        began_s, leader.trusted = leader.now_s, True
        leader.marker._take(TakeTerm(uuid4()))
        lasted.append(leader.now_s - began_s)
        assert leader.texts(TermWait)[-1] is None, "a standby has no such trouble"
        leader.now_s += 3_600.0
        assert not hand_over.due(leader.unreachable_s)
    assert lasted == [4.0, 5.0, 9.0]  # the first two attempts of the first do not count


def test_a_database_that_is_away_is_what_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it went away during an attempt."""
    hindrances: list[str] = []

    def attempt() -> bool:
        if not hindrances:
            leader.marker._session.open = unreachable  # type: ignore[method-assign]
            raise NO_UPDATE
        return True

    def unreachable() -> None:
        hindrances.append(leader.marker.hindrance)
        if len(hindrances) == 3:
            leader.marker.ended.set()
        raise psycopg.OperationalError("connection refused")

    leader = Refused(monkeypatch, attempt)
    leader.marker._take(TakeTerm(uuid4()))
    assert hindrances[1:] == ["the database has been out of reach"] * 2


def test_a_harvester_that_only_stands_by_finds_that_its_database_is_back() -> None:
    """Nothing else would use the session, and end the trouble."""
    said: list[Report] = []
    session: Any = SimpleNamespace(is_open=False, open=lambda: None, close=lambda: None)
    relay: Any = SimpleNamespace(report=said.append, wants_term=lambda _: False)
    marker = Marker(session, PACE, "name", relay, cast(Any, None), failpoints.load(), cast(Any, None))
    marker._reader = cast(Any, SimpleNamespace(restart=lambda: None))
    marker._unreachable_since = time.monotonic()
    marker._rest()
    assert said == [DatabaseTrouble(None)]
    assert marker.unreachable_s(time.monotonic()) == 0.0


def test_with_a_statement_those_requested_next_fail() -> None:
    """They would be executed in vain, and those that take too long hold up the ones of the remark."""
    said: list[Report] = []

    def mark(**_: Any) -> Any:
        raise psycopg.OperationalError("it took too long")

    def never(**_: Any) -> Any:
        raise AssertionError("in vain")

    session: Any = SimpleNamespace(
        is_open=True, register=lambda *_: None, read_bookmark=lambda: None, place=None, shape=None, close=lambda: None,
        holders=lambda: Holders({}, 50, 300, None, 100), mark=mark, fetch=never,
    )  # fmt: skip
    relay: Any = SimpleNamespace(report=said.append)
    pace = RetryDelays(0.001, 0.016, io_error_backoff_s=0, statement_timeout_s=1)
    marker = Marker(session, pace, "name", relay, cast(Any, None), failpoints.load(), cast(Any, None))
    holder = uuid4()
    for command in (Mark(2, 1, holder, holder, 100), Fetch(3, 1, holder, (5,)), ReleaseTerm(1, holder)):
        marker.perform(command)
    marker._read(Mark(1, 1, holder, holder, 100))
    assert [report.number for report in said if isinstance(report, StatementFailed)] == [1, 2, 3]
    assert list(marker._commands) == [ReleaseTerm(1, holder)]


@pytest.mark.parametrize(
    ("high", "look", "asked", "rest"),
    [
        (9, Look(1, 1, UUID(int=1)), [(LOWEST, 9)], None),
        (9, Look(1, 1, UUID(int=1), None, 4), [(6, 9)], 5),
        (9, Look(1, 1, UUID(int=1), 5, 4), [(2, 5)], 1),
        (3, Look(1, 1, UUID(int=1), 5, 4), [(0, 3)], -1),
        (9, Look(1, 1, UUID(int=1), LOWEST + 3, 4), [(LOWEST, LOWEST + 3)], None),
        (LOWEST - 1, Look(1, 1, UUID(int=1)), [], None),
        (None, Look(1, 1, UUID(int=1)), [], None),
    ],
)
def test_a_look_reads_what_the_scan_has_passed(
    high: int | None, look: Look, asked: list[tuple[int, int]], rest: int | None
) -> None:
    said: list[Report] = []
    found: list[tuple[int, int]] = []

    def ids_between(low: int, up: int) -> list[int] | None:
        found.append((low, up))
        return [up] if len(found) == 1 else None

    session: Any = SimpleNamespace(ids_between=ids_between)
    reader = MarkReader(session, cast(Any, None), said.append, failpoints.load(), writes=False)
    reader.scan.high = high
    reader.perform(look)
    assert found == asked
    assert said == [Looked(1, [up for _, up in asked], rest)]
    if asked:
        reader.perform(look)
        assert isinstance(said[1], StatementFailed), "it took too long"
