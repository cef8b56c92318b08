"""The time between the records of the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.coordination.core.fair_share import LogTime


def test_nothing_read_no_time() -> None:
    assert LogTime().now_ms(1e6) == 0


def test_it_goes_on_after_the_last_record() -> None:
    time = LogTime()
    time.read(0, 5_000, 100.0)
    assert time.now_ms(100.0) == 5_000
    assert time.now_ms(101.5) == 6_500


def test_the_partition_that_tells_most_counts() -> None:
    time = LogTime()
    time.read(0, 5_000, 100.0)
    time.read(1, 9_000, 100.5)
    assert time.now_ms(101.0) == 9_500
    time.read(0, 9_750, 101.0)
    assert time.now_ms(101.0) == 9_750


@given(
    st.integers(-(10**7), 10**7),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=9),
)
def test_it_is_never_ahead_of_the_brokers_and_as_late_as_the_quickest_reading(
    skew_ms: int, records: list[tuple[int, int, int]]
) -> None:
    """Brokers with the same clock, a local one that is wrong by anything, readings that come later than appends."""
    time = LogTime()
    newest: dict[int, int] = {}
    appended = sorted(records, key=lambda record: record[1])
    for partition, at_ms, late_ms in appended:
        time.read(partition, 10**8 + at_ms, (10**8 + at_ms + late_ms + skew_ms) / 1000)
        newest[partition] = late_ms
    true_ms = 10**8 + appended[-1][1] + 10**6
    estimate_ms = time.now_ms((true_ms + skew_ms) / 1000)
    assert true_ms - min(newest.values()) - 1 <= estimate_ms <= true_ms + 1
