"""What `harvester start` owes to a service manager: that it is ready, what it is doing, and that it makes progress."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harvester.harvester import Harvester
    from harvester.telemetry.notify import Notifier

_STATUS_EVERY_S = 2.0
_LOOKS = 4  # at the mark loop, in the time that the watchdog allows


def tell_manager(harvester: Harvester, notifier: Notifier, done: threading.Event) -> None:
    """Keep the manager informed until `done`; for a thread of its own.

    The watchdog hears only of turns of the mark loop: while that stands still, nothing is sent, however well this
    thread may be.
    """
    from harvester_cli.dashboard.plain import status_line

    notifier.widen_watchdog(least_watchdog_s(harvester.config.limits.heartbeat_timeout.total_seconds()))
    watchdog_s = notifier.watchdog_s
    every_s = _STATUS_EVERY_S if watchdog_s is None else min(_STATUS_EVERY_S, watchdog_s / _LOOKS)
    seen = harvester.progress()
    while not done.wait(every_s):
        notifier.status(status_line(harvester.status()).split(" ", 2)[-1])
        progress = harvester.progress()
        if watchdog_s is not None and progress != seen:
            seen = progress
            notifier.watchdog()


def least_watchdog_s(heartbeat_s: float) -> float:
    """The shortest watchdog that means a loop that is stuck: a statement may take 6 H, and then another."""
    return 12 * heartbeat_s + 10
