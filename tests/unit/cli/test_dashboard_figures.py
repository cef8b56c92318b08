"""Numbers as the dashboard writes them."""

from __future__ import annotations

import re

import pytest
from harvester_cli.dashboard.figures import COUNT_WIDTH, chart, duration, gauge, milliseconds, one_line, short_count
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.4, "0"),
        (999, "999"),
        (1_234, "1,234"),
        (99_999, "99,999"),
        (99_999.6, "100k"),
        (123_456, "123k"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (1_234_567, "1.23M"),
        (9_996_000, "10.0M"),
        (12_345_678, "12.3M"),
        (99_960_000, "100M"),
        (7_000_000_000, "7.00G"),
        (7_000_000_000_000, "7.00T"),
    ],
)
def test_short_count(number: float, text: str) -> None:
    assert short_count(number) == text


@given(st.integers(0, 10**15 - 1))
def test_a_short_count_is_short_and_off_by_half_a_percent_at_most(number: int) -> None:
    text = short_count(number)
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1], 1)
    assert len(text) <= COUNT_WIDTH
    assert float(re.sub("[^0-9.]", "", text)) * factor == pytest.approx(number, rel=0.005)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (242, "4m 02s"),
        (3_599.4, "59m 59s"),
        (3_600, "1h 00m"),
        (11_100, "3h 05m"),
        (86_399, "23h 59m"),
        (86_400, "1d 00h"),
        (1_051_200, "12d 04h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (-1, "0.00 ms"),
        (0.123, "0.12 ms"),
        (0.996, "1.0 ms"),
        (12.84, "12.8 ms"),
        (99.97, "100 ms"),
        (227.1, "227 ms"),
        (999.4, "999 ms"),
        (999.6, "1.0 s"),
        (61_000, "1m 01s"),
    ],
)
def test_milliseconds(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


def test_the_chart_tells_unknown_nothing_little_and_much_apart() -> None:
    assert chart([0, 1, 500, 1_000], 6, 1) == ["  ·▁▄█"]


def test_a_taller_chart_stacks_its_bars() -> None:
    assert chart([0, 250, 500, 750, 1_000], 5, 2) == ["   ▄█", "·▄███"]


def test_the_chart_shows_the_newest_values() -> None:
    assert chart([8, 8, 8, 1], 2, 1) == ["█▁"]
    assert chart([1], 0, 1) == [""]


@given(st.lists(st.floats(0, 1e12), max_size=80), st.integers(0, 80), st.integers(1, 6))
def test_a_chart_has_the_size_that_was_asked_for(values: list[float], width: int, height: int) -> None:
    assert [len(line) for line in chart(values, width, height)] == [width] * height


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 10, "░░░░"),
        (1, 10, "█░░░"),
        (5, 10, "██░░"),
        (9, 10, "███░"),
        (10, 10, "████"),
        (12, 10, "████"),
        (3, 0, "░░░░"),
    ],
)
def test_gauge(part: int, whole: int, text: str) -> None:
    assert gauge(part, whole, 4) == text


@given(st.text())
def test_one_line_prints_as_it_stands(text: str) -> None:
    assert one_line(text).isprintable()
    assert len(one_line(text)) == len(text)
