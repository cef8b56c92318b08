"""Renders a Status for a terminal of a given size, in exactly that many lines. Pure.

From the top: name and state, what is wrong, throughput of the last minute, load and latency, the shards, the last
events. Everything is expressed in words and numbers; colour only repeats it. 80 columns by 24 lines hold eight shards
and five events. With less space, the bottom goes first; with more, the chart grows, more columns of the shards appear,
and more events are shown.

Between numbers and events is the table of shards or, instead, one shard, one key, or the quarantine. The columns and
shards of the table that fit are shown; the others are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import Backlog, ShardState, ShardStatus, State, Status, awaited
from harvester_cli.dashboard.figures import (
    COUNT_WIDTH,
    chart,
    counted,
    duration,
    gauge,
    milliseconds,
    one_line,
    short_count,
)
from harvester_cli.dashboard.lines import OneKey, ends, fit, key_lines, rule


@dataclass(frozen=True, slots=True)
class OneShard:
    """All values of the shard with this index, and the events that mention it."""

    index: int


@dataclass(frozen=True, slots=True)
class QuarantineMeter:
    """The number of records in quarantine, and the shards that put them there."""


Detail = OneShard | OneKey | QuarantineMeter


@dataclass(frozen=True, slots=True)
class Block:
    """A rule's title and notes, the number of lines wanted below the first, and a function that draws up to that
    many.
    """

    title: str
    notes: Sequence[str]
    lines_wanted: int
    draw: Callable[[int], list[Text]]


def block(status: Status, detail: Detail | None, width: int) -> Block:
    """The lower block; its `draw(n)` returns one line and at most `n` more."""
    if detail is None:
        shards = status.shards
        return Block("shards", [in_words(shards)], len(shards), lambda rows: table(shards, width, rows))
    match detail:
        case OneShard(index):
            title, notes, lines = _one_shard(status, index)
        case OneKey():
            title, notes, lines = "key", ["esc: the shards"], key_lines(detail)
        case QuarantineMeter():
            title, notes, lines = _quarantine(status)
    fitted = [fit(line, width) for line in lines]
    return Block(title, notes, len(fitted) - 1, lambda rows: fitted[: rows + 1])


def _one_shard(status: Status, index: int) -> tuple[str, list[str], list[Text]]:
    title, notes = f"shard {index}", [f"one of {len(status.shards)}; esc: all"]
    shard = next((shard for shard in status.shards if shard.index == index), None)
    if shard is None:
        return title, notes, [Text(f"there is no shard {index}", style="dim")]
    pairs = [(name, value) for name, value in figures(shard) if name != "#"]
    lines = []
    for at in range(0, len(pairs), 2):
        cells = "   ".join(f"{name:<12}{value:>10}" for name, value in pairs[at : at + 2])
        lines.append(Text(cells))
    total = sum(other.rate_per_s for other in status.shards)
    if total > 0:
        lines.append(Text(f"handles {shard.rate_per_s / total:.0%} of this harvester's records"))
    named = re.compile(rf"\bshard {index}\b")
    about = [event for event in status.events if named.search(event.text)]
    lines.extend(Text(f"{event.at:%H:%M:%S}  {one_line(event.text)}", style="dim") for event in about[-3:])
    return title, notes, lines


def _quarantine(status: Status) -> tuple[str, list[str], list[Text]]:
    standing = status.backlog.quarantine if status.backlog is not None else None
    known = "unknown" if standing is None else f"{standing:,}"
    lines = [
        Text(f"in the quarantine table now: {known}"),
        Text(f"put there by this process since it started: {status.quarantined:,}"),
    ]
    by_shard = [shard for shard in status.shards if shard.quarantined]
    if by_shard:
        listed = ", ".join(f"shard {shard.index}: {short_count(shard.quarantined)}" for shard in by_shard)
        lines.append(Text(listed))
    parked = [shard for shard in status.shards if shard.parked]
    if parked:
        listed = ", ".join(f"shard {shard.index}: {short_count(shard.parked)}" for shard in parked)
        lines.append(Text(f"keys that wait for a retry, and may follow: {listed}"))
    lines.append(Text("`harvester dead list` lists them with their errors; `harvester dead redrive` puts them back"))
    return "quarantine", ["esc: the shards"], lines


_STATE_STYLES = {ShardState.STARTING: "yellow", ShardState.READY: "green", ShardState.DEAD: "bold red"}
_MAX_GAP = 3


@dataclass(frozen=True, slots=True)
class _Column:
    """`rank`: columns with a higher rank are dropped first on a narrow terminal."""

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


def table(shards: Sequence[ShardStatus], width: int, rows: int) -> list[Text]:
    """The heading and at most `rows` lines under it; the last one counts shards that are not shown.

    If not all fit, shards that are not ready come first: they are of most interest.
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
        lines.append(Text(_about(hidden), style="dim"))
    return [fit(line, width) for line in lines[: rows + 1]]


