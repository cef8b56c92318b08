"""`harvester verify`."""

from __future__ import annotations


def verify() -> None:
    """Not there yet."""
    raise NotImplementedError
