"""`harvester pump`."""

from __future__ import annotations


def pump() -> None:
    """Not there yet."""
    raise NotImplementedError
