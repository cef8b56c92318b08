"""How long the marker waits between empty marks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.relay.marker import RetryDelays, idle_wait_s

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
