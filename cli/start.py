"""`harvester start`."""

from __future__ import annotations


def start() -> None:
    """Not there yet."""
    raise NotImplementedError
