"""Formats numbers for a dashboard: short, of limited width, always with their unit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

COUNT_WIDTH = 6  # the most cells that short_count needs, below 10**15

_SCALES = ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G"), (1_000_000_000_000, "T"))
_BARS, _ZERO = "▁▂▃▄▅▆▇█", "·"


def short_count(number: float) -> str:
    """`1,234` up to 99,999; above, three significant digits with k, M, G or T."""
    whole = round(number)
    if whole < 100_000:
        return f"{whole:,}"
    for unit, letter in _SCALES:
        scaled = whole / unit
        if round(scaled) < 1_000 or letter == "T":
            # The number of decimals follows from the rounded value: 9.996 is 10.0, not 10.00.
            decimals = 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0
            return f"{scaled:.{decimals}f}{letter}"
    raise AssertionError("the last scale fits every number")


def counted(number: int, noun: str) -> str:
    """`1 record`, `1,234 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """At most two units: `0.4 s`, `59 s`, `4m 02s`, `3h 05m`, `12d 04h`; below zero (a clock step) `0.0 s`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, above, letter, below in ((60, 3_600, "m", "s"), (3_600, 86_400, "h", "m")):
        if whole < above:
            return f"{whole // unit}{letter} {whole % unit * 60 // unit:02}{below}"
    return f"{whole // 86_400}d {whole % 86_400 // 3_600:02}h"


def milliseconds(value: float | None) -> str:
    """`0.12 ms`, `12.8 ms`, `980 ms`, then seconds and larger units; `-` for None."""
    if value is None:
        return "-"
    if round(value) >= 1_000:
        return duration(value / 1_000)
    decimals = 2 if round(value, 2) < 1 else 1 if round(value, 1) < 100 else 0
    return f"{max(value, 0.0):.{decimals}f} ms"


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Bars with the newest value at the right end; `height` lines, top first, each `width` cells.

    Scaled to the highest value shown. A value above zero shows at least the lowest bar, and zero shows a dot, so that a
    trickle differs from nothing, and nothing from a period without data.
    """
    shown = list(values)[-width:] if width > 0 else []
    top = max(shown, default=0.0)
    steps = len(_BARS) * height
    levels = [max(1, round(value / top * steps)) if top > 0 and value > 0 else 0 for value in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        floor = row * len(_BARS)
        below = _ZERO if row == 0 else " "
        cells = "".join(_BARS[min(level - floor, len(_BARS)) - 1] if level > floor else below for level in levels)
        lines.append(cells.rjust(max(width, 0)))
    return lines


def gauge(part: float, whole: float, width: int) -> str:
    """A bar of `width` cells, filled in proportion to `part` of `whole`; anything above zero fills at least one
    cell.
    """
    if whole <= 0 or part <= 0:
        return "░" * width
    filled = min(width, max(1, int(width * part / whole)))
    return "█" * filled + "░" * (width - filled)


def one_line(text: str) -> str:
    """Text that cannot move the cursor: everything unprintable, including line breaks, becomes a blank."""
    return "".join(character if character.isprintable() else " " for character in text)
