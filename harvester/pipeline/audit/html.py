"""An audit as one page of HTML that needs nothing else: the verdict first, then why, then the load. Pure.

Whatever comes from records (keys, topics, details) is escaped; the page has no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape

from harvester.pipeline.audit.plots import Line, bars, columns, lines
from harvester.pipeline.audit.report import AuditReport, Found, Latency
from harvester.pipeline.audit.schemas import Kind, Severity
from harvester.pipeline.audit.style import STYLE
from harvester.pipeline.audit.words import HOLES, MEANINGS, advice

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
        *((kind.value, figures[kind.name.lower()], _worst(report.found, kind)) for kind in Kind),
        ("in quarantine", figures["quarantined"], "quiet"),
        ("waiting in the outbox", figures["pending"], "quiet"),
    ]
    tiles = "".join(
        f'<div class="tile {style}"><b>{count:,}</b><span>{escape(name)}</span></div>' for name, count, style in shown
    )
    return f'<section class="tiles">{tiles}</section>'


def _worst(found: Sequence[Found], kind: Kind) -> str:
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
        plots.append(f"<h3>{escape(total.topic or '')}</h3>{lines(title, _hours(hours), drawn)}")
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


def _hours(rows: Sequence[Latency]) -> list[datetime]:
    return [one.hour for one in rows if one.hour is not None]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
