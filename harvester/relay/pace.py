"""How long the mark loop waits: between empty marks, and after trouble. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NOTIFIED_CEILING_S = 1.0  # how long to wait between empty marks when the trigger wakes us anyway


@dataclass(frozen=True, slots=True)
class Pace:
    """Waiting times in seconds."""

    mark_backoff_s: float
    mark_backoff_max_s: float
    io_error_backoff_s: float
    statement_timeout_s: float
    writes: bool = True  # marks are written into the table; else they are remembered here alone


def idle_wait_s(idle: int, pace: Pace, notified: bool) -> float:
    """How long to wait before the next mark after `idle` empty ones in a row: doubling from floor to ceiling."""
    if idle <= 0:
        return 0.0
    ceiling_s = max(pace.mark_backoff_max_s, _NOTIFIED_CEILING_S) if notified else pace.mark_backoff_max_s
    return min(ceiling_s, pace.mark_backoff_s * 2.0 ** min(idle - 1, 40))
