"""`growth` and `held`: show whether a large backlog, or one that cannot be vacuumed, slows the harvester down."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from scripts.benchmarks._backlog import Rows, fill, rate
from scripts.benchmarks._place import Place, fresh
from scripts.benchmarks._relay import FULL, Drain, drain, measure, relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, percentile, travel
from scripts.benchmarks.latency import lead

STEADY_PER_S = 2_000
_SIZES = """SELECT s.n_dead_tup, pg_relation_size(s.relid), pg_indexes_size(s.relid)
FROM pg_stat_user_tables s WHERE s.relname = 'outbox'"""
_POINTS = 200


def growth(bench: Bench, samples: Samples) -> None:
    """Ten times the backlog; then a steady load, once."""
    rows, part = Rows(bench.share(10)), bench.share(0.5)
    for number in bench.each_round():
        usual = drain(bench, Rows(bench.records))
        with fresh(bench) as place:
            fill(place, rows)
            done = measure(bench, place, rows.count, look=_sizes)
        samples.add("rate_per_s", done.rate_per_s)
        _compare(samples, done, usual, part)
        samples.note("backlog", _series(done.samples))
        bench.say(f"round {number}: last over first {samples.median('last_over_first'):.2f}")
    samples.use("all", FULL)
    _steady(bench, samples)


def held(bench: Bench, samples: Samples) -> None:
    """Another session holds an old snapshot, so that no dead row can be cleaned away."""
    rows, part = Rows(bench.share(2)), bench.share(0.2)
    for number in bench.each_round():
        usual = drain(bench, Rows(bench.records))
        with fresh(bench) as place:
            fill(place, rows)
            with _snapshot(place):
                done = measure(bench, place, rows.count, look=_sizes)
        samples.add("rate_per_s", done.rate_per_s)
        _compare(samples, done, usual, part)
        samples.note("backlog", _series(done.samples))
        bench.say(f"round {number}: last over first {samples.median('last_over_first'):.2f}")
    samples.use("all", FULL)


def _compare(samples: Samples, done: Drain, usual: Drain, part: int) -> None:
    """Beside an ordinary drain of the same minute, and beside as many of its own first records: drains begin slowly."""
    first, last = rate(done.log.appended_ms[:part]), rate(done.log.appended_ms[-part:])
    samples.add("first_per_s", first)
    samples.add("last_per_s", last)
    samples.add("drain_per_s", usual.rate_per_s)
    samples.add("last_over_first", last / first)
    samples.add("first_over_drain", first / usual.rate_per_s)
    samples.add("first_over_drains_first", first / rate(usual.log.appended_ms[:part]))


def _steady(bench: Bench, samples: Samples) -> None:
    seconds = (bench.minutes or 5) * 60
    with fresh(bench, notify=True) as place, relay(place, shards=bench.count, settings=bench.settings):
        lead(place)
        with watching(place) as sizes:
            journey = travel(place, Load(STEADY_PER_S, seconds, rows=4))
    latencies = journey.latencies_ms()
    part = max(1, len(latencies) // 5)
    samples.add("steady.sent_per_s", journey.per_s)
    samples.add("steady.p50_ms_first_fifth", percentile(latencies[:part], 0.5))
    samples.add("steady.p50_ms_last_fifth", percentile(latencies[-part:], 0.5))
    samples.add("steady.p99_ms", percentile(latencies, 0.99))
    for name, column in (("dead_rows", 1), ("table_mb", 2), ("indexes_mb", 3)):
        samples.add(f"steady.{name}_max", max((point[column] for point in sizes), default=0.0))
    samples.note("steady", _series(sizes))
    bench.say(f"steady {STEADY_PER_S}/s for {seconds:.0f} s: p99 {samples.median('steady.p99_ms'):.1f} ms")


@contextmanager
def watching(place: Place, every_s: float = 1.0) -> Iterator[list[tuple[float, ...]]]:
    """Looks at the table's size from a thread; the list grows."""
    import threading

    found: list[tuple[float, ...]] = []
    ended = threading.Event()

    def run() -> None:
        began = time.monotonic()
        with place.connect() as connection:
            while not ended.is_set():
                found.append(_sizes(connection, time.monotonic() - began))
                ended.wait(every_s)

    thread = threading.Thread(target=run, name="sizes", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@contextmanager
def _snapshot(place: Place) -> Iterator[None]:
    with place.connect() as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        yield


def _sizes(connection: psycopg.Connection[Any], at_s: float) -> tuple[float, ...]:
    row = connection.execute(_SIZES).fetchall()[0]
    return (at_s, float(row[0]), row[1] / 1e6, row[2] / 1e6)


def _series(points: Sequence[tuple[float, ...]]) -> dict[str, list[float]]:
    """Columns over time, thinned out."""
    chosen = points[:: max(1, len(points) // _POINTS)]
    names = ("at_s", "dead_rows", "table_mb", "indexes_mb")
    return {name: [round(point[column], 3) for point in chosen] for column, name in enumerate(names)}


SCENARIOS = {
    "growth": Scenario(growth, "a backlog ten times as large, first part against last; a steady load for minutes"),
    "held": Scenario(held, "a backlog while an old snapshot keeps vacuum from cleaning"),
}
