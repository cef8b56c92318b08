"""The job `drain` on a filled outbox, in its own Spark, and for comparison the relay on the same rows.

Both rates count from the first record in Kafka to the last by the broker's clock, and so exclude the start of Spark
and the election; both topics are read back to verify that they hold each record once and each key's in order.
"""

from __future__ import annotations

from typing import Any

from scripts.benchmarks._backlog import Rows, fill, read
from scripts.benchmarks._lake import CONF
from scripts.benchmarks._place import fresh
from scripts.benchmarks._scenario import Bench
from scripts.benchmarks._worker import Gate, run

TASKS = 2


def drained_per_s(bench: Bench, rows: Rows) -> float:
    """Records per second of `harvester pipeline drain`. Its compiler is cold: who has a backlog starts it for that."""
    with fresh(bench) as place:
        fill(place, rows)
        sent = run(f"{__name__}:drain", config=str(place.config), bootstrap=place.bootstrap, conf=CONF)
        if sent != rows.count:
            raise SystemExit(f"the drain sent {sent:,} records of {rows.count:,}")
        return read(place, rows.count).rate_per_s


def drain(gate: Gate, **given: Any) -> int:
    """In the worker."""
    from pathlib import Path

    from harvester.config import load_config
    from harvester.pipeline.drain.job import DrainSettings
    from harvester.pipeline.drain.job import run as run_drain
    from harvester.pipeline.session import SessionSettings, session

    with session(SessionSettings("bench", None, given["conf"])) as spark:
        gate.ready()
        settings = DrainSettings(
            load_config(Path(given["config"])), {"bootstrap.servers": str(given["bootstrap"])}, tasks=TASKS
        )
        return run_drain(spark, settings).records
