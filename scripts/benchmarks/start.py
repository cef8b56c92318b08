"""`start`: from the command to its first record, the memory of all its processes, and how soon a killed shard is back.

One row waits in the outbox when the command starts. The broker begins an election at once
(`group.initial.rebalance.delay.ms` 0; 3 s by default), so the time contains next to no waiting for it. Memory is the
sum of PSS once 2,000 records are through. A shard is back when its successor has a session with the database.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psycopg

from scripts.benchmarks import _procs
from scripts.benchmarks._backlog import Rows, fill
from scripts.benchmarks._place import fresh
from scripts.benchmarks._relay import relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import wait_empty, wait_until
from scripts.benchmarks.resume import appended_s

_RECORDS = 2_000
_LOOK_S = 0.003


def start(bench: Bench, samples: Samples) -> None:
    """Each round starts a harvester of its own."""
    for number in bench.each_round():
        with fresh(bench) as place, place.connect() as connection:
            fill(place, Rows(1))
            began_s = time.time()
            with relay(place, shards=bench.count, settings=bench.settings) as running:
                wait_empty(place)
                first_s = appended_s(place)[0] - began_s
                fill(place, Rows(_RECORDS))
                wait_empty(place)
                pss_mb = _procs.tree_pss_mb(running.pid)
                shards = {pid: _name(pid) for pid in _procs.tree(running.pid) if _name(pid).startswith("shard-")}
                if len(shards) != bench.count:
                    raise SystemExit(f"{len(shards)} shards instead of {bench.count}")
                each_mb = sum(map(_procs.pss_mb, shards)) / len(shards)
                supervisor_mb = _procs.pss_mb(running.pid)
                back_s = _back_s(connection, next(pid for pid, name in shards.items() if name == "shard-0"))
                running.check()
        figures = {"first_record_s": first_s, "shard_back_s": back_s, "pss_mb": pss_mb}
        samples.add_all(figures | {"pss_mb_supervisor": supervisor_mb, "pss_mb_shard": each_mb})
        bench.say(
            f"round {number}: first record after {first_s:.2f} s, a shard back after {back_s:.2f} s, {pss_mb:.0f} MB"
        )


def _back_s(connection: psycopg.Connection[tuple[int]], pid: int) -> float:
    before = _session(connection)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _session(connection) - before, "a new shard", look_s=_LOOK_S)
    return time.monotonic() - killed_s


def _session(connection: psycopg.Connection[tuple[int]]) -> set[int]:
    """Backends of shard 0."""
    query = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'harvester %/0'"
    )
    return {row[0] for row in connection.execute(query)}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


SCENARIOS = {"start": Scenario(start, "the first record after a start, memory, and a killed shard's replacement")}
