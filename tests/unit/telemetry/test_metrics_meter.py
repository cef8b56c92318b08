"""Meter and RateHistory: times are arguments, so nothing here waits."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from harvester.events import MeterRead
from harvester.telemetry.metrics import Meter, RateHistory

START = datetime(2025, 3, 14, tzinfo=UTC)
STEPS = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 8_000)), max_size=60)  # records, ms later


def a_meter() -> Meter:
    return Meter("relay", START, 5.0, started=100.0)


def test_nothing_is_read_before_the_interval_is_over() -> None:
    meter = a_meter()
    assert meter.add(10, 102.0) is None
    assert meter.add(10, 104.999) is None


def test_a_reading_covers_the_interval_and_the_whole() -> None:
    meter = a_meter()
    meter.add(100, 103.0)
    assert meter.add(100, 105.0) == MeterRead("relay", START.timestamp(), 200, 40.0, 200, 40.0)
    assert meter.add(50, 109.0) is None
    assert meter.add(50, 115.0) == MeterRead("relay", START.timestamp(), 300, 20.0, 100, 10.0)


def test_without_acknowledgements_there_is_no_reading() -> None:
    meter = a_meter()
    assert meter.add(0, 200.0) is None
    assert meter.add(1, 200.0) == MeterRead("relay", START.timestamp(), 1, 0.01, 1, 0.01)


def test_the_clock_may_be_unix_time() -> None:
    start = START.timestamp()
    assert Meter("relay", START, 1.0).add(4, start + 2) == MeterRead("relay", start, 4, 2.0, 4, 2.0)


def test_no_time_passed_is_no_division() -> None:
    assert Meter("relay", START, 0.0, started=5.0).add(3, 5.0) == MeterRead("relay", START.timestamp(), 3, 0.0, 3, 0.0)


@given(STEPS)
def test_readings_keep_their_distance_and_account_for_every_record(steps: list[tuple[int, int]]) -> None:
    meter, now, last_read, total, since = a_meter(), 100.0, 100.0, 0, 0
    for count, later_ms in steps:
        now += later_ms / 1_000
        total, since = total + count, since + count
        reading = meter.add(count, now)
        assert (reading is not None) == (count > 0 and now - last_read >= 5.0)
        if reading:
            assert (reading.total_count, reading.interval_count) == (total, since)
            last_read, since = now, 0


def test_the_running_second_is_not_shown() -> None:
    history = RateHistory(10.0)
    history.add(7, 10.9)
    assert history.rates(10.99) == ()
    history.add(5, 11.0)
    assert history.rates(11.5) == (7.0,)
    assert history.rates(14.0) == (7.0, 5.0, 0.0, 0.0)


def test_the_history_forgets_what_is_older_than_a_minute() -> None:
    history = RateHistory(0.0)
    history.add(9, 0.5)
    assert history.rates(60.0) == (9.0, *(0.0,) * 59)
    assert history.rates(61.0) == (0.0,) * 60


def test_the_rate_is_a_mean_of_the_last_complete_seconds() -> None:
    history = RateHistory(0.0)
    assert history.rate(0.5) == 0.0
    history.add(100, 0.1)
    assert history.rate(1.0) == 100.0
    history.add(200, 1.1)
    assert history.rate(2.9) == 150.0
    assert history.rate(60.0) == 0.0


def test_a_clock_that_runs_back_counts_as_the_latest_second() -> None:
    history = RateHistory(10.0)
    history.add(1, 12.0)
    history.add(1, 11.0)
    assert history.rates(13.0) == (0.0, 0.0, 2.0)


@given(STEPS)
def test_the_history_is_what_a_count_by_second_says(steps: list[tuple[int, int]]) -> None:
    history, now_ms, by_second = RateHistory(0.0), 0, dict[int, int]()
    for count, later_ms in steps:
        now_ms += later_ms
        history.add(count, now_ms / 1_000)
        by_second[now_ms // 1_000] = by_second.get(now_ms // 1_000, 0) + count
    end = now_ms // 1_000
    expected = tuple(float(by_second.get(second, 0)) for second in range(max(0, end - 60), end))
    assert history.rates(now_ms / 1_000) == expected
