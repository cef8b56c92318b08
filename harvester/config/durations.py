"""Parses and formats durations: `100ms`, `1.5s`, `5m`, `2h`, `7d`, and sums of them: `1m30s`.

Exact: both directions use whole microseconds, the resolution of `timedelta`; nothing is rounded. A bare number is not a
duration, because it is unclear whether 5 means seconds or milliseconds.
"""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

_UNIT_US = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_TERM = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(us|µs|ms|s|m|h|d)", re.ASCII)
_BARE = re.compile(r"[+-]?[0-9]*\.?[0-9]+", re.ASCII)
_MAX_TEXT = 64
FORM = 'a number with a unit (us, ms, s, m, h, d), in quotes: "100ms", "1.5s", "5m", "2h"'


def parse_duration(text: str) -> timedelta:
    """Parse a duration; raises ValueError with a message that explains the format."""
    stripped = text.strip()
    if not stripped:
        raise ValueError("is empty")
    if len(stripped) > _MAX_TEXT:
        raise ValueError("is too long for a duration")
    if _BARE.fullmatch(stripped):
        raise ValueError(f"{stripped} has no unit; write for example {bare_number_hint(stripped)}")
    total = Fraction(0)
    at = 0
    while at < len(stripped):
        term = _TERM.match(stripped, at)
        if not term:
            raise ValueError(f"{stripped!r} is not a duration")
        number, unit = term.groups()
        total += Fraction(number) * _UNIT_US[unit]
        at = term.end()
    if total.denominator != 1:
        raise ValueError(f"{stripped!r} is finer than a microsecond")
    try:
        return timedelta(microseconds=int(total))
    except OverflowError:
        raise ValueError(f"{stripped!r} is too long") from None


def format_duration(value: timedelta) -> str:
    """The shortest exact text in one unit, for zero or more: `2.5s`, `100ms`, `5m`, `2h`, `7d`."""
    us = value // timedelta(microseconds=1)
    if us < 0:
        raise ValueError("a duration cannot be negative")
    # One day is written as 24h, since timeouts are usually expressed in hours.
    if us > _UNIT_US["d"] and us % _UNIT_US["d"] == 0:
        return f"{us // _UNIT_US['d']}d"
    for unit in ("h", "m"):
        if us and us % _UNIT_US[unit] == 0:
            return f"{us // _UNIT_US[unit]}{unit}"
    for unit in ("s", "ms"):
        if us >= _UNIT_US[unit]:
            whole, rest = divmod(us, _UNIT_US[unit])
            digits = len(str(_UNIT_US[unit])) - 1
            decimals = f"{rest:0{digits}d}".rstrip("0")
            return f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"
    return f"{us}us" if us else "0s"


def bare_number_hint(number: object) -> str:
    """The possible meanings of a number without a unit: `"5s" or "5ms"`."""
    return f'"{number}s" or "{number}ms"'


def to_ms(value: timedelta) -> int:
    """Whole milliseconds, rounded down: the form of Kafka options."""
    return value // timedelta(milliseconds=1)
