"""Renders the screen of `harvester watch` and decides what its keys do. Pure.

`press` takes a view and a key, and returns the next view and possibly a request; `screen` draws a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from harvester.control.protocol import Glimpse
from harvester.status import Status
from harvester_cli.dashboard.figures import one_line, short_count
from harvester_cli.dashboard.lines import OneKey, ends, fit, rule
from harvester_cli.dashboard.render import Detail, OffScreenOutput, OneShard, QuarantineMeter, render

# Byte sequences of keys without a character.
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[Z": "up",
    b"\t": "down",
    b"\x1b": "esc",
    b"\x03": "quit",
}
_FURTHER = {"down": 1, "up": -1}
_LONGEST_KEY = 1_000
_SIDEWAYS = {"right": 1, "left": -1}
HELP = "p pause  + - shards  0-9 one shard  k one key  d quarantine  q quit"
HELP_FOR_SEVERAL = "tab next  " + HELP
HELP_FOR_NOBODY = "q quit"  # a harvester that does not answer obeys no keys


@dataclass(frozen=True, slots=True)
class View:
    """The state of the watch: the selected harvester (its socket; None: the first), the detail, the last message.

    `typed`: the part of a record's key entered so far, one character per byte; None while none is being entered.
    """

    chosen: Path | None = None
    detail: Detail | None = None
    message: str = ""
    typed: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to this harvester; `words` describe what is happening in the meantime."""

    socket: Path
    command: str
    words: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Quit:
    """The end of the watch."""


def split(data: bytes) -> list[str]:
    """The keys in terminal input; names for those without a character."""
    keys: list[str] = []
    while data:
        known = next((code for code in sorted(_SEQUENCES, key=len, reverse=True) if data.startswith(code)), None)
        if known is not None:
            keys.append(_SEQUENCES[known])
            data = data[len(known) :]
        else:
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
    return keys


def chosen(view: View, seen: Sequence[Glimpse]) -> Glimpse | None:
    """The selected harvester."""
    return next((one for one in seen if one.path == view.chosen), seen[0] if seen else None)


def press(view: View, key: str, seen: Sequence[Glimpse]) -> tuple[View, Ask | Quit | None]:
    """The view after this key, and the request that it causes, if any."""
    view = replace(view, message="")
    if view.typed is not None:
        return _entry(view, view.typed, key), None
    if key in ("q", "Q", "quit"):
        return view, Quit()
    one = chosen(view, seen)
    if one is None:
        return view, None
    if key in _FURTHER:
        at = (list(seen).index(one) + _FURTHER[key]) % len(seen)
        return View(chosen=seen[at].path), None
    status = one.status
    if status is None:
        return view, None
    if key == "esc":
        return replace(view, detail=None), None
    if key in ("d", "D"):
        return replace(view, detail=None if isinstance(view.detail, QuarantineMeter) else QuarantineMeter()), None
    if key in ("k", "K"):
        return replace(view, typed=""), None
    if key in "0123456789":
        return _shard(view, int(key), status), None
    if key in _SIDEWAYS and isinstance(view.detail, OneShard) and status.shards:
        return replace(view, detail=OneShard((view.detail.index + _SIDEWAYS[key]) % len(status.shards))), None
    return view, _request(key, one.path, status)


def _entry(view: View, typed: str, key: str) -> View:
    """A line is being entered: Return ends it, Escape or Ctrl-C cancels it."""
    if key in ("\r", "\n"):
        return replace(view, typed=None, detail=OneKey(_text(typed)))
    if key in ("esc", "quit"):
        return replace(view, typed=None)
    if key in ("\x7f", "\b"):
        return replace(view, typed=typed.encode("latin-1").decode("utf-8", "ignore")[:-1].encode().decode("latin-1"))
    if len(key) == 1 and (key.isprintable() or key >= "\x80") and len(typed) < _LONGEST_KEY:
        return replace(view, typed=typed + key)
    return view


def _text(typed: str) -> str:
    return typed.encode("latin-1").decode("utf-8", "replace")


def prompt(view: View) -> str | None:
    """The line in which a key is entered."""
    return None if view.typed is None else f"key: {_text(view.typed)}_  (Return shows it, Esc cancels)"


def _shard(view: View, index: int, status: Status) -> View:
    if index >= len(status.shards):
        return replace(view, message=f"there is no shard {index}")
    return replace(view, detail=None if view.detail == OneShard(index) else OneShard(index))


