"""An audit as one page of HTML that needs nothing else: the verdict first, then why, then the load.

Whatever comes from records (keys, topics, details) is escaped; the page has no script.

The style of the audit's page: light and dark, by what the reader's system says.

Plots as SVG text: no script, no library, colours from the page's own style. A plot has a title for those who cannot
see it, and each point and bar says its value when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from harvester.pipeline.audit.report import HOLES, MEANINGS, AuditReport, FindingGroup, Latency, advice
from harvester.pipeline.audit.schemas import FindingKind, Severity

STYLE = """
:root { --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e3e7ed; --good: #157f4c; --bad: #c22f3d;
  --odd: #a86400; --a: #2f6fde; --b: #12a594; --c: #e5892f; --d: #c22f3d; --shade: 0 1px 3px rgb(16 24 40 / 8%); }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #93a0b4;
  --line: #2c3541; --good: #4cc38a; --bad: #ff7b84; --odd: #f0b35a; --a: #7aa7ff; --b: #4fd1c1; --c: #f0a45d;
  --d: #ff7b84; --shade: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 18px 60px; }
header, section { background: var(--card); border-radius: 12px; padding: 20px 24px; margin: 0 0 18px;
  box-shadow: var(--shade); }
header { border-left: 8px solid var(--good); }
header.broken { border-color: var(--bad); }
header.suspect { border-color: var(--odd); }
h1 { font-size: 26px; line-height: 1.25; margin: 4px 0 8px; }
h2 { font-size: 18px; margin: 0 0 8px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 4px 0 10px; }
.quiet, .legend { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; background: none;
  padding: 0; box-shadow: none; }
.tile { background: var(--card); border-radius: 10px; padding: 12px 14px; box-shadow: var(--shade); }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; color: var(--ink); }
.tile span { color: var(--soft); font-size: 13px; }
.tile.holds b { color: var(--good); } .tile.broken b { color: var(--bad); } .tile.suspect b { color: var(--odd); }
.tile.broken { outline: 2px solid var(--bad); }
i { font-style: normal; font-size: 12px; border-radius: 9px; padding: 2px 9px; border: 1px solid; margin-right: 4px; }
i.broken { color: var(--bad); } i.suspect { color: var(--odd); }
.limits { border-left: 8px solid var(--odd); }
.limits ul { margin: 0; padding-left: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
.numbers td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; margin: 6px 0; }
svg text { fill: var(--soft); font-size: 11.5px; }
svg .scale, svg .name { text-anchor: end; } svg .tick { text-anchor: middle; } svg .name { fill: var(--ink); }
svg .rule { stroke: var(--line); } svg .mark { stroke: var(--bad); stroke-dasharray: 5 4; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .bar { fill: var(--a); opacity: 0.85; } svg .bar:hover { opacity: 1; }
svg .p50 { stroke: var(--a); } svg .p90 { stroke: var(--b); } svg .p99 { stroke: var(--c); }
svg .max { stroke: var(--d); }
svg circle.p50 { fill: var(--a); } svg circle.p90 { fill: var(--b); } svg circle.p99 { fill: var(--c); }
svg circle.max { fill: var(--d); }
.legend span { margin-right: 18px; font-size: 13px; }
.legend span::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  vertical-align: middle; background: currentcolor; }
.legend .p50 { color: var(--a); } .legend .p90 { color: var(--b); } .legend .p99 { color: var(--c); }
.legend .max { color: var(--d); }
"""


_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 16, 14, 34
_TICKS = 4
_MOST_DOTS = 120


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot. `style` is a class of the page's style; None is a hole in the line."""

    name: str
    style: str
    values: Sequence[float | None]


