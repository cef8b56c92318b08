"""Plots as SVG text: no script, no library, colours from the page's own style. Pure.

A plot has a title for those who cannot see it, and each point and bar says its value when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

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
