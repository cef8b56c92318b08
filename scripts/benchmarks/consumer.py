"""`consumer`: the ways in which a coordinated consumer hands records out, beside a bare one; and workers that wait."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from harvester.coordination.fetcher import FULL_MS
from scripts.benchmarks._procs import ended_cpu_s
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import Worker, run
from scripts.benchmarks.coordination import PARTITIONS, per_s, settings_for, topics

WAYS = {"run": False, "async": False, "consume": True, "run_batches": True, "arrow": True}  # whether beside `consume`
WAIT_S = 0.002
POLICY = {"on_error": "dead-letter", "attempts": 5, "backoff_s": 0.1, "heartbeat_interval_s": 1.0}
_REFUSED = 100  # its offset
_WORKED = 5_000  # records of each partition
NO_WORK: Mapping[str, Any] = {}
_LONGER = 20
_CONSUMERS = "scripts.benchmarks._consumers:"


def consumer(bench: Bench, samples: Samples) -> None:
    """Each way beside a bare loop of `poll` or `consume` before and after it; `rested`: beside one whose client rests
    no longer than ours when its queue is full. CPU is that of the whole process, its start included."""
    records = bench.share(_LONGER, least=200)
    waited = bench.share(0.02, least=100)
    with topics(bench, records) as used:
        topic = used[0]

        def bare(*, batches: bool, **changes: int) -> float:
            reading = {"bootstrap": bench.bootstrap, "topic": topic, "records": records, "partitions": PARTITIONS}
            return per_s(run(_CONSUMERS + "bare", batches=batches, **reading, **changes), records)

        def handed(how: str, count: int, wait_s: float = 0.0, **changes: Any) -> float:
            settings = settings_for(bench, topic, used) | changes
            found = run(
                _CONSUMERS + "handed", settings=settings, records=count, partitions=PARTITIONS, how=how, wait_s=wait_s
            )
            return per_s(found, count)

        for number in bench.each_round():
            for way, batches in WAYS.items():
                before = bare(batches=batches)
                used_s = [ended_cpu_s()]
                rate = handed(way, records)
                used_s.append(ended_cpu_s())
                after = bare(batches=batches)
                used_s.append(ended_cpu_s())
                ours_s, bare_s = (later - earlier for earlier, later in pairwise(used_s))
                samples.add(f"{way}.cpu_us_per_record", ours_s / records * 1e6)
                samples.add(f"{way}.bare_cpu_us_per_record", bare_s / records * 1e6)
                samples.add(f"{way}.per_s", rate)
                samples.add(f"{way}.bare_per_s", (before + after) / 2)
                samples.add(f"{way}.ratio", rate / ((before + after) / 2))
                samples.add(f"{way}.rested_ratio", rate / bare(batches=batches, rest_ms=FULL_MS))
            alone, many = handed("run", waited, WAIT_S), handed("run", 8 * waited, WAIT_S, workers=8)
            samples.add("workers.factor", many / alone)
            bench.say(f"round {number}: " + ", ".join(f"{way} {samples.median(f'{way}.ratio'):.2f}" for way in WAYS))


def poison(bench: Bench, samples: Samples) -> None:
    """Eight consumers, with a record at each that no handler takes and without, in turn.

    Behind such a record `max_open_records` may be handed out; then the partition waits for its last attempt. `wide` has
    room for all. `working` handlers wait for a millisecond over each record, as for an answer.
    """
    records = bench.share(_LONGER / 2, least=2_000)
    work = {"wait_s": 0.001, "most": min(_WORKED, records // PARTITIONS)}
    with topics(bench, records) as used:
        topic = used[0]

        def rate_per_s(refused_offset: int | None, work: Mapping[str, Any] = NO_WORK, **changes: int) -> float:
            settings = settings_for(bench, topic, used) | POLICY | changes
            name = _CONSUMERS + "one_of_many"
            with ExitStack() as stack:
                together = [
                    Worker(name, {"settings": settings, "refused_offset": refused_offset, **work})
                    for _ in range(PARTITIONS)
                ]
                for each in together:
                    stack.callback(each.end)
                for each in together:
                    each.wait_ready()
                for each in together:
                    each.start()
                found = [each.result() for each in together]
            used.append(f"{settings['group']}.dead-letters")
            took_s = max(ended for _, ended, _ in found) - min(began for began, _, _ in found)
            return float(sum(taken for _, _, taken in found) / took_s)

        for _ in bench.each_round():
            rates = {
                "without": rate_per_s(None),
                "with": rate_per_s(_REFUSED),
                "wide": rate_per_s(_REFUSED, max_open_records=records),
                "working": rate_per_s(_REFUSED, work),
                "working_without": rate_per_s(None, work),
            }
            samples.add_all({f"{name}_per_s": rate for name, rate in rates.items()})
            samples.add("ratio", rates["with"] / rates["without"])
            samples.add("wide_ratio", rates["wide"] / rates["without"])
            samples.add("working_ratio", rates["working"] / rates["working_without"])
            bench.say(
                f"with one that is refused at each of {PARTITIONS} consumers: {samples.median('ratio'):.2f},"
                f" with room for all {samples.median('wide_ratio'):.2f},"
                f" with handlers that work {samples.median('working_ratio'):.2f}"
            )


SCENARIOS = {
    "poison": Scenario(poison, "eight consumers that have each a record which no handler takes"),
    "consumer": Scenario(consumer, "ways to be handed records, beside a bare consumer; eight workers that wait"),
}