def lines(title: str, hours: Sequence[datetime], drawn: Sequence[Line], *, unit: str = "ms") -> str:
    """Values over time, on a logarithmic scale: a median and a maximum are to be seen in one plot."""
    known = [value for line in drawn for value in line.values if value is not None]
    if not hours or not known:
        return _nothing(title)
    low = math.floor(math.log10(max(min(known), 0.1)))
    high = max(low + 1, math.ceil(math.log10(max(0.1, *known))))

    def y(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    x = _times(hours)
    parts = [_rule(y(10.0**power), f"{_number(10.0**power)} {unit}") for power in range(low, high + 1)]
    parts += _hours(hours, x)
    for line in drawn:
        run: list[str] = []
        for at, value in zip(hours, line.values, strict=True):
            if value is None:
                parts += _path(run, line.style)
                run = []
                continue
            run.append(f"{x(at):.1f},{y(value):.1f}")
            if len(hours) <= _MOST_DOTS:
                told = f"{at:%Y-%m-%d %H:%M} {line.name} {_number(value)} {unit}"
                parts.append(
                    f'<circle class="{line.style}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3">{_told(told)}</circle>'
                )
        parts += _path(run, line.style)
    legend = "".join(f'<span class="{line.style}">{escape(line.name)}</span>' for line in drawn)
    return f'{_svg(title, parts)}<p class="legend">{legend}</p>'


def columns(title: str, hours: Sequence[datetime], values: Sequence[float], *, unit: str) -> str:
    """A bar for each hour."""
    if not hours:
        return _nothing(title)
    top = _round_up(max(1.0, *values))
    x = _times(hours)
    wide = max(1.5, min(40.0, 0.8 * (_WIDTH - _LEFT - _RIGHT) / (_span_h(hours) + 1)))
    inner = _HEIGHT - _TOP - _BOTTOM
    parts = [_rule(_TOP + inner * (1 - step / _TICKS), f"{_number(top * step / _TICKS)}") for step in range(_TICKS + 1)]
    parts += _hours(hours, x)
    for at, value in zip(hours, values, strict=True):
        tall = inner * value / top
        told = f"{at:%Y-%m-%d %H:%M} {_number(value)} {unit}"
        parts.append(
            f'<rect class="bar" x="{x(at) - wide / 2:.1f}" y="{_TOP + inner - tall:.1f}" width="{wide:.1f}"'
            f' height="{tall:.1f}" rx="1.5">{_told(told)}</rect>'
        )
    return _svg(title, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]], *, mark: float | None = None) -> str:
    """A bar for each (name, share of 1, value as text), from above. `mark`: a share that is drawn as a line."""
    if not rows:
        return _nothing(title)
    step, left = 24, 220
    height = step * len(rows) + 12
    top = max([share for _, share, _ in rows] + [mark or 0.0, 1e-9])
    inner = _WIDTH - left - 130
    parts = []
    for number, (name, share, text) in enumerate(rows):
        y = 6 + number * step
        long = max(1.0, inner * share / top)
        parts.append(f'<text class="name" x="{left - 8}" y="{y + 15}">{escape(_short(name))}{_told(name)}</text>')
        parts.append(
            f'<rect class="bar" x="{left}" y="{y + 3}" width="{long:.1f}" height="{step - 7}" rx="2">'
            f"{_told(f'{name}: {text}')}</rect>"
        )
        parts.append(f'<text class="value" x="{left + long + 6:.1f}" y="{y + 15}">{escape(text)}</text>')
    if mark is not None:
        x = left + inner * mark / top
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 4}"/>')
    return _svg(title, parts, height)


