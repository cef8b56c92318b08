"""What the judge complains of. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from .history import Delivered

EXAMPLES = 5  # of each kind


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant, by example."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.text}"


def name(each: Delivered) -> str:
    """A record and where it stands."""
    return f"{each.key} #{each.seq} at {each.topic}[{each.partition}]@{each.offset}"
