"""When to replace a shard, give up, let another machine try, and how long the marker waits. Pure.

Times in seconds are passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartBudget:
    """At most `budget` replacements of shards within `window_s`; beyond it the process ends, for systemd to act.

    Only deaths that nobody asked for count.
    """

    budget: int
    window_s: float
    _deaths: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> bool:
        """A shard died unasked. False: the budget is spent."""
        while self._deaths and now - self._deaths[0] >= self.window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        return len(self._deaths) <= self.budget

    def pause_s(self) -> float:
        """How long to wait before the next replacement: none after the first death, then longer each time."""
        return min(5.0, 0.1 * 2.0 ** (len(self._deaths) - 2)) if len(self._deaths) > 1 else 0.0


@dataclass(slots=True)
class HandOver:
    """Whether a leader that cannot reach its database should let another harvester try (P14).

    Once it has, it waits twice as long before the next time, so that a database that is down for all does not make
    leadership hop from one to the other; reaching it again starts over.
    """

    first_s: float
    longest_s: float
    _wait_s: float = 0.0
    _handed_s: float = 0.0  # for how long the database had been out of reach when it last handed over

    def due(self, unreachable_s: float) -> bool:
        """Whether to hand over now, after this long without the database (0: it is reachable)."""
        if unreachable_s < self._handed_s:  # it was reached in between
            self._wait_s = self._handed_s = 0.0
        wait_s = max(self._wait_s, self.first_s)
        if unreachable_s <= 0 or unreachable_s - self._handed_s < wait_s:
            return False
        self._wait_s, self._handed_s = min(self.longest_s, wait_s * 2), unreachable_s
        return True


_NOTIFIED_CEILING_S = 1.0  # how long to wait between empty marks when the trigger wakes us anyway


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Waiting times in seconds."""

    mark_backoff_s: float
    mark_backoff_max_s: float
    io_error_backoff_s: float
    statement_timeout_s: float
    writes: bool = True  # marks are written into the table; else they are remembered here alone


def idle_wait_s(idle: int, pace: RetryDelays, notified: bool) -> float:
    """How long to wait before the next mark after `idle` empty ones in a row: doubling from floor to ceiling."""
    if idle <= 0:
        return 0.0
    ceiling_s = max(pace.mark_backoff_max_s, _NOTIFIED_CEILING_S) if notified else pace.mark_backoff_max_s
    return min(ceiling_s, pace.mark_backoff_s * 2.0 ** min(idle - 1, 40))
