"""What a take-over owes to the mode of the term before (P22, P24)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest

from harvester import failpoints
from harvester.delivery.opening import Superseded
from harvester.delivery.progress_topic import ProgressTopic
from harvester.errors import SchemaError
from harvester.outbox.leader_session import Owner, TermRow
from harvester.relay.core.messages import Report, TakeTerm, TermGone, TermTaken, TermWait
from harvester.relay.marker import Marker, RetryDelays
from harvester.relay.term import AT_LEAST_ONCE, EXACTLY_ONCE, DeliveryHandover

TOPIC, ANOTHER = ProgressTopic("progress", "one", 2), ProgressTopic("progress", "two", 2)
MODES = [AT_LEAST_ONCE, EXACTLY_ONCE]
HOLDER = UUID(int=4)
EXPIRY_S = 30.0


def row(delivery: str, topic: str | None = None, holder: UUID | None = HOLDER) -> TermRow:
    return TermRow(7, holder, uuid4(), uuid4(), delivery, topic)


def mode(delivery: str, progress: ProgressTopic | None = None, found: ProgressTopic | None = None) -> DeliveryHandover:
    """`progress` as it was made at the start; `found`: what a look at Kafka finds."""
    return DeliveryHandover(
        delivery, EXPIRY_S, find=lambda _: found if found is not None else progress, progress=progress
    )


# -- P24


@pytest.mark.parametrize(
    ("before", "holder", "now", "wait_s"),
    [
        (AT_LEAST_ONCE, HOLDER, EXACTLY_ONCE, EXPIRY_S),
        (AT_LEAST_ONCE, None, EXACTLY_ONCE, 0.0),
        (EXACTLY_ONCE, HOLDER, EXACTLY_ONCE, 0.0),
        (EXACTLY_ONCE, None, EXACTLY_ONCE, 0.0),
        (EXACTLY_ONCE, HOLDER, AT_LEAST_ONCE, 0.0),
        (AT_LEAST_ONCE, HOLDER, AT_LEAST_ONCE, 0.0),
        (AT_LEAST_ONCE, None, AT_LEAST_ONCE, 0.0),
    ],
)
def test_only_the_first_exactly_once_term_waits_and_only_for_one_that_was_not_released(
    before: str, holder: UUID | None, now: str, wait_s: float
) -> None:
    assert mode(now, TOPIC).wait_s(row(before, "one", holder)) == wait_s


@pytest.mark.parametrize("now", MODES)
@pytest.mark.parametrize(("holder", "wait_s"), [(HOLDER, EXPIRY_S), (None, 0.0)])
def test_any_first_term_of_another_group_waits_for_one_that_was_not_released(
    now: str, holder: UUID | None, wait_s: float
) -> None:
    moved = replace(row(AT_LEAST_ONCE, None, holder), kind="moved")
    assert mode(now, TOPIC).wait_s(moved) == wait_s


# -- P37


@pytest.mark.parametrize(
    ("theirs", "ours", "excluded"),
    [
        (Owner("a", "x"), Owner("a", "x"), False),
        (Owner("a", "x"), Owner("b", "x"), True),
        (Owner("a", "x"), Owner("a", "y"), True),
        (Owner("a", "x"), Owner("a", None), False),
        (Owner("a", None), Owner("b", "x"), True),
        (Owner(None, "x"), Owner("b", "y"), True),
        (Owner(), Owner("b", "y"), False),
    ],
)
def test_whose_an_outbox_is(theirs: Owner, ours: Owner, excluded: bool) -> None:
    assert theirs.excludes(ours) is ours.excludes(theirs) is excluded


# -- P22


def test_the_topic_of_the_term_row_is_accepted() -> None:
    mode(EXACTLY_ONCE, TOPIC).check(row(EXACTLY_ONCE, "one"))


@pytest.mark.parametrize("before", MODES)
@pytest.mark.parametrize(("progress", "what"), [(ANOTHER, r"a different one \(two\)"), (None, "is missing")])
def test_another_topic_or_none_is_refused(before: str, progress: ProgressTopic | None, what: str) -> None:
    """Also when terms of at-least-once mode came in between: what was committed before may still be in the outbox."""
    with pytest.raises(SchemaError, match=what) as raised:
        mode(EXACTLY_ONCE, progress).check(row(before, "one"))
    assert raised.value.hint


@pytest.mark.parametrize("before", MODES)
def test_the_first_exactly_once_term_accepts_any(before: str) -> None:
    mode(EXACTLY_ONCE, ANOTHER).check(row(before))


def test_going_back_to_at_least_once_looks_for_the_topic_and_keeps_what_it_found() -> None:
    going_back = mode(AT_LEAST_ONCE, None, TOPIC)
    going_back.check(row(EXACTLY_ONCE, "one"))
    assert going_back.progress == TOPIC


@pytest.mark.parametrize("found", [None, ANOTHER])
def test_going_back_to_at_least_once_without_the_topic_is_refused(found: ProgressTopic | None) -> None:
    with pytest.raises(SchemaError):
        mode(AT_LEAST_ONCE, None, found).check(row(EXACTLY_ONCE, "one"))


def test_at_least_once_after_the_same_does_not_look() -> None:
    def look(_recorded: str | None) -> ProgressTopic | None:
        raise AssertionError

    DeliveryHandover(AT_LEAST_ONCE, EXPIRY_S, find=look).check(row(AT_LEAST_ONCE, "one"))


# -- what the term row is to know


def test_an_exactly_once_term_names_its_topic_and_others_leave_what_is_there() -> None:
    assert mode(EXACTLY_ONCE, TOPIC).topic_id == "one"
    assert mode(AT_LEAST_ONCE, TOPIC).topic_id is None
    assert mode(AT_LEAST_ONCE).topic_id is None


# -- a take-over that is cut short, and the next one


class Outbox:
    """A mark session without a server: all that it has is the term row."""

    is_open, server, term_is_locked = True, "one", False

    def __init__(self, row: TermRow) -> None:
        self.row, self.failures = row, 0

    def read_term(self) -> TermRow:
        return self.row

    def take_term(self, expected: int, _seen: int, holder: UUID, *_: Any) -> int:
        self.row = replace(self.row, term=expected + 1, holder=holder)
        return self.row.term

    def note_delivery(
        self, _term: int, _holder: UUID, delivery: str, progress_topic: str | None, _kind: str = "harvester"
    ) -> None:
        """What the predecessor left behind is settled."""
        self.row = replace(self.row, delivery=delivery, progress_topic=progress_topic or self.row.progress_topic)

    def renew_incarnation(self) -> None:
        """The statement behind the one that took the term."""
        if self.failures:
            self.failures -= 1
            raise psycopg.OperationalError("the connection is lost")

    def close(self) -> None:
        """Nothing to close."""

    def __getattr__(self, _name: str) -> Any:
        """Whatever else a take-over writes into the term row."""
        return lambda *_, **__: None


def take_over(outbox: Any, mode: DeliveryHandover, *, trusted: bool = True) -> list[Report]:
    """One harvester takes the term; `trusted`: as long as it likes, or only until it has it."""
    said: list[Report] = []
    before = outbox.row.term
    pace = RetryDelays(0.0, 0.0, io_error_backoff_s=0.0, statement_timeout_s=1.0)

    class Trust:
        @property
        def trusted(self) -> bool:
            return trusted or outbox.row.term == before

    relay = SimpleNamespace(trust=Trust(), report=said.append, wants_term=lambda _holder: True)
    group = SimpleNamespace(highest_term=0)
    loop = Marker(outbox, pace, "name", cast(Any, relay), cast(Any, group), failpoints.load(), mode)
    loop._take(TakeTerm(uuid4()))
    loop.stop()
    return said


def waited(said: list[Report]) -> bool:
    return any(isinstance(report, TermWait) and "P24" in (report.text or "") for report in said)


def starting() -> DeliveryHandover:
    """A harvester in exactly-once mode, and a term row of at-least-once mode that nobody has released."""
    return replace(mode(EXACTLY_ONCE, TOPIC), expiry_s=0.02)


def test_the_first_exactly_once_term_waits_and_the_next_does_not() -> None:
    outbox = Outbox(row(AT_LEAST_ONCE))
    said = take_over(outbox, starting())
    assert waited(said)
    assert isinstance(said[-1], TermTaken)
    assert not waited(take_over(outbox, starting()))


def test_a_wait_that_was_cut_short_is_waited_for_by_the_next_leader() -> None:
    """P24: what the at-least-once leader had on the wire has not expired by that."""
    outbox = Outbox(row(AT_LEAST_ONCE))
    assert isinstance(take_over(outbox, starting(), trusted=False)[-1], TermGone)
    assert waited(take_over(outbox, starting()))


def test_a_take_over_that_is_tried_again_waits() -> None:
    """The row that the second attempt reads is one that the first has written."""
    outbox = Outbox(row(AT_LEAST_ONCE))
    outbox.failures = 1
    assert waited(take_over(outbox, starting()))


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("failure", [psycopg.OperationalError("the connection is lost"), Killed()], ids=["", "killed"])
def test_lanes_are_fenced_though_the_first_attempt_failed(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P19: an exactly-once leader that is still there could commit what it has open."""
    fenced: list[str] = []
    failures = [failure]

    def fence(_self: DeliveryHandover, row: TermRow, *_: Any) -> None:
        fenced.append(row.delivery)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(DeliveryHandover, "fence", fence)
    outbox = Outbox(row(EXACTLY_ONCE, "one"))
    with suppress(Killed):
        take_over(outbox, mode(AT_LEAST_ONCE, None, TOPIC))
    if isinstance(failure, Killed):
        take_over(outbox, mode(AT_LEAST_ONCE, None, TOPIC))
    assert fenced == [EXACTLY_ONCE] * 2


def test_who_is_not_to_lead_any_more_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a standby says for good why it could not lead once."""

    def fence(_self: DeliveryHandover, _row: TermRow, _under: Any, host: Any) -> None:
        host.trouble("a lane cannot be opened")
        raise Superseded

    monkeypatch.setattr(DeliveryHandover, "fence", fence)
    said = take_over(Outbox(row(EXACTLY_ONCE, "one")), mode(EXACTLY_ONCE, TOPIC), trusted=False)
    assert [report.text for report in said if isinstance(report, TermWait)][-1] is None


def test_who_waits_for_a_lock_on_the_term_row_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt ends with its lock timeout, well within what a mark loop may take (P14)."""
    outbox: Any = Outbox(row("at-least-once"))
    turns: list[int] = []
    monkeypatch.setattr(Marker, "turned", lambda _self: turns.append(1))
    attempts = iter([None, None, 2])
    outbox.take_term = lambda *_: next(attempts)
    take_over(outbox, mode("at-least-once"))
    assert len(turns) >= 3
