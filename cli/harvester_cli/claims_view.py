"""Claims as JSON, as a table, and as a screen. Pure: rows in, plain values or renderables out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harvester_cli.dashboard.figures import duration, one_line

if TYPE_CHECKING:
    from rich.text import Text

    from harvester.coordination.overview import Row

_STYLES = {"fresh": "green", "unknown": "yellow", "stale": "bold red", "free": "bold red"}
_GAP = "  "


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[Row], str]
    right: bool = False


_COLUMNS = (
    _Column("group", lambda row: one_line(row.place.group)),
    _Column("topic", lambda row: one_line(row.place.topic)),
    _Column("#", lambda row: str(row.place.partition), right=True),
    _Column("state", lambda row: row.freshness.value if row.certain else f"{row.freshness.value}?"),
    _Column("age", lambda row: "-" if row.age_s is None else duration(row.age_s), right=True),
    _Column("last offset", lambda row: _number(row.last_offset), right=True),
    _Column("lag", lambda row: _number(row.lag), right=True),
    _Column("generation", lambda row: _number(row.generation), right=True),
    _Column("client", lambda row: "-" if row.holder is None else one_line(row.holder.id)),
)


def as_json(row: Row) -> dict[str, Any]:
    """The keys are a public interface."""
    return {
        "group": row.place.group,
        "topic": row.place.topic,
        "partition": row.place.partition,
        "state": row.freshness.value,
        "certain": row.certain,
        "client": None if row.holder is None else row.holder.id,
        "instance": None if row.holder is None else row.holder.instance,
        "age_s": row.age_s,
        "generation": row.generation,
        "last_offset": row.last_offset,
        "lag": row.lag,
    }


def summary(rows: Sequence[Row]) -> str:
    """`32 partitions, 8 clients (4 each); 30 fresh, 2 free; lag 1,234`."""
    if not rows:
        return "nothing was ever claimed"
    counts = Counter(row.holder.id for row in rows if row.holder is not None)
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    shares = f" ({least if least == most else f'{least} to {most}'} each)" if counts else ""
    states = Counter(row.freshness.value for row in rows)
    found = ", ".join(f"{states[state]:,} {state}" for state in _STYLES if states[state])
    lag = sum(row.lag or 0 for row in rows)
    return f"{_some(len(rows), 'partition')}, {_some(len(counts), 'client')}{shares}; {found}; lag {lag:,}"


def table(rows: Sequence[Row], width: int, *, ascii_only: bool = False) -> list[Text]:
    """A heading and one line a row, each of at most `width` cells. The group is left out where there is only one."""
    from rich.text import Text

    from harvester_cli.dashboard.lines import fit

    one_group = len({row.place.group for row in rows}) < 2
    columns = _COLUMNS[1:] if one_group else _COLUMNS
    cells = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(Text(line[at]).cell_len for line in cells) for at in range(len(columns))]
    lines = []
    for line, row in zip(cells, [None, *rows], strict=True):
        text = Text()
        for column, cell, cell_width in zip(columns, line, widths, strict=True):
            style = "bold" if row is None else _STYLES[row.freshness.value] if column.title == "state" else ""
            blanks = " " * (cell_width - Text(cell).cell_len)
            text.append(blanks if column.right else "").append(cell, style=style or None)
            text.append("" if column.right else blanks).append(_GAP)
        text.rstrip()
        lines.append(fit(text, width, ascii_only=ascii_only))
    return lines


def screen(rows: Sequence[Row], title: str, clock: str, width: int, height: int, *, ascii_only: bool = False) -> Text:
    """`height` lines. Where not all rows fit, those stay that are not fresh, and the last line counts the others."""
    from rich.text import Text

    from harvester_cli.dashboard.lines import fit, rule

    room = max(height - 3, 0)
    shown = list(rows)
    if len(shown) > room:
        shown = sorted(shown, key=lambda row: (row.freshness.value == "fresh", row.place))[: max(room - 1, 0)]
        shown.sort(key=lambda row: row.place)
    lines = [
        rule(one_line(title), width, notes=[clock], ascii_only=ascii_only),
        fit(Text(summary(rows)), width, ascii_only=ascii_only),
        *table(shown, width, ascii_only=ascii_only),
    ]
    if len(shown) < len(rows):
        lines.append(fit(Text(f"and {len(rows) - len(shown):,} more", style="dim"), width, ascii_only=ascii_only))
    lines.extend(Text() for _ in range(height - len(lines)))
    drawn = Text("\n").join(lines[: max(height, 0)])
    drawn.no_wrap, drawn.overflow, drawn.end = True, "crop", ""
    return drawn


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _some(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