def figures(shard: ShardStatus) -> list[tuple[str, str]]:
    """All known values of one shard, as (heading, value)."""
    return [(column.title, column.cell(shard)) for column in _COLUMNS]


def in_words(shards: Sequence[ShardStatus]) -> str:
    """`8: 7 ready, 1 DEAD`, in the order of ShardState."""
    counts = [(state, sum(shard.state is state for shard in shards)) for state in ShardState]
    parts = ", ".join(f"{count} {_state(state)}" for state, count in counts if count)
    return f"{len(shards)}: {parts}" if parts else "none"


def _state(state: ShardState) -> str:
    # In capitals, to stand out without colour.
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


def _about(hidden: Sequence[ShardStatus]) -> str:
    rate = short_count(sum(shard.rate_per_s for shard in hidden))
    return f"… {counted(len(hidden), 'more shard')} not shown ({in_words(hidden).partition(': ')[2]}; {rate}/s)"


_FIXED_LINES = 9  # all but chart, shards and events
_EVENTS_BLOCK = 2  # a rule and one event: always reserved for events
_EVENTS_WANTED = 11  # a rule and ten events, before the chart may grow
_MAX_CHART_LINES = 5
_RATE_CELLS, _PEAK_CELLS = 9, 11  # left and right of the chart
_CHART_SECONDS = 60

_RENDER_STATE_STYLES = {
    State.LEADING: "bold green",
    State.STANDBY: "bold blue",
    State.FENCED: "bold red",
    State.FAILED: "bold red",
    State.STOPPED: "bold",
}
_TRANSIENT_STYLE = "bold yellow"

_IN_WORDS = {
    State.CREATED: "not started yet",
    State.STARTING: "connecting and starting the shards",
    State.STANDBY: "another process leads; this one is ready to take over",
    State.LEADING: "all is well",
    State.REMARKING: "queues were dropped; waiting for the shards' answers before marking again",
    State.SUSPENDED: "leader of its group; the term is lent to a bulk drain, and will be taken back when that ends",
    State.PAUSED: "leading, but marks nothing until resumed; what is on the wire is finished",
    State.DRAINING: "finishing what is on the wire; nothing new is marked",
    State.FENCED: "trust expired, nothing is sent; leads again once Kafka confirms it",
    State.STOPPED: "the relay has ended",
    State.FAILED: "the relay ended with an error",
}


@dataclass(frozen=True, slots=True)
class OffScreenOutput:
    """Process output kept off the screen: the number of lines, and their file."""

    lines: int
    path: str


def render(
    status: Status,
    width: int,
    height: int,
    kept: OffScreenOutput | None = None,
    *,
    detail: Detail | None = None,
    silent: bool = False,
) -> Text:
    """`height` lines of at most `width` cells each, without a line break after the last.

    `detail` takes the place of the table of shards. `silent`: the status is the last one received.
    """
    details = block(status, detail, width)
    detail_lines = _detail_lines(details.lines_wanted, height)
    chart_lines = _chart_lines(detail_lines, height)
    lines = [
        *_header(status, width, silent=silent),
        rule("throughput", width, notes=[f"last {_chart_seconds(width)} s"]),
        *_throughput(status, width, chart_lines),
        *_figures(status, width),
        rule(details.title, width, notes=details.notes),
        *details.draw(detail_lines),
    ]
    room = height - len(lines)
    if room >= _EVENTS_BLOCK:
        lines.append(rule("events", width, notes=_render_about(kept)))
        lines.extend(_events(status, width, room - 1))
    lines.extend(Text() for _ in range(height - len(lines)))
    screen = Text("\n").join(fit(line, width) for line in lines[: max(height, 0)])
    screen.no_wrap, screen.overflow, screen.end = True, "crop", ""
    return screen


def _detail_lines(wanted: int, height: int) -> int:
    room = height - _FIXED_LINES - 1
    if room > _EVENTS_BLOCK + 1:
        room -= _EVENTS_BLOCK
    return max(1, min(wanted, room))


def _chart_lines(detail_lines: int, height: int) -> int:
    spare = height - _FIXED_LINES - detail_lines - _EVENTS_WANTED
    return max(1, min(_MAX_CHART_LINES, spare))