def _svg(title: str, parts: Sequence[str], height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _nothing(title: str) -> str:
    return f'<p class="quiet">{escape(title)}: nothing to draw.</p>'


def _times(hours: Sequence[datetime]) -> Callable[[datetime], float]:
    first, span = hours[0], _span_h(hours)
    inner = _WIDTH - _LEFT - _RIGHT - 40

    def x(at: datetime) -> float:
        passed = (at - first).total_seconds() / 3600
        return _LEFT + 20 + (inner * passed / span if span else inner / 2)

    return x


def _span_h(hours: Sequence[datetime]) -> float:
    return (hours[-1] - hours[0]).total_seconds() / 3600


def _hours(hours: Sequence[datetime], x: Callable[[datetime], float]) -> list[str]:
    """A few of the hours as text: the first, the last and some between, never so near that they touch."""
    form = "%H:%M" if _span_h(hours) < 24 and hours[0].date() == hours[-1].date() else "%m-%d %H:%M"
    parts: list[str] = []
    before = -math.inf
    for at in hours:
        if x(at) - before >= 110:
            before = x(at)
            parts.append(f'<text class="tick" x="{before:.1f}" y="{_HEIGHT - 12}">{at:{form}}</text>')
    return parts


def _rule(y: float, text: str) -> str:
    return (
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="scale" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>'
    )


def _path(points: Sequence[str], style: str) -> list[str]:
    return [f'<polyline class="{style}" points="{" ".join(points)}"/>'] if len(points) > 1 else []


def _told(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10, 20, … that a scale of four steps looks well with."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


_MOST_TOPICS = 6
_MOST_TERMS = 50


def page(report: AuditReport) -> str:
    """The whole document."""
    verdict = "holds" if report.holds and not report.found else "suspect" if report.holds else "broken"
    sections = [
        _header(report, verdict), _tiles(report), _findings(report), _limits(report), _latency(report),
        _throughput(report), _keys(report), _lanes(report), _terms(report), _numbers(report),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Delivery audit: {escape(report.answer())}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _header(report: AuditReport, verdict: str) -> str:
    since, until = report.since, report.until
    span = "everything" if since is None and until is None else f"{_time(since) or '…'} to {_time(until) or 'now'}"
    return (
        f'<header class="{verdict}"><p class="quiet">Delivery audit, {_time(report.audited_at)}</p>'
        f"<h1>{escape(report.answer())}</h1>"
        f"<p>{escape(report.source)} · {escape(', '.join(report.topics))} · {span}</p></header>"
    )


def _tiles(report: AuditReport) -> str:
    figures = report.figures
    shown = [
        ("ids delivered", figures["ids"], "quiet"),
        *((kind.value, figures[kind.name.lower()], _worst(report.found, kind)) for kind in FindingKind),
        ("in quarantine", figures["quarantined"], "quiet"),
        ("waiting in the outbox", figures["pending"], "quiet"),
    ]
    tiles = "".join(
        f'<div class="tile {style}"><b>{count:,}</b><span>{escape(name)}</span></div>' for name, count, style in shown
    )
    return f'<section class="tiles">{tiles}</section>'


def _worst(found: Sequence[FindingGroup], kind: FindingKind) -> str:
    severities = {one.severity for one in found if one.kind is kind}
    return "broken" if Severity.VIOLATION in severities else "suspect" if severities else "holds"


def _findings(report: AuditReport) -> str:
    if not report.found:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    parts = []
    for one in report.found:
        rows = [
            (
                _text(example.topic), _text(example.partition), _text(example.offset), _text(example.id),
                _text(example.key), _time(example.at), example.detail,
            )
            for example in one.examples
        ]  # fmt: skip
        style = "broken" if one.severity is Severity.VIOLATION else "suspect"
        more = f", the first {len(rows)}" if one.count > len(rows) else ""
        parts.append(
            f'<h3><i class="{style}">{one.severity}</i> {one.count:,} {escape(one.kind)}{more}</h3>'
            f"<p>{escape(MEANINGS[one.kind])}</p>"
            f"{_table(('topic', 'partition', 'offset', 'id', 'key', 'at (UTC)', 'detail'), rows)}"
        )
    return f"<section><h2>Findings</h2>{''.join(parts)}</section>"


def _limits(report: AuditReport) -> str:
    if not report.not_judged:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in report.not_judged)
    return f'<section class="limits"><h2>What was not judged</h2><ul>{items}</ul></section>'


def _latency(report: AuditReport) -> str:
    totals = [one for one in report.latency if one.hour is None and one.topic is not None]
    totals.sort(key=lambda one: (-one.records, one.topic or ""))
    plots = []
    for total in totals[:_MOST_TOPICS]:
        hours = [one for one in report.latency if one.topic == total.topic and one.hour is not None]
        drawn = (
            Line("p50", "p50", [one.p50_ms for one in hours]),
            Line("p90", "p90", [one.p90_ms for one in hours]),
            Line("p99", "p99", [one.p99_ms for one in hours]),
            Line("max", "max", [one.max_ms for one in hours]),
        )
        title = f"Latency of {total.topic} by hour"
        plots.append(f"<h3>{escape(total.topic or '')}</h3>{lines(title, _html_hours(hours), drawn)}")
    rows = [
        (_text(one.topic), f"{one.records:,}", *map(_ms, (one.p50_ms, one.p90_ms, one.p99_ms, one.max_ms)))
        for one in totals
    ]
    table = _table(("topic", "deliveries", "p50", "p90", "p99", "max"), rows, numbers=True)
    return (
        "<section><h2>Latency</h2><p>From the creation of a row to its record's timestamp in Kafka, first deliveries"
        f" only; the scale is logarithmic.</p>{table}{''.join(plots)}</section>"
    )


def _throughput(report: AuditReport) -> str:
    by_hour: dict[datetime, int] = {}
    for one in report.latency:
        if one.topic is not None and one.hour is not None:
            by_hour[one.hour] = by_hour.get(one.hour, 0) + one.records
    hours = sorted(by_hour)
    plot = columns("Records delivered by hour", hours, [by_hour[hour] for hour in hours], unit="records")
    return f"<section><h2>Throughput</h2><p>Records in Kafka for each hour, UTC.</p>{plot}</section>"


def _keys(report: AuditReport) -> str:
    if report.skew is None:
        return ""
    skew = report.skew
    hot = bars(
        "The hottest keys", [(one.key, one.share, f"{one.records:,} ({one.share:.1%})") for one in report.hot_keys[:12]]
    )
    shards = bars(
        "How many times one shard so many carry",
        [(f"{one.shards} shards", one.carried, f"{one.carried:.1f} ×") for one in skew.loads],
        mark=skew.most if skew.most <= 1.5 * max(one.carried for one in skew.loads) else None,
    )
    return (
        f"<section><h2>Keys and shards</h2><p>{escape(advice(skew, report.hot_keys))}</p><h3>Hot keys</h3>{hot}"
        "<h3>What shards would carry</h3><p>By the relay's own hash of the keys; a shard that has half of all records"
        f" makes two shards at best. A dashed line is the bound that the hottest key sets.</p>{shards}</section>"
    )


def _lanes(report: AuditReport) -> str:
    lanes = report.lanes
    total = sum(lanes.values())
    rows = [(f"lane {lane}", count / total, f"{count:,} ({count / total:.1%})") for lane, count in lanes.items()]
    return f"<section><h2>Lanes</h2><p>What each shard sent.</p>{bars('Records by lane', rows)}</section>"


def _terms(report: AuditReport) -> str:
    shown = report.terms[-_MOST_TERMS:]
    rows = [
        (
            one.incarnation[:8], f"{one.term:,}", f"{one.records:,}", f"{one.lanes:,}", f"{one.producers:,}",
            _time(one.first_at), _time(one.last_at), "" if one.silence_s is None else f"{one.silence_s:,.1f} s",
        )
        for one in shown
    ]  # fmt: skip
    more = f" The last {len(shown)} of {len(report.terms):,}." if len(shown) < len(report.terms) else ""
    head = ("incarnation", "term", "records", "lanes", "producers", "first (UTC)", "last (UTC)", "after the one before")
    changes = max(0, len(report.terms) - len({one.incarnation for one in report.terms}))
    return (
        f"<section><h2>Leaders</h2><p>{changes:,} changes of the term.{more} A negative pause: the terms overlap in"
        f" Kafka's time.</p>{_table(head, rows, numbers=True)}</section>"
    )


def _numbers(report: AuditReport) -> str:
    missing = [(words, f"{report.figures.get(name, 0):,}") for name, words in HOLES.items()]
    figures = [(name, f"{count:,}") for name, count in report.figures.items() if name not in HOLES]
    return (
        f"<section><h2>Missing numbers of lanes</h2>{_table(('why', 'numbers'), missing, numbers=True)}"
        f"<h2>All figures</h2>{_table(('figure', 'count'), figures, numbers=True)}</section>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    if not rows:
        return '<p class="quiet">Nothing.</p>'
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    style = ' class="numbers"' if numbers else ""
    return f'<div class="scroll"><table{style}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _html_hours(rows: Sequence[Latency]) -> list[datetime]:
    return [one.hour for one in rows if one.hour is not None]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
