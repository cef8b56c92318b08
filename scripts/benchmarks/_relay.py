"""The harvester as a process with the real command line, and a drain measured from outside.

CPU counts from the first settled record until the outbox is empty, which excludes start and election. Both moments are
detected at the two ends of the table, by a few index probes a second, while nothing else of the benchmark runs.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from scripts.benchmarks import _procs
from scripts.benchmarks._backlog import Log, Rows, fill, read
from scripts.benchmarks._place import ROOT, Place, command, fresh
from scripts.benchmarks._scenario import Bench

START_S = 90.0
STUCK_S = 120.0
_STOP_S = 60.0
_LOOK_S = 0.02
_MEMORY_EVERY_S = 1.0
_WARM_MOST = 12

FULL = ("limits.mark_query_records=1000", "limits.max_in_flight_records=10000")
"""Settings for bulk: with them the figures of a drain are measured, unless it says otherwise."""


@dataclass(slots=True)
class Relay:
    """A running harvester."""

    process: subprocess.Popen[bytes]
    errors: Any

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.pid

    def check(self) -> None:
        """SystemExit when it has ended although nobody asked it to."""
        if self.process.poll() is not None:
            self.errors.seek(0)
            tail = self.errors.read()[-3000:]
            raise SystemExit(f"harvester start ended with exit code {self.process.returncode}\n{tail}")


@contextmanager
def relay(place: Place, *, shards: int, settings: Sequence[str] = ()) -> Iterator[Relay]:
    """`harvester start`, stopped in order at the end; killed when that takes too long."""
    extra = [part for setting in settings for part in ("--set", setting)]
    errors = place.config.with_suffix(".log").open("w+")
    process = subprocess.Popen(
        command("start", "-f", str(place.config), "--dashboard", "off", "--shards", str(shards), *extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd=ROOT,
        process_group=0,
    )
    try:
        yield Relay(process, errors)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its shards follow it by themselves
            process.wait()
        errors.close()
        place.config.with_suffix(".log").unlink()


@dataclass(slots=True)
class Drain:
    """What one drain came to."""

    records: int
    log: Log
    cpu: _procs.Cpu
    pss_mb: float
    samples: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def rate_per_s(self) -> float:
        """From the first record in Kafka to the last."""
        return self.log.rate_per_s

    def figures(self) -> dict[str, float]:
        """Under the names of the JSON line."""
        return {
            "rate_per_s": self.rate_per_s,
            "cpu_us_per_record": self.cpu.all_s / self.records * 1e6,
            "cpu_us_supervisor": self.cpu.root_s / self.records * 1e6,
            "rss_mb": self.pss_mb,
        }


Look = Callable[[psycopg.Connection[Any], float], tuple[float, ...]]


def drain(
    bench: Bench, rows: Rows, *, shards: int | None = None, settings: Sequence[str] = FULL, read_log: bool = True
) -> Drain:
    """Fill a fresh outbox and measure how the harvester empties it."""
    with fresh(bench) as place:
        fill(place, rows)
        return measure(bench, place, rows.count, shards=shards, settings=settings, read_log=read_log)


def measure(
    bench: Bench,
    place: Place,
    records: int,
    *,
    shards: int | None = None,
    settings: Sequence[str] = FULL,
    read_log: bool = True,
    above: int = 0,
    look: Look | None = None,
    look_every_s: float = 1.0,
) -> Drain:
    """Measure how the harvester empties a filled outbox; `above`: only rows with a larger id are waited for.

    `look` is called now and then with a session and the seconds since the start; what it returns is kept.
    """
    with (
        relay(place, shards=shards or bench.count, settings=[*settings, *bench.settings]) as running,
        place.connect() as connection,
    ):
        watch = Watch(connection, running, above)
        watch.first_settled()
        before, began = _procs.cpu(running.pid), time.monotonic()
        done = Drain(records, Log(), before, 0.0)
        memory_at = began + _MEMORY_EVERY_S / 2
        look_at = began
        while not watch.is_empty():
            now = time.monotonic()
            if now >= memory_at:
                done.pss_mb = max(done.pss_mb, _procs.tree_pss_mb(running.pid))
                memory_at = now + _MEMORY_EVERY_S
            if look is not None and now >= look_at:
                done.samples.append(look(connection, now - began))
                look_at = now + look_every_s
            time.sleep(_LOOK_S)
        done.cpu = _procs.cpu(running.pid).since(before)
        done.pss_mb = max(done.pss_mb, _procs.tree_pss_mb(running.pid))
        running.check()
    if read_log:
        done.log = read(place, records)
    return done


def warm(bench: Bench) -> None:
    """The broker's virtual machine compiles what it runs often, for a minute or so; the first rounds would pay for it.

    Drained again and again until two in a row are no faster than the best before them.
    """
    from scripts.benchmarks.limits import produce

    bench.say("warming up")
    produce(bench, Rows(bench.records))
    best, slower = 0.0, 0
    for _ in range(_WARM_MOST):
        rate_per_s = drain(bench, Rows(bench.records)).rate_per_s
        slower = slower + 1 if rate_per_s <= best else 0
        best = max(best, rate_per_s)
        if slower == 2:
            return


class Watch:
    """Tells from the table's two ends when the first row has gone and when the last."""

    def __init__(self, connection: psycopg.Connection[Any], running: Relay, above: int) -> None:
        self._connection, self._running, self._above = connection, running, above
        self._top: int | None = None
        self._moved_at = time.monotonic()
        self._looks = 0

    def first_settled(self) -> None:
        """Return once one of the first rows has gone."""
        first = self._value("SELECT min(id) FROM outbox WHERE id > %s", self._above)
        if first is None:
            return
        last = first + 99
        count = self._count(first, last)
        deadline = time.monotonic() + START_S
        while self._count(first, last) == count:
            self._running.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"the harvester settled nothing within {START_S:g} s")
            time.sleep(_LOOK_S / 2)
        self._moved_at = time.monotonic()

    def is_empty(self) -> bool:
        """Whether nothing is left. From the top: whatever is dead lies below."""
        top = self._value("SELECT id FROM outbox WHERE id > %s ORDER BY id DESC LIMIT 1", self._above)
        now = time.monotonic()
        if top is None:
            return True
        if top != self._top:
            self._top, self._moved_at = top, now
        elif now > self._moved_at + STUCK_S and not self._moves():
            raise SystemExit(f"the outbox has not moved for {STUCK_S:g} s")
        self._looks += 1
        if self._looks % 100 == 0:
            self._running.check()
        return False

    def _moves(self) -> bool:
        """Whether rows go although the last one stays; a slow look, and a rare one."""
        before = self._value("SELECT count(*) FROM outbox WHERE id > %s", self._above)
        deadline = time.monotonic() + STUCK_S / 10
        while time.monotonic() < deadline:
            if self._value("SELECT count(*) FROM outbox WHERE id > %s", self._above) != before:
                self._moved_at = time.monotonic()
                return True
            time.sleep(1)
        return False

    def _count(self, first: int, last: int) -> int:
        row = self._connection.execute("SELECT count(*) FROM outbox WHERE id BETWEEN %s AND %s", (first, last))
        return int(row.fetchall()[0][0])

    def _value(self, query: str, parameter: int) -> int | None:
        row = self._connection.execute(query, (parameter,)).fetchone()
        return None if row is None else row[0]
