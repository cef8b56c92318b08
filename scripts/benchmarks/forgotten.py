"""`gaps` and `dead-head`: the cost of a forgotten writing transaction, measured in alternation with and without it.

While it lasts no gap in the ids closes, and vacuum removes no row that was deleted after it began. Autovacuum, which
would try each minute all the same, is off for the outbox in both cases: what it takes is not the relay's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from scripts.benchmarks import _procs
from scripts.benchmarks._backlog import Rows, fill, settle
from scripts.benchmarks._place import Place, fresh
from scripts.benchmarks._relay import FULL, Relay, relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, percentile, travel, wait_empty
from scripts.benchmarks.latency import lead

_BURSTS = 7
_FIGURES = ("burst_s", "p50_ms", "idle_cpu_percent", "idle_server_cpu_percent")
_WITH_GAPS = """
INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value)
SELECT clock_timestamp(), %s, 'k-' || i %% 1000, rpad(i || ':' || nextval('outbox_id_seq'), 200, '.')
FROM generate_series(1, %s) AS i"""


def gaps(bench: Bench, samples: Samples) -> None:
    """As many gaps as rows; then bursts that leave more of them, single records, and nothing at all."""
    for number in bench.each_round():
        found = {}
        for name in _order(number):
            with (
                _place(bench, name) as place,
                relay(place, shards=bench.count, settings=[*FULL, *bench.settings]) as running,
            ):
                lead(place)
                for _ in range(6):
                    _burst(place, bench.share(0.1))
                found[name] = _measure(bench, place, running)
        _compare(bench, samples, number, found)


def dead_head(bench: Bench, samples: Samples) -> None:
    """Five times the ordinary backlog has gone, and left its dead rows; then the harvester is started again."""
    for number in bench.each_round():
        found = {}
        for name in _order(number):
            with _place(bench, name) as place:
                settings = [*FULL, *bench.settings]
                with relay(place, shards=bench.count, settings=settings):
                    lead(place)
                    fill(place, Rows(bench.share(5)))
                    wait_empty(place)
                    time.sleep(3)  # it rests, and knows that all is settled
                settle(place)
                with relay(place, shards=bench.count, settings=settings) as running:
                    lead(place)
                    found[name] = _measure(bench, place, running)
        _compare(bench, samples, number, found)


@contextmanager
def _place(bench: Bench, name: str) -> Iterator[Place]:
    """An outbox; "beside": beside a writer that forgot to commit."""
    with fresh(bench) as place:
        with place.connect() as connection:
            connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)")
        with _writer(place) if name == "beside" else nullcontext():
            yield place


@contextmanager
def _writer(place: Place) -> Iterator[None]:
    with place.connect() as connection, connection.transaction(force_rollback=True):
        connection.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES (%s, 'forgotten')", (place.name,))
        yield


def _order(number: int) -> tuple[str, ...]:
    return ("alone", "beside") if number % 2 else ("beside", "alone")


def _burst(place: Place, rows: int) -> float:
    """Seconds until so many rows, written by one statement, have gone. Looks at these alone: dead ones cost time."""
    with place.connect() as connection:
        above = connection.execute("SELECT last_value FROM outbox_id_seq").fetchall()[0][0]
        connection.execute(_WITH_GAPS, (place.name, rows))
        began = time.monotonic()
        while connection.execute("SELECT 1 FROM outbox WHERE id > %s LIMIT 1", (above,)).fetchone() is not None:
            time.sleep(0.01)
        return time.monotonic() - began


def _measure(bench: Bench, place: Place, running: Relay) -> dict[str, float]:
    seconds = bench.seconds or 10.0
    found = {"burst_s": statistics.median(_burst(place, bench.share(0.2)) for _ in range(_BURSTS))}
    journey = travel(place, Load(50, seconds, writers=1))
    found["p50_ms"] = percentile(journey.latencies_ms(), 0.5)
    time.sleep(2)  # no gap is young any more
    server = _server(place)
    before = _procs.cpu(running.pid), _procs.cpu(server), time.monotonic()
    time.sleep(seconds)
    running.check()
    span = time.monotonic() - before[2]
    found["idle_cpu_percent"] = _procs.cpu(running.pid).since(before[0]).all_s / span * 100
    found["idle_server_cpu_percent"] = _procs.cpu(server).since(before[1]).all_s / span * 100
    return found


def _server(place: Place) -> int:
    """The PostgreSQL server's process, if it runs on this machine."""
    with place.connect() as connection:
        return int(connection.execute("SELECT pg_read_file('postmaster.pid')").fetchall()[0][0].splitlines()[0])


def _compare(bench: Bench, samples: Samples, number: int, found: dict[str, dict[str, float]]) -> None:
    for figure in _FIGURES:
        for name in ("alone", "beside"):
            samples.add(f"{figure}.{name}", found[name][figure])
    for figure in ("burst_s", "p50_ms"):
        samples.add(f"{figure}.ratio", found["beside"][figure] / found["alone"][figure])
    samples.use("all", FULL)
    figures = ", ".join(f"{figure} {samples.median(f'{figure}.ratio'):.2f}" for figure in ("burst_s", "p50_ms"))
    bench.say(f"round {number}: beside a forgotten writer {figures} of the time without")


SCENARIOS = {
    "gaps": Scenario(gaps, "60,000 gaps in the ids under a forgotten writing transaction, and without it"),
    "dead-head": Scenario(dead_head, "500,000 dead rows under a forgotten writing transaction, and without it"),
}
