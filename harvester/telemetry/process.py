"""CPU and memory of processes, read from /proc (proc_pid_stat(5)), and how often the collector looks at ours.

A process that has died, or turned into a zombie, has no figures: None, never an error.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One look at one process. `started_ticks` tells it from a later process with the same pid."""

    started_ticks: int
    cpu_s: float  # user and system time of all its threads, since it started
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process used between two looks; `cpu_percent` is of one core, and None at the first look."""

    cpu_percent: float | None
    rss_bytes: int


def calm_collector() -> None:
    """Let the cyclic garbage collector look less often: for processes of our own, never for a host's.

    A relay makes and drops a few objects for every record, none of them in a cycle; the collector walks over those
    that are alive every 700 allocations and finds nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def parse_stat(text: str) -> ProcessSample | None:
    """Read the text of /proc/<pid>/stat; None for a zombie and for a text that is not one."""
    # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        if fields[0] in ("Z", "X", "x"):
            return None
        return ProcessSample(
            started_ticks=int(fields[19]),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
        )
    except (IndexError, ValueError):
        return None


def cpu_percent(earlier: ProcessSample, later: ProcessSample, elapsed_s: float) -> float | None:
    """CPU of one core between two samples; None when they are of two processes or no time has passed."""
    if earlier.started_ticks != later.started_ticks or elapsed_s <= 0:
        return None
    return max(0.0, 100 * (later.cpu_s - earlier.cpu_s) / elapsed_s)


def sample(pid: int) -> ProcessSample | None:
    """Look at the process `pid` now; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_stat(text)


class ProcessWatch:
    """Remembers the last look at each of a few processes, so that the next one tells what was used since."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, ProcessSample]] = {}

    def look(self, pids: Iterable[int], now: float) -> dict[int, ProcessUsage]:
        """Usage since the previous look, of those of `pids` that are alive; `now` in seconds, monotonic.

        Processes that are not asked for again are forgotten. CPU time is counted in ticks of 10 ms: looks
        less than a second apart give coarse percentages.
        """
        looks: dict[int, tuple[float, ProcessSample]] = {}
        usage: dict[int, ProcessUsage] = {}
        for pid in pids:
            seen = sample(pid)
            if seen is None:
                continue
            looks[pid] = (now, seen)
            before = self._last.get(pid)
            percent = cpu_percent(before[1], seen, now - before[0]) if before else None
            usage[pid] = ProcessUsage(cpu_percent=percent, rss_bytes=seen.rss_bytes)
        self._last = looks
        return usage
