"""Measures the CPU use of processes, from /proc (proc_pid_stat(5)), and tunes the memory management of ours."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KEPT_BYTES = 4 << 20


def calm_memory() -> None:
    """Make the cyclic garbage collector run less often, and the C library reuse the memory of freed rows instead of
    returning it to the kernel: for our own processes, never for a host's.

    A relay makes and drops a few objects for every record, none of them in a cycle; every 700 allocations, the
    collector traverses live objects and finds nothing.

    glibc maps each block above a threshold separately, and unmaps it when it is freed: every frame of rows would cost a
    page fault for each 4 KB. It raises the threshold when a larger block is freed, and keeps twice as much free memory
    from then on (mallopt(3)). The block freed here is never touched, so it takes no memory. Without effect elsewhere.
    """
    bytes(_KEPT_BYTES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def parse_stat(text: str) -> tuple[int, int] | None:
    """When a process started and the CPU time of all its threads, in ticks, from /proc/<pid>/stat.

    None for a zombie, and for any other text.
    """
    # The second field is the program's name in parentheses and may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        if fields[0] in ("Z", "X", "x"):
            return None
        return int(fields[19]), int(fields[11]) + int(fields[12])
    except (IndexError, ValueError):
        return None


class ProcessWatch:
    """Measures how much CPU several processes used since the previous look."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int, int]] = {}

    def look(self, pids: Iterable[int], now: float) -> dict[int, float]:
        """Percent of one core since the previous look, by pid; `now` in seconds, monotonic.

        Processes that have died or are new have no value, and those not listed are forgotten. CPU time is counted in
        ticks of 10 ms: looks less than a second apart give coarse values.
        """
        seen: dict[int, tuple[float, int, int]] = {}
        usage: dict[int, float] = {}
        for pid in pids:
            try:
                ticks = parse_stat(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            if ticks is None:
                continue
            started, used = ticks
            seen[pid] = (now, started, used)
            at, started_before, used_before = self._last.get(pid, (now, started, used))
            if now > at and started == started_before:  # not of a later process with the same pid
                usage[pid] = max(0.0, 100 * (used - used_before) / _TICKS_PER_S / (now - at))
        self._last = seen
        return usage
