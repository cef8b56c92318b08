"""The table of shards: which columns and which shards fit, and a word about those that do not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import ShardState, ShardStatus
from harvester_cli.dashboard.figures import COUNT_WIDTH, short_count
from harvester_cli.dashboard.lines import fit

_STATE_STYLES = {ShardState.STARTING: "yellow", ShardState.READY: "green", ShardState.DEAD: "bold red"}
_MAX_GAP = 3


@dataclass(frozen=True, slots=True)
class _Column:
    """`rank`: the higher, the sooner it goes when the terminal is narrow."""

    title: str
    width: int
    rank: int
    cell: Callable[[ShardStatus], str]


_COLUMNS = (
    _Column("#", 2, 0, lambda shard: str(shard.index)),
    _Column("state", 8, 0, lambda shard: _state(shard.state)),
    _Column("pid", 7, 5, lambda shard: "-" if shard.pid is None else str(shard.pid)),
    _Column("rate/s", COUNT_WIDTH, 0, lambda shard: short_count(shard.rate_per_s)),
    _Column("queued", COUNT_WIDTH, 1, lambda shard: short_count(shard.queued)),
    _Column("in flight", 9, 1, lambda shard: short_count(shard.in_flight)),
    _Column("parked", COUNT_WIDTH, 4, lambda shard: short_count(shard.parked)),
    _Column("retries", 7, 3, lambda shard: short_count(shard.retries)),
    _Column("errors", COUNT_WIDTH, 2, lambda shard: short_count(shard.errors)),
    _Column("cpu", 5, 4, lambda shard: "-" if shard.cpu_percent is None else f"{shard.cpu_percent:.0f}%"),
    _Column("restarts", 8, 6, lambda shard: short_count(shard.restarts)),
    _Column("delivered", 9, 7, lambda shard: short_count(shard.delivered)),
    _Column("quarantined", 11, 7, lambda shard: short_count(shard.quarantined)),
)


def table(shards: Sequence[ShardStatus], width: int, rows: int, *, ascii_only: bool = False) -> list[Text]:
    """The heading and at most `rows` lines under it; the last of them counts the shards that are not shown.

    Where not all fit, shards that are not ready come first: they are what one looks for.
    """
    columns = _columns_for(width)
    gap = _gap(columns, width)
    lines = [_line([(column.title, "bold") for column in columns], columns, gap)]
    shown, hidden = _split(shards, rows)
    for shard in shown:
        styles = [_STATE_STYLES[shard.state] if column.title == "state" else "" for column in columns]
        cells = [column.cell(shard) for column in columns]
        lines.append(_line(list(zip(cells, styles, strict=True)), columns, gap))
    if not shards:
        lines.append(Text("no shard is running", style="dim"))
    elif hidden and rows > 0:
        lines.append(Text(_about(hidden, ascii_only=ascii_only), style="dim"))
    return [fit(line, width, ascii_only=ascii_only) for line in lines[: rows + 1]]


def figures(shard: ShardStatus) -> list[tuple[str, str]]:
    """All that is known of one, as (heading, value)."""
    return [(column.title, column.cell(shard)) for column in _COLUMNS]


def in_words(shards: Sequence[ShardStatus]) -> str:
    """`8: 7 ready, 1 DEAD`, in the order of ShardState."""
    counts = [(state, sum(shard.state is state for shard in shards)) for state in ShardState]
    parts = ", ".join(f"{count} {_state(state)}" for state, count in counts if count)
    return f"{len(shards)}: {parts}" if parts else "none"


def _state(state: ShardState) -> str:
    # In capitals, so that it stands out where there is no colour.
    return "DEAD" if state is ShardState.DEAD else state.value


def _columns_for(width: int) -> list[_Column]:
    chosen = list(_COLUMNS)
    while len(chosen) > 1 and _needed(chosen) > width:
        worst = max(column.rank for column in chosen)
        last = max(at for at, column in enumerate(chosen) if column.rank == worst)
        del chosen[last]
    return chosen


def _needed(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def _gap(columns: Sequence[_Column], width: int) -> int:
    if len(columns) < 2:
        return 1
    spare = width - sum(column.width for column in columns)
    return max(1, min(_MAX_GAP, spare // (len(columns) - 1)))


def _line(cells: Sequence[tuple[str, str]], columns: Sequence[_Column], gap: int) -> Text:
    line = Text()
    for at, ((text, style), column) in enumerate(zip(cells, columns, strict=True)):
        padded = text.ljust(column.width) if column.title == "state" else text.rjust(column.width)
        line.append(" " * gap if at else "").append(padded, style=style or None)
    line.rstrip()
    return line


def _split(shards: Sequence[ShardStatus], rows: int) -> tuple[list[ShardStatus], list[ShardStatus]]:
    if len(shards) <= rows:
        return list(shards), []
    room = max(rows - 1, 0)
    by_need = sorted(shards, key=lambda shard: (shard.state is ShardState.READY, shard.index))
    chosen = {shard.index for shard in by_need[:room]}
    return [s for s in shards if s.index in chosen], [s for s in shards if s.index not in chosen]


def _about(hidden: Sequence[ShardStatus], *, ascii_only: bool) -> str:
    dots = "..." if ascii_only else "…"
    rate = short_count(sum(shard.rate_per_s for shard in hidden))
    noun = "shard" if len(hidden) == 1 else "shards"
    return f"{dots} {len(hidden)} more {noun} not shown ({in_words(hidden).partition(': ')[2]}; {rate}/s)"
