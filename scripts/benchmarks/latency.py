"""`latency`, `idle` and `writers`: latency, idle load and the writers' overhead without a backlog."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import psycopg

from scripts.benchmarks import _procs
from scripts.benchmarks._place import Place, fresh
from scripts.benchmarks._relay import Relay, relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, percentile, travel, wait_empty, write_alone

RATES = (10, 200, 1_000, 5_000)
SHARES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
WRITERS_PER_S = 500
TRIGGER = (True, False)  # whether there is the trigger that wakes the leader
_STATEMENTS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"


def latency(bench: Bench, samples: Samples) -> None:
    """Default settings and the trigger. `from_commit` counts from when the writer knew of its commit."""
    for number in bench.each_round():
        with fresh(bench, notify=True) as place, relay(place, shards=bench.count, settings=bench.settings):
            lead(place)
            for per_s in RATES:
                rows = 5 if per_s > 1_000 else 1
                journey = travel(place, Load(per_s, bench.seconds or 20, rows=rows))
                for name, share in SHARES.items():
                    samples.add(f"{name}.{per_s}", percentile(journey.latencies_ms(), share))
                for name, share in SHARES.items():
                    samples.add(
                        f"from_commit.{name}.{per_s}", percentile(journey.latencies_ms(from_commit=True), share)
                    )
                samples.add(f"sent_per_s.{per_s}", journey.per_s)
                bench.say(f"round {number}: {per_s}/s: p50 {samples.median(f'p50_ms.{per_s}'):.1f} ms")


def idle(bench: Bench, samples: Samples) -> None:
    """An empty table, with the trigger; and without it, under `without_notify`."""
    for number in bench.each_round():
        for notify in TRIGGER:
            with (
                fresh(bench, notify=notify) as place,
                relay(place, shards=bench.count, settings=bench.settings) as running,
            ):
                lead(place)
                figures = _rest(bench, place, running)
                samples.add_all(figures, "" if notify else "without_notify")
                bench.say(f"round {number}: {'with' if notify else 'without'} the trigger: {figures}")


def _rest(bench: Bench, place: Place, running: Relay) -> dict[str, float]:
    """Half of a minute to come to rest, half to measure, then the first record."""
    seconds = bench.seconds or 30.0
    time.sleep(seconds)
    with ExitStack() as stack:
        # A session of the database itself would count as its statements.
        connection = stack.enter_context(_admin(place))

        def statements() -> int:
            return int(connection.execute(_STATEMENTS, (place.name,)).fetchall()[0][0])

        before = statements(), _procs.cpu(running.pid), _procs.wakeups(running.pid), time.monotonic()
        time.sleep(seconds)
        running.check()
        span = time.monotonic() - before[3]
        figures = {
            "statements_per_s": (statements() - before[0]) / span,
            "cpu_percent": _procs.cpu(running.pid).since(before[1]).all_s / span * 100,
            "wakeups_per_s": (_procs.wakeups(running.pid) - before[2]) / span,
        }
    return figures | {"first_record_ms": travel(place, Load(1, 1, writers=1)).latencies_ms()[0]}


def writers(bench: Bench, samples: Samples) -> None:
    """INSERTs of an application, without a harvester and trigger, then with both."""
    load = Load(WRITERS_PER_S, bench.seconds or 20, writers=2)
    for number in bench.each_round():
        found: dict[str, list[float]] = {}
        for name in ("off", "on"):
            with ExitStack() as stack:
                place = stack.enter_context(fresh(bench, notify=name == "on"))
                if name == "on":
                    stack.enter_context(relay(place, shards=bench.count, settings=bench.settings))
                    lead(place)
                sent = write_alone(place, load)
                found[name] = [(returned - at) / 1e6 for _, at, returned in sent]
            samples.add(f"insert_p50_ms.{name}", percentile(found[name], 0.5))
            samples.add(f"insert_p99_ms.{name}", percentile(found[name], 0.99))
        samples.add("insert_ratio", percentile(found["on"], 0.5) / percentile(found["off"], 0.5))
        samples.add("insert_ratio_p99", percentile(found["on"], 0.99) / percentile(found["off"], 0.99))
        bench.say(f"round {number}: INSERT {samples.median('insert_ratio'):.2f} x")


def lead(place: Place) -> None:
    """Until the harvester leads and its path is warm: a little traffic has gone through."""
    write_alone(place, Load(50, 0.5, writers=1))
    wait_empty(place)


def _admin(place: Place) -> psycopg.Connection[Any]:
    return psycopg.connect(place.admin_dsn, autocommit=True)


SCENARIOS = {
    "latency": Scenario(latency, "commit to consumer at 10, 200, 1,000 and 5,000 records/s"),
    "idle": Scenario(idle, "statements, CPU and wake-ups on an empty table, and the first record after it"),
    "writers": Scenario(writers, "the application's INSERT with the harvester on, against off"),
}
