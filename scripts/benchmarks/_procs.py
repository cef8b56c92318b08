"""Resource usage of a process tree from /proc: CPU including exited children, memory as PSS, wake-ups, files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """User and system time so far, in seconds: of the root alone, and of all others, exited children included."""

    root_s: float
    others_s: float

    @property
    def all_s(self) -> float:
        """Of the whole tree."""
        return self.root_s + self.others_s

    def since(self, earlier: Cpu) -> Cpu:
        """What was used between."""
        return Cpu(self.root_s - earlier.root_s, self.others_s - earlier.others_s)


def cpu(root: int) -> Cpu:
    """Of a process and everything it has started and still knows of."""
    stats = _stats()
    found = [stats[pid] for pid in _members(root, stats)]
    own = stats[root].own_ticks if root in stats else 0
    everything = sum(stat.own_ticks + stat.reaped_ticks for stat in found)
    return Cpu(own / _TICKS_PER_S, (everything - own) / _TICKS_PER_S)


def ended_cpu_s() -> float:
    """Of all children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree(root: int) -> list[int]:
    """The process and its descendants."""
    return _members(root, _stats())


def pss_mb(pid: int) -> float:
    """Memory of a process, pages that it shares counted in proportion; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    kilobytes = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
    return kilobytes / 1000 * 1.024


def tree_pss_mb(root: int) -> float:
    """Memory of the whole tree."""
    return sum(pss_mb(pid) for pid in tree(root))


def open_files(pid: int) -> int:
    """File descriptors; 0 when the process is gone."""
    try:
        return sum(1 for _ in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def wakeups(root: int) -> int:
    """How often the threads of the tree have gone to sleep, and so have been woken, so far."""
    return sum(_voluntary_switches(pid) for pid in tree(root))


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    own_ticks: int
    reaped_ticks: int


def _stats() -> dict[int, _Stat]:
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(errors="replace")
        except OSError:
            continue
        # The name, in parentheses, may itself hold spaces and parentheses (proc_pid_stat(5)).
        fields = text.rpartition(")")[2].split()
        own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        found[int(entry.name)] = _Stat(int(fields[1]), own, reaped)
    return found


def _members(root: int, stats: dict[int, _Stat]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)

    def walk(pid: int) -> Iterator[int]:
        yield pid
        for child in children.get(pid, ()):
            yield from walk(child)

    return list(walk(root)) if root in stats else []


def _voluntary_switches(pid: int) -> int:
    total = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            for line in Path(task.path, "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
    except OSError:
        return total
    return total
