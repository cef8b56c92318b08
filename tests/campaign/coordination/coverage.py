"""When which partition was held by somebody who could act, and by how many at once. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .history import History, Holding, Member, Span


def held(members: Iterable[Member]) -> dict[int, list[Holding]]:
    """By partition, in the order in which they begin."""
    found: dict[int, list[Holding]] = defaultdict(list)
    for member in members:
        for holding in member.holdings():
            found[holding.partition].append(holding)
    for holdings in found.values():
        holdings.sort(key=lambda each: each.began)
    return found


def gaps(holdings: Sequence[Holding], began: float, ended: float) -> Iterator[Span]:
    """When nobody held it, within these times."""
    covered = began
    for holding in holdings:
        if holding.began > covered:
            if holding.began >= ended:
                break
            yield covered, holding.began
        covered = max(covered, holding.ended)
    if covered < ended:
        yield covered, ended


def overlaps(holdings: Sequence[Holding], wakes_within_s: float) -> Iterator[tuple[float, Holding, Holding]]:
    """Where two held it at once, and for how long. Who has just woken up has a moment to read what happened."""
    awake = [(holding, holding.began + wakes_within_s if holding.resumed else holding.began) for holding in holdings]
    spans = sorted(((began, holding) for holding, began in awake if began < holding.ended), key=lambda each: each[0])
    latest: Holding | None = None
    for began, holding in spans:
        if latest is not None and latest.by != holding.by and began < latest.ended:
            yield min(latest.ended, holding.ended) - began, latest, holding
        if latest is None or holding.ended > latest.ended:
            latest = holding


def shares(history: History, holdings: Mapping[int, Sequence[Holding]], at: float) -> list[int]:
    """How many partitions each consumer holds that could act then."""
    counts = {member.name: 0 for member in history.members if member.able(at)}
    for found in holdings.values():
        for holding in found:
            if holding.began <= at < holding.ended and holding.by in counts:
                counts[holding.by] += 1
    return sorted(counts.values())


def fair_from(history: History, holdings: Mapping[int, Sequence[Holding]], began: float, ended: float) -> float | None:
    """The first moment within these at which everything is held, and shares differ by one at most."""
    moments = {began}
    for found in holdings.values():
        moments |= {each.began for each in found} | {each.ended for each in found}
    for at in sorted(moment for moment in moments if began <= moment < ended):
        counts = shares(history, holdings, at)
        if counts and sum(counts) >= history.partitions and counts[-1] - counts[0] <= 1:
            return at
    return None
