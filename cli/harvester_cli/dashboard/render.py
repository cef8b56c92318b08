"""The dashboard as a pure function: a Status and the size of a terminal in, exactly that many lines out.

From the top: who and in what state, what is wrong, throughput of the last minute, how full and how late it is,
the shards, the last events. All of it is said in words and figures; colour only repeats it. 80 columns by 24
lines hold eight shards and five events. With less, the bottom goes first; with more, the chart grows, further
columns of the shards appear, and more events are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import Backlog, State, Status
from harvester_cli.dashboard.details import Detail, block
from harvester_cli.dashboard.figures import chart, duration, gauge, milliseconds, one_line, short_count
from harvester_cli.dashboard.lines import ends, fit, rule

_FIXED_LINES = 9  # all but chart, shards and events
_EVENTS_BLOCK = 2  # a rule and one event: what shards leave to the events in any case
_EVENTS_WANTED = 11  # a rule and ten events, before the chart may grow
_MAX_CHART_LINES = 5
_RATE_CELLS, _PEAK_CELLS = 9, 11  # left and right of the chart
_CHART_SECONDS = 60

_STATE_STYLES = {
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
    State.SUSPENDED: "leader of its group; the term is lent to a bulk drain, and taken back when that ends",
    State.PAUSED: "leads and marks nothing until it is resumed; what was on the wire is finished",
    State.DRAINING: "finishing what is on the wire; nothing new is marked",
    State.FENCED: "trust ran out, nothing is sent; leads again once Kafka confirms it",
    State.STOPPED: "the relay has ended",
    State.FAILED: "the relay was ended by an error",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Output of the process that was kept off the screen: how many lines, and the file they are in."""

    lines: int
    path: str


def render(
    status: Status,
    width: int,
    height: int,
    *,
    kept: Kept | None = None,
    ascii_only: bool = False,
    detail: Detail | None = None,
) -> Text:
    """`height` lines of at most `width` cells each, without a line break after the last.

    `detail` stands in the place of the table of shards.
    """
    details = block(status, detail, width, ascii_only=ascii_only)
    detail_lines = _detail_lines(details.lines_wanted, height)
    chart_lines = _chart_lines(detail_lines, height)
    lines = [
        *_header(status, width, ascii_only=ascii_only),
        rule("throughput", width, notes=[f"last {_chart_seconds(width)} s"], ascii_only=ascii_only),
        *_throughput(status, width, chart_lines, ascii_only=ascii_only),
        *_figures(status, width, ascii_only=ascii_only),
        rule(details.title, width, notes=details.notes, ascii_only=ascii_only),
        *details.draw(detail_lines),
    ]
    room = height - len(lines)
    if room >= _EVENTS_BLOCK:
        lines.append(rule("events", width, notes=_about(kept), ascii_only=ascii_only))
        lines.extend(_events(status, width, room - 1, ascii_only=ascii_only))
    lines.extend(Text() for _ in range(height - len(lines)))
    screen = Text("\n").join(fit(line, width, ascii_only=ascii_only) for line in lines[: max(height, 0)])
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


def _header(status: Status, width: int, *, ascii_only: bool) -> list[Text]:
    name = fit(Text(one_line(status.name), style="bold"), width // 2, ascii_only=ascii_only)
    state = (status.state.value.upper(), _STATE_STYLES.get(status.state, _TRANSIENT_STYLE))
    since = f" for {duration((status.at - status.state_since_at).total_seconds())}"
    if status.paused_since_at is not None and status.state is not State.PAUSED:
        since += f", paused for {duration((status.at - status.paused_since_at).total_seconds())}"
    up = f"up {duration((status.at - status.started_at).total_seconds())}"
    clock = f"{status.at:%H:%M:%S} UTC"
    leader = "no leader id" if status.leader_id is None else f"leader {str(status.leader_id)[:8]}"
    term = "no term" if status.term is None else f"term {status.term}"
    problem = one_line(status.problem or "")
    return [
        ends(
            Text.assemble(name, "  ", state, since),
            [Text(f"{up}  {clock}"), Text(up)],
            width,
            ascii_only=ascii_only,
        ),
        ends(
            Text(f"outbox {one_line(status.outbox)}"),
            [Text(f"{term}  {leader}"), Text(term)],
            width,
            ascii_only=ascii_only,
        ),
        Text(f"! {problem}", style="bold red") if problem else Text(_in_words(status), style="dim"),
    ]


def _in_words(status: Status) -> str:
    if status.state is State.STANDBY and status.paused_since_at is not None:
        return "another process leads; this one would take over and mark nothing until it is resumed"
    return _IN_WORDS[status.state]


def _chart_seconds(width: int) -> int:
    return max(0, min(_CHART_SECONDS, width - _RATE_CELLS - _PEAK_CELLS))


def _throughput(status: Status, width: int, lines: int, *, ascii_only: bool) -> list[Text]:
    seconds = _chart_seconds(width)
    recent = status.rate_history[-seconds:] if seconds else ()
    cells = 2 if width - _RATE_CELLS - _PEAK_CELLS >= 2 * _CHART_SECONDS else 1  # cells a second
    rates = [rate for rate in recent for _ in range(cells)]
    bars = chart(rates, seconds * cells, lines, ascii_only=ascii_only)
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


def _figures(status: Status, width: int, *, ascii_only: bool) -> list[Text]:
    counts = f" {status.in_flight:,} / {status.max_in_flight:,}"
    queued = f"queued {status.queued:,}"
    bar = max(5, min(40, width - len("in flight [] ") - len(counts) - len(queued) - 2))
    in_flight = Text.assemble(
        "in flight [",
        (gauge(status.in_flight, status.max_in_flight, bar, ascii_only=ascii_only), "cyan"),
        f"]{counts}",
    )
    latency = f"p50 {milliseconds(status.p50_ms)}  p99 {milliseconds(status.p99_ms)}"
    quarantined = Text.assemble("quarantined ", (f"{status.quarantined:,}", "bold red" if status.quarantined else ""))
    delivered = Text(f"delivered {status.delivered:,}")
    return [
        ends(in_flight, [Text(queued)], width, ascii_only=ascii_only),
        ends(Text(_backlog(status.backlog)), [Text(f"latency {latency}"), Text(latency)], width, ascii_only=ascii_only),
        ends(delivered, [quarantined], width, ascii_only=ascii_only),
    ]


def _backlog(backlog: Backlog | None) -> str:
    if backlog is None:
        return "backlog unknown"
    if not backlog.records and not backlog.capped:
        return "backlog empty"
    oldest = "" if backlog.oldest_age_s is None else f", oldest {duration(backlog.oldest_age_s)}"
    return f"backlog {backlog.records:,}{'+' if backlog.capped else ''}{oldest}"


def _about(kept: Kept | None) -> list[str]:
    if kept is None or not kept.lines:
        return []
    count = f"{kept.lines:,} log {'line' if kept.lines == 1 else 'lines'}"
    return [f"{count} in {kept.path}", f"{count} kept"]


def _events(status: Status, width: int, room: int, *, ascii_only: bool) -> Sequence[Text]:
    if not status.events:
        return [Text("none yet", style="dim")]
    return [
        fit(
            Text.assemble((f"{event.at:%H:%M:%S}", "dim"), f"  {one_line(event.text)}"),
            width,
            ascii_only=ascii_only,
        )
        for event in status.events[-room:]
    ]
