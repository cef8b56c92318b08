"""Renders an audit as a self-contained HTML page, without scripts or network access.

The template `page.html` contains the layout, and the light and dark style. Plots are SVG from Pygal, coloured by the
page's style. Each has a title for screen readers, and each point and bar shows its value as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pygal
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pygal.etree import etree as pygals_etree

from harvester.pipeline.audit.report import HOLES, MEANINGS, AuditReport, FindingGroup, Latency, advice
from harvester.pipeline.audit.schemas import FindingKind, Severity

_MOST_TOPICS = 6
_MOST_TERMS = 50
_MOST_DOTS = 120
_TICKS = 6
_PERCENTILES = ("p50", "p90", "p99", "max")
_HOUR = timedelta(hours=1)


def page(report: AuditReport) -> str:
    """The page as HTML."""
    totals = [one for one in report.latency if one.hour is None and one.topic is not None]
    totals.sort(key=lambda one: (-one.records, one.topic or ""))
    jinja = Environment(
        loader=PackageLoader("harvester.pipeline.audit", ""), autoescape=True, undefined=StrictUndefined
    )
    jinja.filters |= {"time": _time, "ms": _ms, "count": "{:,}".format}
    return jinja.get_template("page.html").render(
        report=report,
        verdict="holds" if report.holds and not report.found else "suspect" if report.holds else "broken",
        tiles=_tiles(report),
        meanings=MEANINGS,
        totals=totals,
        percentiles=_PERCENTILES,
        latency=[(one.topic, _latency(report, one.topic)) for one in totals[:_MOST_TOPICS]],
        throughput=_throughput(report),
        advice=report.skew and advice(report.skew, report.hot_keys),
        terms=report.terms[-_MOST_TERMS:],
        changes=max(0, len(report.terms) - len({one.incarnation for one in report.terms})),
        holes=HOLES,
    )


def _tiles(report: AuditReport) -> list[tuple[str, int, str]]:
    figures = report.figures
    return [
        ("ids delivered", figures["ids"], "quiet"),
        *((kind.value, figures[kind.name.lower()], _worst(report.found, kind)) for kind in FindingKind),
        ("in quarantine", figures["quarantined"], "quiet"),
        ("waiting in the outbox", figures["pending"], "quiet"),
    ]


def _worst(found: Sequence[FindingGroup], kind: FindingKind) -> str:
    severities = {one.severity for one in found if one.kind is kind}
    return "broken" if Severity.VIOLATION in severities else "suspect" if severities else "holds"


def _latency(report: AuditReport, topic: str | None) -> Markup:
    """A plot by hour with a logarithmic scale, so that it can show both median and maximum."""
    by_hour = {one.hour: one for one in report.latency if one.topic == topic and one.hour is not None}
    known = [value for one in by_hour.values() for value in _values(one) if value is not None]
    if not known:
        return _NOTHING
    low = math.floor(math.log10(max(min(known), 0.1)))
    high = max(low + 1, math.ceil(math.log10(max(0.1, *known))))
    powers = [10.0**power for power in range(low, high + 1)]
    plot = pygal.Line(logarithmic=True, allow_interruptions=True, y_labels=powers, range=(powers[0], powers[-1]))
    hours = _hours(sorted(by_hour))
    each = zip(*(_values(by_hour.get(hour)) for hour in hours), strict=True)
    for name, values in zip(_PERCENTILES, each, strict=True):
        plot.add(name, [None if value is None else max(value, powers[0]) for value in values])
    return _svg(plot, f"Latency of {topic} by hour", hours, "ms")


def _values(latency: Latency | None) -> tuple[float | None, ...]:
    return (None,) * 4 if latency is None else (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms)


def _throughput(report: AuditReport) -> Markup:
    by_hour: dict[datetime, int] = {}
    for one in report.latency:
        if one.topic is not None and one.hour is not None:
            by_hour[one.hour] = by_hour.get(one.hour, 0) + one.records
    if not by_hour:
        return _NOTHING
    plot, hours = pygal.Bar(zero=0), _hours(sorted(by_hour))
    plot.add("records", [by_hour.get(hour, 0) for hour in hours])
    return _svg(plot, "Records delivered by hour", hours, "records")


_NOTHING = Markup('<p class="quiet">No data to plot.</p>')


def _hours(known: Sequence[datetime]) -> list[datetime]:
    """Every hour from the first to the last."""
    return [known[0] + number * _HOUR for number in range((known[-1] - known[0]) // _HOUR + 1)]


def _svg(plot: Any, title: str, hours: Sequence[datetime], unit: str) -> Markup:
    """The plot as an element of the page, without Pygal's script and style."""
    form = "%H:%M" if hours[0].date() == hours[-1].date() else "%m-%d %H:%M"
    plot.config(
        title=title, width=760, height=240, js=(), show_legend=False, margin_top=-20, margin_bottom=0, margin_right=45,
        show_dots=len(hours) <= _MOST_DOTS, dots_size=3, formatter=lambda value: f"{_number(value)} {unit}",
        x_labels=[f"{hour:{form}}" for hour in hours], x_labels_major_count=_TICKS, show_minor_x_labels=False,
        truncate_label=-1,
    )  # fmt: skip
    pygals_etree.to_etree()  # even if lxml is installed
    tree = plot.render_tree()
    for part in list(tree):
        if part.tag in ("defs", ElementTree.Comment):
            tree.remove(part)
    for shown in tree.iter("g"):
        told = {one.get("class"): one for one in shown.findall("desc")}
        for one in told.values():
            shown.remove(one)
        if "value" in told:
            ElementTree.SubElement(shown, "title").text = f"{told['x_label'].text} {told['value'].text}"
    del tree.attrib["xmlns"]
    tree.set("role", "img")
    tree.set("aria-label", title)
    return Markup(ElementTree.tostring(tree, encoding="unicode", method="html"))  # noqa: S704 - escaped by Pygal


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
