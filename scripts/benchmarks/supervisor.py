"""`supervisor`: how many records a second one supervisor feeds, if shards cost nothing.

A real harvester leads, reads a backlog and dispatches it over real pipes; its shards are processes that settle every
row as soon as it arrives, without Kafka and without a DELETE. What counts is the CPU time of the process with the
supervisor, the mark loop and the election: on a machine with enough cores for the rest, it is what bounds the rate.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks._backlog import Rows, fill
from scripts.benchmarks._place import fresh
from scripts.benchmarks._relay import FULL
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import Gate, run

if TYPE_CHECKING:
    from harvester.relay.ipc import Shared
    from harvester.relay.shard import ShardSpec

_SHARDS = 8
_FIRST = 0.2  # the share of the records that is not measured: statements are prepared, batches grow
_PATIENCE_S = 300.0


def supervisor(bench: Bench, samples: Samples) -> None:
    """The same with many keys and with one: a key's records have no barrier here."""
    for number in bench.each_round():
        for name, keys in (("", 1_000), ("one_key.", 1)):
            with fresh(bench) as place:
                fill(place, Rows(bench.share(3), keys=keys))
                found = run(
                    "scripts.benchmarks.supervisor:feed",
                    path=str(place.config), shards=bench.shards[0] if bench.shards else _SHARDS, records=bench.share(3),
                    settings=[*FULL, *bench.settings],
                )  # fmt: skip
            for figure, value in found.items():
                samples.add(name + figure, value)
            if not name:
                cpu_us, here = found["cpu_us_per_record"], found["rate_per_s"]
                bench.say(f"round {number}: {cpu_us:.2f} us, {1e6 / cpu_us:,.0f}/s of a core; here {here:,.0f}")
    samples.use("all", FULL)


def feed(gate: Gate, *, path: str, shards: int, records: int, settings: list[str]) -> dict[str, float]:
    """A harvester in this process; its figures over all but the first part of the records."""
    from harvester import Harvester, load_config
    from harvester.relay import shard_pool

    vars(shard_pool)["main"] = settle_all
    config = load_config(Path(path), overrides=[*settings, f"limits.shards={shards}"])
    harvester = Harvester(config)
    settled, changed = 0, threading.Condition()
    first, last = int(records * _FIRST), records

    pool_settle = shard_pool.Slot.settle

    def settle(self: Any, ids: Any, count: int) -> int:
        nonlocal settled
        settled += count
        if settled >= first:
            with changed:
                changed.notify()
        return pool_settle(self, ids, count)

    shard_pool.Slot.settle = settle  # type: ignore[method-assign]

    def wait(count: int) -> tuple[float, float]:
        with changed:
            if not changed.wait_for(lambda: settled >= count, _PATIENCE_S):
                raise SystemExit(f"{settled} of {count} records were settled in {_PATIENCE_S:.0f} s")
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime

    gate.ready()
    harvester.start()
    try:
        began, spent = wait(first)
        began_at = settled
        ended, spent_then = wait(last)
        count = max(1, settled - began_at)  # few records may all have come at once
    finally:
        harvester.stop()
    cpu_s, took_s = max(1e-6, spent_then - spent), max(1e-6, ended - began)
    return {
        "rate_per_s": count / took_s,
        "cpu_us_per_record": 1e6 * cpu_s / count,
        "per_core_per_s": count / cpu_s,
        "cores": cpu_s / took_s,
    }


def settle_all(_spec: ShardSpec, inbound: int, outbound: int, _shared: Shared, _supervisor: int, _memory: int) -> int:
    """The entry of a shard that settles what it gets."""
    from harvester.delivery.decode import decode
    from harvester.relay.core import frames as f
    from harvester.relay.ipc import ShardPipe, widen

    widen(outbound)
    pipe = ShardPipe(inbound, outbound)
    pipe.send(f.Ready(os.getpid()))
    try:
        while True:
            for frame in pipe.receive():
                match frame:
                    case f.Dispatch():
                        pipe.send(f.Settled([record[0] for record in decode(frame.rows)]))
                    case f.Remark():
                        pipe.send(f.Remarked(frame.epoch, ()))
                    case f.Stop():
                        return 0
                    case _:
                        pass
    except EOFError:
        return 0


SCENARIOS = {
    "supervisor": Scenario(supervisor, "how many records one supervisor feeds, with shards that cost nothing"),
}
