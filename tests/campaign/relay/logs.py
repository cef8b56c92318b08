"""What a harvester's log says about its leaderships and its losses. Pure: lines in, facts out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .history import Fault, Led
from .setup import AT_LEAST_ONCE

_LEADS = re.compile(r"leads as (\S+) under term (\d+)")
_FAILED = re.compile(r"ends: (the \w+|a delivery report) failed")
_ENDS = ("fenced: ", "leadership is revoked", "stopped")

# What the harvester itself reports, and what may be repeated because of it (I8). Injected faults cause some of them;
# on a starved machine they come by themselves, and are counted.
FENCED = "fenced"
_LATE, _LATE_NO_MORE = "_MSG_TIMED_OUT", "records that failed: recovered"
_LOSSES = (
    ("fenced: ", FENCED),
    ("ended unexpectedly", "shard lost"),
    ("killed: ", "shard killed"),
    ("what was on the wire did not settle", "drain cut short"),
    (_LATE, "delivery timed out"),
    ("the fate of records", "fate unknown"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the log."""

    at: float
    level: str
    message: str


def parse(lines: Iterable[str]) -> Iterator[Line]:
    """The JSON lines among these; a line that was cut by the end of its process is skipped."""
    for text in lines:
        if not text.startswith("{"):
            continue
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:
            continue
        yield Line(datetime.fromisoformat(line["at"]).timestamp(), line["level"], line["message"])


def has_joined(lines: Iterable[str]) -> bool:
    """Whether it is a member of the leader group by its own account, or was one."""
    return any(line.message.startswith("joined group ") for line in parse(lines))


def is_leading(lines: Iterable[str]) -> int | None:
    """The term that it leads under by its own account; None when it does not lead."""
    term = None
    for line in parse(lines):
        if found := _LEADS.match(line.message):
            term = int(found[2])
        elif line.message.startswith(_ENDS):
            term = None
    return term


def leaderships(
    name: str,
    lines: Iterable[str],
    ended: float,
    frozen: Sequence[tuple[float, float]] = (),
    delivery: str = AT_LEAST_ONCE,
) -> Iterator[Led]:
    """Its leaderships.

    `ended` is when it was killed or told to stop (from then on it only finishes what is on the wire, and does not say
    when it has given leadership up), `frozen` when its supervisor stood still.
    """
    open_: tuple[str, int, float] | None = None

    def close(at: float) -> Iterator[Led]:
        if open_ is not None:
            leader_id, term, began = open_
            inside = tuple(span for span in frozen if began <= span[0] < at)
            yield Led(name, leader_id, term, began, max(began, at), inside, delivery)

    for line in parse(lines):
        found = _LEADS.match(line.message)
        if found or line.message.startswith(_ENDS):
            yield from close(min(line.at, ended))
            open_ = (found[1], int(found[2]), line.at) if found else None
    yield from close(ended)


def losses(name: str, lines: Iterable[str]) -> Iterator[Fault]:
    """What it reports to have lost. Of deliveries that time out it says the first, and when it was over."""

    def lost(kind: str, began: float, ended: float) -> Fault:
        return Fault(kind, name, began, ended, repeats=True, names=frozenset({name}))

    late_since: float | None = None
    last_at = 0.0
    for line in parse(lines):
        last_at = line.at
        for text, kind in _LOSSES:
            if text in line.message:
                yield lost(kind, line.at, line.at)
        if _LATE in line.message and late_since is None:
            late_since = line.at
        elif line.message.startswith(_LATE_NO_MORE) and late_since is not None:
            yield lost("delivery timed out", late_since, line.at)
            late_since = None
    if late_since is not None:
        yield lost("delivery timed out", late_since, last_at)


def failures(name: str, lines: Iterable[str]) -> Iterator[str]:
    """What must not happen at all: a thread of a shard that failed, and ended its process."""
    for line in parse(lines):
        if _FAILED.match(line.message):
            yield f"{name}: a shard {line.message}"


def last_error(lines: Iterable[str]) -> str:
    """The last line of level error, for a message."""
    found = [line.message for line in parse(lines) if line.level == "error"]
    return found[-1] if found else "it said nothing"