def _request(key: str, socket: Path, status: Status) -> Ask | None:
    if key in ("p", "P"):
        if status.paused_since_at is None:
            return Ask(socket, "pause", "pausing")
        return Ask(socket, "resume", "resuming")
    shards = len(status.shards) + (1 if key in "+=" else -1 if key in "-_" else 0)
    if shards != len(status.shards) and 1 <= shards <= 256:
        return Ask(socket, "scale", f"changing to {shards} shards", {"shards": shards, "within_s": 10.0})
    return None


_MOST_LISTED = 6
_NAME_CELLS = 24


def screen(
    view: View,
    seen: Sequence[Glimpse],
    width: int,
    height: int,
    *,
    keys: bool,
    kept: OffScreenOutput | None = None,
) -> Text:
    """`height` lines of at most `width` cells each. `keys`: whether keys are read; then the last line lists them."""
    one = chosen(view, seen)
    above = _others(seen, one, width) if len(seen) > 1 else []
    below = [_foot(view, one, len(seen) > 1, width)] if keys or view.message else []
    room = max(0, height - len(above) - len(below))
    lines = [*above, *_dashboard(view, one, width, room, kept), *below]
    drawn = Text("\n").join(lines[: max(height, 0)])
    drawn.no_wrap, drawn.overflow, drawn.end = True, "crop", ""
    return drawn


def _dashboard(view: View, one: Glimpse | None, width: int, height: int, kept: OffScreenOutput | None) -> list[Text]:
    if height <= 0:
        return []
    if one is None or one.status is None:
        words = "no harvester is running; waiting for one" if one is None else one.trouble or "connecting"
        where = "" if one is None else str(one.path)
        lines = [fit(Text(one_line(text)), width) for text in (where, words) if text]
        return [*lines[:height], *(Text() for _ in range(height - len(lines)))]
    silent = one.trouble is not None
    status = replace(one.status, problem=one.trouble) if silent else one.status
    drawn = render(status, width, height, kept, detail=view.detail, silent=silent)
    return list(drawn.split("\n", allow_blank=True))


def _others(seen: Sequence[Glimpse], one: Glimpse | None, width: int) -> list[Text]:
    """A line for each harvester, as many as fit around the selected one."""
    at = next((number for number, other in enumerate(seen) if other is one), 0)
    first = max(0, min(at - _MOST_LISTED // 2, len(seen) - _MOST_LISTED))
    listed = seen[first : first + _MOST_LISTED]
    hidden = len(seen) - len(listed)
    notes = [f"{len(seen)}, {hidden} not shown" if hidden else f"{len(seen)}"]
    lines = [rule("harvesters", width, notes=notes)]
    for other in listed:
        mark = ">" if other is one else " "
        name = fit(Text(one_line(other.status.name if other.status is not None else str(other.path))), _NAME_CELLS)
        name.pad_right(max(0, _NAME_CELLS - name.cell_len))
        left = Text.assemble(f"{mark} ", name, f" {_word(other)}", style="bold" if other is one else "")
        lines.append(ends(left, [Text(_figures(other))], width))
    return lines


def _word(one: Glimpse) -> str:
    if one.trouble is not None:
        return "no answer"
    if one.status is None:
        return "connecting"
    paused = one.status.paused_since_at is not None and one.status.state.value != "paused"
    return one.status.state.value.upper() + (", paused" if paused else "")


def _figures(one: Glimpse) -> str:
    status = one.status
    if status is None or one.trouble is not None:
        return ""
    backlog = ""
    if status.backlog is not None:
        backlog = f"  backlog {short_count(status.backlog.records)}{'+' if status.backlog.capped else ''}"
    problem = "  !" if status.problem else ""
    return f"{short_count(status.rate_per_s)}/s{backlog}  {len(status.shards)} shards{problem}"


def _foot(view: View, one: Glimpse | None, several: bool, width: int) -> Text:
    entered = prompt(view)
    if entered is not None:
        return fit(Text(one_line(entered), style="bold"), width)
    words = Text(one_line(view.message), style="bold") if view.message else None
    alone = HELP if one is not None and one.trouble is None else HELP_FOR_NOBODY
    return fit(words or Text(HELP_FOR_SEVERAL if several else alone, style="dim"), width)
