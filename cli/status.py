"""`harvester status`."""

from __future__ import annotations


def status() -> None:
    """Not there yet."""
    raise NotImplementedError
