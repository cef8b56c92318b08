"""`consumer`: the ways in which a coordinated consumer hands records out, beside a bare one; and workers that wait."""

from __future__ import annotations

import uuid
from typing import Any

from harvester.coordination.fetcher import FULL_MS
from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._place import make_topic, remove_topics
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import run
from scripts.benchmarks.coordination import PARTITIONS, per_s, settings_for

WAYS = {"run": False, "async": False, "consume": True, "run_batches": True}  # whether beside `consume`
WAIT_S = 0.002
_LONGER = 20
_CONSUMERS = "scripts.benchmarks._consumers:"


def consumer(bench: Bench, samples: Samples) -> None:
    """Each way beside a bare loop of `poll` or `consume` before and after it; `rested`: beside one whose client rests
    no longer than ours when its queue is full."""
    records = bench.share(_LONGER, least=200)
    waited = bench.share(0.02, least=100)
    topic = f"bench-{uuid.uuid4().hex[:12]}"
    make_topic(bench, topic, PARTITIONS)
    used = [topic]

    def bare(*, batches: bool, **changes: int) -> float:
        reading = {"bootstrap": bench.bootstrap, "topic": topic, "records": records, "partitions": PARTITIONS}
        return per_s(run(_CONSUMERS + "bare", batches=batches, **reading, **changes), records)

    def handed(how: str, count: int, wait_s: float = 0.0, **changes: Any) -> float:
        settings = settings_for(bench, topic, used) | changes
        found = run(
            _CONSUMERS + "handed", settings=settings, records=count, partitions=PARTITIONS, how=how, wait_s=wait_s
        )
        return per_s(found, count)

    try:
        rows = Rows(records)
        run(
            "scripts.benchmarks._baselines:produce",
            bootstrap=bench.bootstrap, topic=topic, records=records, keys=rows.keys, size=rows.size,
        )  # fmt: skip
        for number in bench.each_round():
            for way, batches in WAYS.items():
                before = bare(batches=batches)
                rate = handed(way, records)
                after = bare(batches=batches)
                samples.add(f"{way}.per_s", rate)
                samples.add(f"{way}.bare_per_s", (before + after) / 2)
                samples.add(f"{way}.ratio", rate / ((before + after) / 2))
                samples.add(f"{way}.rested_ratio", rate / bare(batches=batches, rest_ms=FULL_MS))
            alone, many = handed("run", waited, WAIT_S), handed("run", 8 * waited, WAIT_S, workers=8)
            samples.add("workers.factor", many / alone)
            bench.say(f"round {number}: " + ", ".join(f"{way} {samples.median(f'{way}.ratio'):.2f}" for way in WAYS))
    finally:
        remove_topics(bench, *used)


SCENARIOS = {
    "consumer": Scenario(consumer, "ways to be handed records, beside a bare consumer; eight workers that wait"),
}
