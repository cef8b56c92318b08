"""When a reader of the log is taken to stand still."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.coordination.log import Standstill

LIMIT_S = 2.0


def test_what_is_there_and_not_read() -> None:
    still = Standstill[int](LIMIT_S)
    still.begin({0: 10, 1: 0})
    assert not still.is_there(0, 10, 100.0)
    assert not still.is_there(0, 11, 102.0)
    assert not still.is_there(1, 0, 102.1), "each partition for itself"
    assert still.is_there(0, 12, 102.1)


def test_a_reader_that_moves_is_only_slow() -> None:
    still = Standstill[int](LIMIT_S)
    still.begin({0: 10})
    assert not still.is_there(0, 30, 100.0)
    still.read(0, 10, 101.9)
    assert not still.is_there(0, 31, 103.9)
    assert still.is_there(0, 32, 104.0)


def test_who_begins_anew_is_given_time() -> None:
    still = Standstill[int](LIMIT_S)
    still.begin({0: 10})
    assert not still.is_there(0, 10, 100.0)
    still.begin(still.positions)
    assert not still.is_there(0, 11, 110.0)
    assert still.is_there(0, 12, 112.1)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, LIMIT_S)), min_size=1))
def test_no_reader_that_reads_all_within_the_limit_stands_still(messages: list[tuple[float, float]]) -> None:
    """Each record is there so long after the one before it was read, and is read so long after."""
    still, now = Standstill[int](LIMIT_S), 0.0
    still.begin({0: 0})
    for offset, (pause_s, delay_s) in enumerate(messages):
        now += pause_s
        assert not still.is_there(0, offset, now)
        now += delay_s
        still.read(0, offset, now)
        assert still.positions == {0: offset + 1}
