"""What time it is in the log, between its records. Pure.

Log time stands still while nobody writes, and a claim may become stale in that silence (P28). Its candidates need to
know when. A record is read after it was appended, so its log time plus the local time since it was read is never ahead
of the clock of the broker that appended it. The best such estimate of all partitions is taken: where only the dead
wrote, those who write elsewhere tell the time; and who has just read the log goes on from where it ended, instead of
from now.

It is an estimate: brokers' clocks differ, by `clock_step` at most where all is well, and a local clock has its own
rate. So it says when to try. Whether a claim wins is said by the log alone.
"""

from __future__ import annotations

import math


class LogTime:
    """See the module's text."""

    def __init__(self) -> None:
        self._ahead_s: dict[int, float] = {}  # of the local clock, by partition of the log

    def read(self, partition: int, now_ms: int, now: float) -> None:
        """A record was read: the log time there is now this; `now` is local."""
        self._ahead_s[partition] = now_ms / 1000 - now

    def now_ms(self, now: float) -> int:
        """At a local time; 0 before the first record."""
        return max(0, math.floor(1000 * (now + max(self._ahead_s.values(), default=-now))))
