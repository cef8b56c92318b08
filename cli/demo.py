"""`harvester demo`."""

from __future__ import annotations


def demo() -> None:
    """Not there yet."""
    raise NotImplementedError
