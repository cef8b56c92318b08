"""`harvester init`."""

from __future__ import annotations


def init() -> None:
    """Not there yet."""
    raise NotImplementedError
