"""The clock that measures trust: it runs through suspend, so a machine that was suspended trusts nothing (P12)."""

from __future__ import annotations

import time


def clock_s() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
