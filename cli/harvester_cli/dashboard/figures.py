"""Figures and lines as a dashboard writes them: of bounded width, unit always given; and one key. Pure.

Single lines of an exact width, counted in terminal cells (a wide character takes two).

One key, as the dashboard and `harvester watch --key` tell of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import KeyStatus

COUNT_WIDTH = 6  # cells that short_count needs at most, below 10**15

_SCALES = ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G"), (1_000_000_000_000, "T"))
_BARS, _ZERO = "▁▂▃▄▅▆▇█", "·"
_ASCII_BARS, _ASCII_ZERO = "_:-=+*%#", "."


def short_count(number: float) -> str:
    """`1,234` up to 99,999, three significant digits with k, M, G or T above."""
    whole = round(number)
    if whole < 100_000:
        return f"{whole:,}"
    for unit, letter in _SCALES:
        scaled = whole / unit
        if round(scaled) < 1_000 or letter == "T":
            # How many digits stand after the point follows from the rounded value: 9.996 is 10.0, not 10.00.
            decimals = 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0
            return f"{scaled:.{decimals}f}{letter}"
    raise AssertionError("the last scale takes every number")


def duration(seconds: float) -> str:
    """Two units at most: `0.4 s`, `59 s`, `4m 02s`, `3h 05m`, `12d 04h`; below zero (a clock step) `0.0 s`."""
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
    """`0.12 ms`, `12.8 ms`, `980 ms`, then seconds and more; `-` for None."""
    if value is None:
        return "-"
    if round(value) >= 1_000:
        return duration(value / 1_000)
    decimals = 2 if round(value, 2) < 1 else 1 if round(value, 1) < 100 else 0
    return f"{max(value, 0.0):.{decimals}f} ms"


def chart(values: Sequence[float], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Bars from the newest value at the right end; `height` lines, top first, each `width` cells.

    Scaled to the highest value shown. A value above zero shows at least the lowest bar and zero a dot, so that
    a trickle differs from nothing, and nothing from a time of which nothing is known.
    """
    bars, zero = (_ASCII_BARS, _ASCII_ZERO) if ascii_only else (_BARS, _ZERO)
    shown = list(values)[-width:] if width > 0 else []
    top = max(shown, default=0.0)
    steps = len(bars) * height
    levels = [max(1, round(value / top * steps)) if top > 0 and value > 0 else 0 for value in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        floor = row * len(bars)
        below = zero if row == 0 else " "
        cells = "".join(bars[min(level - floor, len(bars)) - 1] if level > floor else below for level in levels)
        lines.append(cells.rjust(max(width, 0)))
    return lines


def gauge(part: float, whole: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of `width` cells, filled as `part` is of `whole`; anything above zero fills at least one cell."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    if whole <= 0 or part <= 0:
        return empty * width
    filled = min(width, max(1, int(width * part / whole)))
    return full * filled + empty * (width - filled)


def one_line(text: str) -> str:
    """Text that cannot move the cursor: everything unprintable, line breaks too, becomes a blank."""
    return "".join(character if character.isprintable() else " " for character in text)


_GAP = 2


def fit(text: Text, width: int, *, ascii_only: bool = False) -> Text:
    """A copy that takes `width` cells at most; where something had to go, an ellipsis says so."""
    fitted = text.copy()
    if fitted.cell_len <= width:
        return fitted
    if ascii_only and width > 2:
        fitted.truncate(width - 2)
        return fitted.append("..")
    fitted.truncate(max(width, 0), overflow="crop" if ascii_only else "ellipsis")
    return fitted


def ends(left: Text, rights: Sequence[Text], width: int, *, ascii_only: bool = False) -> Text:
    """`left` at the left end and the first of `rights` that fits beside it at the right one; else none of them."""
    for right in rights:
        blanks = width - left.cell_len - right.cell_len
        if blanks >= _GAP:
            return Text.assemble(left, " " * blanks, right)
    return fit(left, width, ascii_only=ascii_only)


def rule(title: str, width: int, *, notes: Sequence[str] = (), ascii_only: bool = False) -> Text:
    """A line across, with a title near its left end and the first of `notes` that fits near its right one."""
    dash = "-" if ascii_only else "─"
    left = Text(f"{dash * 2} {title} ", style="bold")
    for note in notes:
        right = Text(f" {note} {dash * 2}", style="dim")
        middle = width - left.cell_len - right.cell_len
        if middle >= _GAP:
            return Text.assemble(left, (dash * middle, "dim"), right)
    rest = max(width - left.cell_len, 0)
    return fit(Text.assemble(left, (dash * rest, "dim")), width, ascii_only=ascii_only)


@dataclass(frozen=True, slots=True)
class OneKey:
    """What is known of this key: `told` last, or in `trouble` why that cannot be had."""

    key: str
    told: KeyStatus | None = None
    trouble: str | None = None


def key_lines(view: OneKey) -> list[Text]:
    """A line for each thing worth knowing, the key itself first."""
    lines = [Text(one_line(view.key) or "(the empty key)", style="bold")]
    if view.told is not None:
        lines += [Text(one_line(line)) for line in key_words(view.told)]
    if view.trouble is not None:
        lines.append(Text(one_line(view.trouble), style="yellow"))
    elif view.told is None:
        lines.append(Text("asking ...", style="dim"))
    return lines


def key_words(status: KeyStatus) -> list[str]:
    """The same as plain sentences, without the key."""
    said = []
    if not status.leads:
        said.append("this harvester does not lead: only the database tells")
    else:
        said.append(f"shard {status.shard}: {_records(status.under_way)} under way, {status.waiting:,} waiting")
    if status.leads and status.retry_in_s is not None:
        rule = "holds its key" if status.held else "is tried again"
        when = f"in {duration(status.retry_in_s)}" if status.retry_in_s > 0 else "now"
        said.append(f"its first record failed and {rule}; next attempt {when}")
    if status.trouble is not None:
        said.append(f"the database does not tell: {status.trouble}")
    if status.rows is not None:
        oldest = ""
        if status.oldest_id is not None and status.oldest_age_s is not None:
            which = "one of them" if status.capped else "the oldest"
            oldest = f"; {which} is record {status.oldest_id}, {duration(status.oldest_age_s)} old"
        said.append(f"in the outbox: {status.rows:,}{'+' if status.capped else ''}{oldest}")
    if status.quarantined is not None:
        newest = f"; the last: {status.newest_error}" if status.newest_error is not None else ""
        said.append(f"in quarantine: {status.quarantined:,}{newest}")
    return said


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"
