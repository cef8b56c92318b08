"""How many shards are put to use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.relay.core.dispatcher import Spread


def test_it_grows_at_once_and_shrinks_by_one_at_a_time() -> None:
    spread = Spread(8, 20_000, 200, most=8)
    assert spread.active == 1
    spread.grow(199)
    assert spread.active == 1
    spread.grow(900)
    assert spread.active == 5
    spread.grow(0)
    assert spread.active == 5
    found = []
    for _ in range(6):
        spread.shrink(150)
        found.append(spread.active)
    assert found == [4, 3, 2, 2, 2, 2]


def test_what_goes_up_and_down_keeps_its_shards() -> None:
    spread = Spread(8, 20_000, 200, most=4)
    spread.grow(700)
    for in_flight in (350, 650, 400, 310):
        spread.shrink(in_flight)
        assert spread.active == 4
    spread.shrink(290)
    assert spread.active == 3


def test_where_little_may_be_in_flight_half_of_it_is_enough_for_all() -> None:
    spread = Spread(8, 160, 200, most=8)
    assert (spread.wanted(9), spread.wanted(80)) == (1, 8)


def test_no_more_than_the_cores_can_carry() -> None:
    assert Spread(16, 20_000, 200, most=4).wanted(20_000) == 4


def test_always_all() -> None:
    spread = Spread(8, 20_000, 0, most=4)
    spread.shrink(0)
    assert spread.active == 8
    spread.resize(3)
    assert spread.active == 3


@given(st.integers(1, 64), st.integers(1, 50_000), st.integers(0, 500), st.integers(1, 64), st.integers(0, 60_000))
def test_there_are_always_some_and_never_too_many(
    shards: int, bound: int, records: int, most: int, in_flight: int
) -> None:
    spread = Spread(shards, bound, records, most)
    spread.grow(in_flight)
    assert 1 <= spread.active <= (shards if not records else min(shards, most))
    if records and in_flight >= bound >= 2 * min(shards, most):
        assert spread.active == min(shards, most)
    spread.resize(max(1, shards // 2))
    assert 1 <= spread.active <= max(1, shards // 2)
