"""The part of the dashboard between figures and events: all shards, one of them, one key, or the quarantine. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import Status
from harvester_cli.dashboard.figures import one_line, short_count
from harvester_cli.dashboard.key import OneKey, key_lines
from harvester_cli.dashboard.lines import fit
from harvester_cli.dashboard.shards import figures, in_words, table


@dataclass(frozen=True, slots=True)
class OneShard:
    """All figures of the shard of this index, and the events that name it."""

    index: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How much went to quarantine, and through which shards."""


Detail = OneShard | OneKey | Quarantine


@dataclass(frozen=True, slots=True)
class Block:
    """A rule's title and notes, how many lines are wanted below its first, and what draws at most so many."""

    title: str
    notes: Sequence[str]
    lines_wanted: int
    draw: Callable[[int], list[Text]]


def block(status: Status, detail: Detail | None, width: int, *, ascii_only: bool) -> Block:
    """What is to be drawn; `draw(n)` gives one line and at most `n` more."""
    if detail is None:
        return Block(
            "shards",
            [in_words(status.shards)],
            len(status.shards),
            lambda rows: table(status.shards, width, rows, ascii_only=ascii_only),
        )
    match detail:
        case OneShard(index):
            title, notes, lines = _one_shard(status, index)
        case OneKey():
            title, notes, lines = "key", ["esc: the shards"], key_lines(detail)
        case Quarantine():
            title, notes, lines = _quarantine(status)
    fitted = [fit(line, width, ascii_only=ascii_only) for line in lines]
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
        lines.append(Text(f"moves {shard.rate_per_s / total:.0%} of the records of this harvester"))
    named = re.compile(rf"\bshard {index}\b")
    about = [event for event in status.events if named.search(event.text)]
    lines.extend(Text(f"{event.at:%H:%M:%S}  {one_line(event.text)}", style="dim") for event in about[-3:])
    return title, notes, lines


def _quarantine(status: Status) -> tuple[str, list[str], list[Text]]:
    standing = status.backlog.quarantine if status.backlog is not None else None
    known = "not known" if standing is None else f"{standing:,}"
    lines = [
        Text(f"in the quarantine table now: {known}"),
        Text(f"put there by this process since its start: {status.quarantined:,}"),
    ]
    by_shard = [shard for shard in status.shards if shard.quarantined]
    if by_shard:
        listed = ", ".join(f"shard {shard.index}: {short_count(shard.quarantined)}" for shard in by_shard)
        lines.append(Text(listed))
    parked = [shard for shard in status.shards if shard.parked]
    if parked:
        listed = ", ".join(f"shard {shard.index}: {short_count(shard.parked)}" for shard in parked)
        lines.append(Text(f"keys that wait for a retry, and may follow: {listed}"))
    lines.append(Text("`harvester dead list` names them with their errors; `harvester dead redrive` puts them back"))
    return "quarantine", ["esc: the shards"], lines
