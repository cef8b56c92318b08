"""Restart budget and hand-over."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from harvester.relay.core.supervision import HandOver, RestartBudget


def test_a_budget_is_spent_within_its_window() -> None:
    budget = RestartBudget(2, 60)
    assert [budget.spend(0), budget.spend(10), budget.spend(20)] == [True, True, False]


def test_old_deaths_are_forgotten() -> None:
    budget = RestartBudget(2, 60)
    assert all(budget.spend(now) for now in (0, 10, 60, 70, 120))
    assert not budget.spend(120.5)


def test_no_budget_allows_no_death() -> None:
    assert not RestartBudget(0, 60).spend(0)


@given(st.integers(0, 5), st.lists(st.floats(0, 30), max_size=30))
def test_it_says_no_exactly_when_the_window_holds_too_many(budget: int, waits: list[float]) -> None:
    tested, now, deaths = RestartBudget(budget, 60), 0.0, []
    for wait in waits:
        now += wait
        deaths.append(now)
        assert tested.spend(now) == (sum(now - death < 60 for death in deaths) <= budget)


def test_pauses_grow_to_a_bound_and_end_with_the_window() -> None:
    budget = RestartBudget(100, 60)
    pauses = []
    for _ in range(10):
        budget.spend(0)
        pauses.append(budget.pause_s())
    assert pauses[:4] == [0.0, 0.1, 0.2, 0.4]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0
    budget.spend(60)
    assert budget.pause_s() == 0.0


def hand_overs(hand_over: HandOver, until_s: float, step_s: float = 0.5) -> list[float]:
    times = [n * step_s for n in range(int(until_s / step_s) + 1)]
    return [s for s in times if hand_over.due(s)]


def test_it_hands_over_after_the_first_wait_and_then_waits_twice_as_long() -> None:
    assert hand_overs(HandOver(10, 60), 150) == [10, 30, 70, 130]


def test_the_wait_has_a_bound_and_stays_there() -> None:
    times = hand_overs(HandOver(10, 40), 120)
    assert [later - earlier for earlier, later in pairwise(times)] == [20, 40, 40]


def test_a_reachable_database_starts_over() -> None:
    hand_over = HandOver(10, 60)
    assert hand_over.due(10)
    assert not hand_over.due(0)
    assert hand_overs(hand_over, 35) == [10, 30]


def test_an_outage_that_began_anew_unseen_starts_over() -> None:
    hand_over = HandOver(10, 60)
    assert hand_over.due(50)
    assert not hand_over.due(5)
    assert hand_over.due(10)


def test_it_is_never_due_while_the_database_is_reachable() -> None:
    assert not HandOver(0, 60).due(0)