def _header(status: Status, width: int, *, silent: bool) -> list[Text]:
    name = fit(Text(one_line(status.name), style="bold"), width // 2)
    state = (status.state.value.upper(), _RENDER_STATE_STYLES.get(status.state, _TRANSIENT_STYLE))
    since = f" for {duration((status.at - status.state_since_at).total_seconds())}"
    if status.paused_since_at is not None and status.state is not State.PAUSED:
        since += f", paused for {duration((status.at - status.paused_since_at).total_seconds())}"
    up = f"up {duration((status.at - status.started_at).total_seconds())}"
    clock = f"{status.at:%H:%M:%S} UTC"
    leader = "no leader id" if status.leader_id is None else f"leader {str(status.leader_id)[:8]}"
    term = "no term" if status.term is None else f"term {status.term}"
    problem = one_line(status.problem or "")
    clocks = [Text(f"{up}  {clock}"), Text(up)]
    if silent:  # its state and time are no longer known
        state, since, clocks = ("NO ANSWER", "bold red"), f" since {clock}", []
    return [
        ends(Text.assemble(name, "  ", state, since), clocks, width),
        ends(Text(f"outbox {one_line(status.outbox)}"), [Text(f"{term}  {leader}"), Text(term)], width),
        Text(f"! {problem}", style="bold red") if problem else Text(_in_words(status), style="dim"),
    ]


def _in_words(status: Status) -> str:
    waits = awaited(status)
    if waits is not None:
        return one_line(waits)
    if status.state is State.STANDBY and status.paused_since_at is not None:
        return "another process leads; this one would take over, but mark nothing until resumed"
    standing = status.backlog.quarantine if status.backlog is not None else None
    if status.state is State.LEADING and standing:
        records = "record is" if standing == 1 else "records are"
        return f"publishes; {standing:,} {records} in quarantine: harvester dead list"
    if status.state is State.LEADING and status.backlog is not None and status.backlog.advice is not None:
        return f"publishes; {status.backlog.advice}"
    return _IN_WORDS[status.state]


def _chart_seconds(width: int) -> int:
    return max(0, min(_CHART_SECONDS, width - _RATE_CELLS - _PEAK_CELLS))


def _throughput(status: Status, width: int, lines: int) -> list[Text]:
    seconds = _chart_seconds(width)
    recent = status.rate_history[-seconds:] if seconds else ()
    cells = 2 if width - _RATE_CELLS - _PEAK_CELLS >= 2 * _CHART_SECONDS else 1  # cells per second
    rates = [rate for rate in recent for _ in range(cells)]
    bars = chart(rates, seconds * cells, lines)
    rate = f"{short_count(status.rate_per_s)}/s".rjust(_RATE_CELLS - 1)
    peak = f" max {short_count(max(recent, default=0.0))}"
    drawn = []
    for at, bar in enumerate(bars):
        last, first = at == len(bars) - 1, at == 0
        drawn.append(
            Text.assemble(
                (rate if last else " " * len(rate), "bold"),
                " ",
                (bar, "cyan"),
                peak if first else "",
            )
        )
    return drawn


def _figures(status: Status, width: int) -> list[Text]:
    counts = f" {status.in_flight:,} / {status.max_in_flight:,}"
    queued = f"queued {status.queued:,}"
    bar = max(5, min(40, width - len("in flight [] ") - len(counts) - len(queued) - 2))
    in_flight = Text.assemble(
        "in flight [",
        (gauge(status.in_flight, status.max_in_flight, bar), "cyan"),
        f"]{counts}",
    )
    latency = f"p50 {milliseconds(status.p50_ms)}  p99 {milliseconds(status.p99_ms)}"
    quarantined = Text.assemble("quarantined ", (f"{status.quarantined:,}", "bold red" if status.quarantined else ""))
    delivered = Text(f"delivered {status.delivered:,}")
    return [
        ends(in_flight, [Text(queued)], width),
        ends(Text(_backlog(status.backlog)), [Text(f"latency {latency}"), Text(latency)], width),
        ends(delivered, [quarantined], width),
    ]


def _backlog(backlog: Backlog | None) -> str:
    if backlog is None:
        return "backlog unknown"
    if not backlog.records and not backlog.capped:
        return "backlog empty"
    oldest = "" if backlog.oldest_age_s is None else f", oldest {duration(backlog.oldest_age_s)}"
    return f"backlog {backlog.records:,}{'+' if backlog.capped else ''}{oldest}"


def _render_about(kept: OffScreenOutput | None) -> list[str]:
    if kept is None or not kept.lines:
        return []
    count = counted(kept.lines, "log line")
    return [f"{count} in {kept.path}", f"{count} kept"]


def _events(status: Status, width: int, room: int) -> Sequence[Text]:
    if not status.events:
        return [Text("none yet", style="dim")]
    return [
        fit(Text.assemble((f"{event.at:%H:%M:%S}", "dim"), f"  {one_line(event.text)}"), width)
        for event in status.events[-room:]
    ]
