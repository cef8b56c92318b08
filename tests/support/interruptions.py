"""Test hooks that end a job of the lake before one of its writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

BESIDE = ("lake.current", "lake.folded", "lake.compaction")
"""The writes that take place beside batches, at which no job ends."""


class Interrupter:
    """Lets so many writes pass, and never the one that is refused; remembers before which ones it was asked."""

    def __init__(self) -> None:
        self.left, self.refused, self.places = 0, "", list[str]()

    def hit(self, place: str, **_: Any) -> None:
        self.places.append(place)
        if place in BESIDE:
            return
        if self.left == 0 or place == self.refused:
            raise InterruptedError(place)
        self.left -= 1


def begin_again(
    interrupter: Interrupter, begin: Callable[[], None], alone: Iterable[str] = (), *, each: bool = True
) -> None:
    """Begin until it comes to its end: first with each write of `alone` refused, then, with `each`, one write further
    each time, so that the first write is repeated most often.
    """
    cuts = [(99, f"lake.{name}") for name in alone]
    if each:
        cuts += [(passed, "") for passed in range(20)]
    for interrupter.left, interrupter.refused in [*cuts, (99, "")]:
        with suppress(InterruptedError):
            begin()
            return


class CutOff:
    """A job that ends before one of its writes."""

    def __init__(self) -> None:
        self.place: str | None = None

    def hit(self, place: str, **_: Any) -> None:
        if place == self.place:
            raise InterruptedError(place)
