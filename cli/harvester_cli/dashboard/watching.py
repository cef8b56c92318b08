"""The screen of `harvester watch`: the dashboard of one harvester, above it the others where there are any. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.text import Text

from harvester_cli.dashboard.figures import one_line, short_count
from harvester_cli.dashboard.keys import HELP, HELP_FOR_SEVERAL, Seen, View, chosen, prompt
from harvester_cli.dashboard.lines import ends, fit, rule
from harvester_cli.dashboard.render import Kept, render

_MOST_LISTED = 6
_NAME_CELLS = 24


def screen(
    view: View,
    seen: Sequence[Seen],
    width: int,
    height: int,
    *,
    keys: bool,
    kept: Kept | None = None,
    ascii_only: bool = False,
) -> Text:
    """`height` lines of at most `width` cells each. `keys`: whether any is heard; then the last line names them."""
    one = chosen(view, seen)
    above = _others(seen, one, width, ascii_only=ascii_only) if len(seen) > 1 else []
    below = [_foot(view, len(seen) > 1, width, ascii_only=ascii_only)] if keys or view.message else []
    room = max(0, height - len(above) - len(below))
    lines = [*above, *_dashboard(view, one, width, room, kept, ascii_only=ascii_only), *below]
    drawn = Text("\n").join(lines[: max(height, 0)])
    drawn.no_wrap, drawn.overflow, drawn.end = True, "crop", ""
    return drawn


def _dashboard(
    view: View, one: Seen | None, width: int, height: int, kept: Kept | None, *, ascii_only: bool
) -> list[Text]:
    if height <= 0:
        return []
    if one is None or one.status is None:
        words = "no harvester runs; waiting for one" if one is None else one.trouble or "connecting"
        where = "" if one is None else one.socket
        lines = [fit(Text(one_line(text)), width, ascii_only=ascii_only) for text in (where, words) if text]
        return [*lines[:height], *(Text() for _ in range(height - len(lines)))]
    status = one.status if one.trouble is None else replace(one.status, problem=one.trouble)
    drawn = render(status, width, height, kept=kept, ascii_only=ascii_only, detail=view.detail)
    return list(drawn.split("\n", allow_blank=True))


def _others(seen: Sequence[Seen], one: Seen | None, width: int, *, ascii_only: bool) -> list[Text]:
    """A line for each, as many as there is room for around the one that is looked at."""
    at = next((number for number, other in enumerate(seen) if other is one), 0)
    first = max(0, min(at - _MOST_LISTED // 2, len(seen) - _MOST_LISTED))
    listed = seen[first : first + _MOST_LISTED]
    hidden = len(seen) - len(listed)
    notes = [f"{len(seen)}, {hidden} not shown" if hidden else f"{len(seen)}"]
    lines = [rule("harvesters", width, notes=notes, ascii_only=ascii_only)]
    for other in listed:
        mark = ">" if other is one else " "
        name = fit(Text(one_line(other.label)), _NAME_CELLS, ascii_only=ascii_only)
        name.pad_right(max(0, _NAME_CELLS - name.cell_len))
        left = Text.assemble(f"{mark} ", name, f" {_word(other)}", style="bold" if other is one else "")
        lines.append(ends(left, [Text(_figures(other))], width, ascii_only=ascii_only))
    return lines


def _word(one: Seen) -> str:
    if one.trouble is not None:
        return "no answer"
    if one.status is None:
        return "connecting"
    paused = one.status.paused_since_at is not None and one.status.state.value != "paused"
    return one.status.state.value.upper() + (", paused" if paused else "")


def _figures(one: Seen) -> str:
    status = one.status
    if status is None or one.trouble is not None:
        return ""
    backlog = ""
    if status.backlog is not None:
        backlog = f"  backlog {short_count(status.backlog.records)}{'+' if status.backlog.capped else ''}"
    problem = "  !" if status.problem else ""
    return f"{short_count(status.rate_per_s)}/s{backlog}  {len(status.shards)} shards{problem}"


def _foot(view: View, several: bool, width: int, *, ascii_only: bool) -> Text:
    entered = prompt(view)
    if entered is not None:
        return fit(Text(one_line(entered), style="bold"), width, ascii_only=ascii_only)
    words = Text(one_line(view.message), style="bold") if view.message else None
    return fit(words or Text(HELP_FOR_SEVERAL if several else HELP, style="dim"), width, ascii_only=ascii_only)
