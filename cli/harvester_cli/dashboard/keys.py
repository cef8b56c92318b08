"""What the keys of `harvester watch` do: a view and a key in, the next view and perhaps a request out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harvester.status import Status
from harvester_cli.dashboard.details import Detail, OneShard, Quarantine
from harvester_cli.dashboard.key import OneKey

# Bytes that a terminal sends for keys without a character.
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


@dataclass(frozen=True, slots=True)
class Seen:
    """A harvester as it was last heard of: by its socket. `trouble`: why it does not answer now."""

    socket: str
    status: Status | None = None
    trouble: str | None = None

    @property
    def label(self) -> str:
        """What to call it."""
        return self.status.name if self.status is not None else self.socket


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: which harvester, by its socket (None: the first), what of it, and the last word about keys.

    `typed`: what has been entered of a record's key so far, a character for each byte; None while none is.
    """

    chosen: str | None = None
    detail: Detail | None = None
    message: str = ""
    typed: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to this harvester; `words` say what is going on meanwhile."""

    socket: str
    command: str
    words: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Quit:
    """The end of the watch."""


def split(data: bytes) -> list[str]:
    """The keys in what was read from a terminal; names for those without a character."""
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


def chosen(view: View, seen: Sequence[Seen]) -> Seen | None:
    """The harvester that is looked at."""
    return next((one for one in seen if one.socket == view.chosen), seen[0] if seen else None)


def press(view: View, key: str, seen: Sequence[Seen]) -> tuple[View, Ask | Quit | None]:
    """What this key does."""
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
        return View(chosen=seen[at].socket), None
    status = one.status
    if status is None:
        return view, None
    if key == "esc":
        return replace(view, detail=None), None
    if key in ("d", "D"):
        return replace(view, detail=None if isinstance(view.detail, Quarantine) else Quarantine()), None
    if key in ("k", "K"):
        return replace(view, typed=""), None
    if key in "0123456789":
        return _shard(view, int(key), status), None
    if key in _SIDEWAYS and isinstance(view.detail, OneShard) and status.shards:
        return replace(view, detail=OneShard((view.detail.index + _SIDEWAYS[key]) % len(status.shards))), None
    return view, _request(key, one.socket, status)


def _entry(view: View, typed: str, key: str) -> View:
    """A line is being entered: Return ends it, Escape or Ctrl-C gives it up."""
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
    """The line that a key is entered in."""
    return None if view.typed is None else f"key: {_text(view.typed)}_  (Return shows it, Esc leaves)"


def _shard(view: View, index: int, status: Status) -> View:
    if index >= len(status.shards):
        return replace(view, message=f"there is no shard {index}")
    return replace(view, detail=None if view.detail == OneShard(index) else OneShard(index))


def _request(key: str, socket: str, status: Status) -> Ask | None:
    if key in ("p", "P"):
        if status.paused_since_at is None:
            return Ask(socket, "pause", "pausing")
        return Ask(socket, "resume", "resuming")
    shards = len(status.shards) + (1 if key in "+=" else -1 if key in "-_" else 0)
    if shards != len(status.shards) and 1 <= shards <= 256:
        return Ask(socket, "scale", f"changing to {shards} shards", {"shards": shards, "within_s": 10.0})
    return None
