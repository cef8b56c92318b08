"""Durations: read, written, and refused with a reason."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.config.durations import format_duration, parse_duration, to_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("100ms", 100),
        ("1.5s", 1500),
        ("5m", 300_000),
        ("2h", 7_200_000),
        (" 10s ", 10_000),
        ("1m30s", 90_000),
        (".5s", 500),
        ("7d", 604_800_000),
        ("1d12h", 129_600_000),
    ],
)
def test_durations_are_read(text: str, ms: int) -> None:
    assert parse_duration(text) == timedelta(milliseconds=ms)
    assert to_ms(parse_duration(text)) == ms


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5", '"5s" or "5ms"'),
        ("0.5", "no unit"),
        ("-5s", "not a duration"),
        ("5 s", "not a duration"),
        ("5S", "not a duration"),
        ("s", "not a duration"),
        ("5sms", "not a duration"),
        ("", "empty"),
        ("0.1us", "finer"),
        ("9" * 40 + "h", "too long"),
        ("1s" * 40, "too long"),
        ("٥s", "not a duration"),
    ],
)
def test_what_is_no_duration_says_why(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(text)
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["100ms", "1.5s", "5m", "2h", "24h", "7d", "25h", "1us", "1.001ms", "61s", "0s"])
def test_durations_are_written_as_a_person_would(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=400)))
def test_durations_round_trip(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value


@given(st.text(max_size=30) | st.from_regex(r"[0-9.]{0,4}(us|ms|s|m|h)?[0-9.]{0,3}(us|ms|s|m|h)?", fullmatch=True))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        value = parse_duration(text)
    except ValueError:
        return
    assert value >= timedelta(0)
    assert parse_duration(format_duration(value)) == value
