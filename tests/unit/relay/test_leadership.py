"""When a leader without its database lets another harvester try."""

from __future__ import annotations

from itertools import pairwise

from harvester.relay.core.leadership import HandOver


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
