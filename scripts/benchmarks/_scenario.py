"""Scenarios, their input, and their figures.

A scenario is a function `(bench, samples)`; it measures `bench.rounds` times and adds each figure to `samples`, which
makes the medians. A module of this directory whose name does not begin with an underscore offers its scenarios in
`SCENARIOS`; `scripts/bench NAME` finds them there.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Bench:
    """Servers that run and are warm, and what the user asked for.

    `records` is the size of an ordinary backlog; scenarios that need more or fewer take a fixed multiple or fraction.
    `seconds` and `minutes` are None where each scenario's own length is wanted. `settings` are given to each harvester
    last, so they win over a scenario's own.
    """

    dsn: str
    bootstrap: str
    place: Path
    records: int
    rounds: int
    shards: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    seconds: float | None = None
    minutes: float | None = None

    def say(self, text: str) -> None:
        """A line of progress."""
        print(text, file=sys.stderr, flush=True)

    def share(self, factor: float, least: int = 20) -> int:
        """So many times the ordinary backlog."""
        return max(least, int(self.records * factor))

    def each_round(self) -> range:
        """The rounds, from 1."""
        return range(1, self.rounds + 1)

    @property
    def count(self) -> int:
        """How many shards where the number is not what is measured."""
        return self.shards[-1] if self.shards else 8


class Samples:
    """The values of each figure, one a round. A name may have dots: `rate_per_s.8` nests in the JSON."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.notes: dict[str, Any] = {}
        self.used: dict[str, Sequence[str]] = {}

    def add(self, name: str, value: float) -> None:
        """One more value of this figure."""
        self._values.setdefault(name, []).append(float(value))

    def add_all(self, values: dict[str, float], under: str = "") -> None:
        """Several; `under` is put before the names, with a dot."""
        for name, value in values.items():
            self.add(f"{under}.{name}" if under else name, value)

    def note(self, name: str, value: Any) -> None:
        """Something beside the figures, such as a series over time; the last one stays."""
        self.notes[name] = value

    def use(self, variant: str, settings: Sequence[str]) -> None:
        """Settings with which a variant was measured."""
        self.used[variant] = tuple(settings)

    def median(self, name: str) -> float:
        """The median of a figure so far."""
        return statistics.median(self._values[name])

    def rows(self) -> list[tuple[str, float, float, float, int]]:
        """(name, median, least, most, values) in the order in which the names came."""
        return [(name, statistics.median(v), min(v), max(v), len(v)) for name, v in self._values.items()]

    def figures(self) -> dict[str, Any]:
        """The medians, nested by the dots of their names."""
        found: dict[str, Any] = {}
        for name, median, *_ in self.rows():
            *parents, leaf = name.split(".")
            at = found
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = _rounded(median)
        return found


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario; `chosen`: only measured when it is named. `own_servers`: it starts what it needs itself."""

    run: Callable[[Bench, Samples], None]
    about: str
    chosen: bool = False
    own_servers: bool = False


def _rounded(value: float) -> float:
    """Four digits that mean something, and no decimals in large numbers."""
    if not math.isfinite(value):
        raise ValueError("a figure is not a number")
    if abs(value) >= 1000:
        return round(value)
    return float(f"{value:.4g}")
