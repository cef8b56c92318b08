"""`soak`: a large backlog, then a steady load for a long time; memory, files and sessions must not grow."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from scripts.benchmarks import _procs
from scripts.benchmarks._backlog import Rows, fill
from scripts.benchmarks._place import Place, fresh
from scripts.benchmarks._relay import FULL, Relay, Watch, relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, wait_empty, write_alone
from scripts.benchmarks.latency import lead

STEADY_PER_S = 1_000
_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name <> ALL ('{bench,bench writer}')"
)
_POINTS = 200


@dataclass(slots=True)
class Point:
    """One look: by process its memory in MB, and files and sessions of all together."""

    at_s: float
    pss_mb: dict[int, float]
    files: int
    sessions: int

    @property
    def total_mb(self) -> float:
        """Of the tree."""
        return sum(self.pss_mb.values())


@dataclass(slots=True)
class Phase:
    """What was seen during one phase."""

    points: list[Point] = field(default_factory=list)

    def edges(self) -> tuple[list[Point], list[Point]]:
        """The second tenth-to-third of the phase and its last third: what a start takes is no growth."""
        points = self.points
        third = max(1, len(points) // 3)
        begin = min(len(points) // 10, len(points) - 1)
        return points[begin : max(begin + 1, third)], points[-third:]

    def figures(self) -> dict[str, float]:
        """Last over first, of each kind; of processes, the one that grew most."""
        first, last = self.edges()
        lasting = set(first[0].pss_mb).intersection(*(point.pss_mb for point in (*first, *last)))
        growth = [
            statistics.fmean(point.pss_mb[pid] for point in last)
            / max(statistics.fmean(point.pss_mb[pid] for point in first), 0.001)
            for pid in lasting
        ]
        return {
            "pss_mb_first": statistics.fmean(point.total_mb for point in first),
            "pss_mb_last": statistics.fmean(point.total_mb for point in last),
            "pss_mb_max": max(point.total_mb for point in self.points),
            "pss_last_over_first": _ratio(first, last, "total_mb"),
            "process_pss_last_over_first_most": max(growth, default=1.0),
            "process_pss_last_over_first_least": min(growth, default=1.0),
            "files_last_over_first": _ratio(first, last, "files"),
            "sessions_last_over_first": _ratio(first, last, "sessions"),
            "processes_replaced": float(len(set(last[-1].pss_mb) - set(first[0].pss_mb))),
        }

    def series(self) -> dict[str, list[float]]:
        """Over time, thinned out."""
        chosen = self.points[:: max(1, len(self.points) // _POINTS)]
        names = ("at_s", "total_mb", "files", "sessions")
        return {name: [round(float(getattr(point, name)), 1) for point in chosen] for name in names}


def soak(bench: Bench, samples: Samples) -> None:
    """One harvester for all of it; `--minutes` is the length of the steady load, 30 by default."""
    seconds = (bench.minutes or 30) * 60
    with fresh(bench, notify=True) as place:
        fill(place, Rows(bench.share(10)))
        with relay(place, shards=bench.count, settings=[*FULL, *bench.settings]) as running:
            with place.connect() as connection:
                Watch(connection, running, above=0).first_settled()
            with _watching(place, running, every_s=1.0) as phase:
                wait_empty(place, timeout_s=120 + bench.records / 100)
            _add(samples, "backlog", phase)
            lead(place)
            with _watching(place, running, every_s=min(5.0, seconds / 30)) as phase:
                write_alone(place, Load(STEADY_PER_S, seconds, rows=2))
            _add(samples, "steady", phase)
            wait_empty(place)
            running.check()
    samples.use("all", FULL)
    bench.say(f"memory, last over first: {samples.median('steady.pss_last_over_first'):.2f}")


def _add(samples: Samples, name: str, phase: Phase) -> None:
    samples.add_all(phase.figures(), name)
    samples.note(name, phase.series())


def _ratio(first: Sequence[Point], last: Sequence[Point], name: str) -> float:
    before = statistics.fmean(getattr(point, name) for point in first)
    return statistics.fmean(getattr(point, name) for point in last) / max(before, 0.001)


@contextmanager
def _watching(place: Place, running: Relay, every_s: float) -> Iterator[Phase]:
    """Looks from a thread until the end, once at the least."""
    phase, ended, began = Phase(), threading.Event(), time.monotonic()

    def run() -> None:
        with place.connect() as connection:
            while True:
                pids = _procs.tree(running.pid)
                sessions = connection.execute(_SESSIONS, (place.name,)).fetchall()[0][0]
                memory = {pid: _procs.pss_mb(pid) for pid in pids}
                files = sum(_procs.open_files(pid) for pid in pids)
                phase.points.append(Point(time.monotonic() - began, memory, files, sessions))
                if ended.wait(every_s):
                    return

    thread = threading.Thread(target=run, name="soak", daemon=True)
    thread.start()
    try:
        yield phase
    finally:
        ended.set()
        thread.join()


SCENARIOS = {
    "soak": Scenario(soak, "memory, files and sessions over a large backlog and a long steady load", chosen=True),
}
