"""Which stored windows may count records of the lake."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.pipeline.windows import reaching

HOUR_US = 3_600_000_000
HOURS = st.integers(-50, 50)


@given(st.sets(HOURS, max_size=8), st.dictionaries(HOURS, st.integers(1, 30 * 60), max_size=8))
def test_windows_reach_into_an_hour_if_they_have_a_moment_of_it(hours: set[int], minutes: dict[int, int]) -> None:
    ends_us = {begin: begin * HOUR_US + length * 60_000_000 for begin, length in minutes.items()}
    assert reaching(ends_us, hours) == {
        begin for begin, end_us in ends_us.items() if hours & set(range(begin, -(-end_us // HOUR_US)))
    }


def test_a_window_that_ends_with_an_hour_has_nothing_of_the_next() -> None:
    assert reaching({0: 2 * HOUR_US, 5: 6 * HOUR_US, 7: 8 * HOUR_US + 1}, {2, 6, 8}) == {7}
