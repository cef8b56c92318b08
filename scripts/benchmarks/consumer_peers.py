"""`consumer-peers`: other consumers beside ours on one topic: aiokafka, and Confluent's Parallel Consumer.

What cannot be had is left out, which is said. CPU is that of the whole process, its start included.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from harvester.stack import java
from scripts.benchmarks._procs import ended_cpu_s
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import run
from scripts.benchmarks.coordination import PARTITIONS, per_s, settings_for, topics
from scripts.benchmarks.peers import _tools

AT_ONCE, WAIT_S = 8, 0.002
_LONGER = 10
_TIMEOUT_S = 300.0
_CONSUMERS = "scripts.benchmarks._consumers:"
Rate = Callable[[int, float], float]  # records a second of so many records, each of which takes so long


def consumer_peers(bench: Bench, samples: Samples) -> None:
    """One record at a time, without a handler; and handlers that wait, eight at once."""
    records = bench.share(_LONGER, least=200)
    waited = bench.share(0.2, least=200)
    with topics(bench, records) as used:
        topic = used[0]
        one = {"poll": _bare(bench, topic), **_ours(bench, topic, used, {"async": {}, "run": {}})}
        many = _ours(bench, topic, used, {"run": {"workers": AT_ONCE}})
        aiokafka = _tools.aiokafka()
        if aiokafka is None:
            bench.say("aiokafka is left out: pip does not find it")
        else:
            one["aiokafka"] = _of_program(bench, [*aiokafka], topic, ())
        if _tools.missing("mvn"):
            bench.say("the Parallel Consumer is left out: it needs Maven")
        else:
            source = _tools.HERE / "parallelconsumer" / "Parallel.java"
            command = [str(java.find().program), "-Xmx1g", "-cp", f"{_tools.jars('parallelconsumer')}/*", str(source)]
            one["parallel_consumer"] = _of_program(bench, command, topic, (1,))
            many["parallel_consumer"] = _of_program(bench, command, topic, (AT_ONCE,))
        for _ in bench.each_round():
            for name, rate in one.items():
                _measure(bench, samples, f"one.{name}", rate, records, 0.0)
            for name, rate in many.items():
                _measure(bench, samples, f"eight.{name}", rate, waited, WAIT_S)


def _measure(bench: Bench, samples: Samples, name: str, rate: Rate, records: int, wait_s: float) -> None:
    before_s = ended_cpu_s()
    per_second = rate(records, wait_s)
    samples.add(f"{name}.per_s", per_second)
    samples.add(f"{name}.cpu_us_per_record", (ended_cpu_s() - before_s) / records * 1e6)
    bench.say(f"{name}: {per_second:,.0f}/s")


def _bare(bench: Bench, topic: str) -> Rate:
    reading = {"bootstrap": bench.bootstrap, "topic": topic, "partitions": PARTITIONS, "batches": False}
    return lambda records, _: per_s(run(_CONSUMERS + "bare", records=records, **reading), records)


def _ours(bench: Bench, topic: str, used: list[str], ways: dict[str, dict[str, Any]]) -> dict[str, Rate]:
    def rate_of(how: str, changes: dict[str, Any]) -> Rate:
        def rate(records: int, wait_s: float) -> float:
            settings = settings_for(bench, topic, used) | changes
            found = run(
                _CONSUMERS + "handed",
                settings=settings, records=records, partitions=PARTITIONS, how=how, wait_s=wait_s,
            )  # fmt: skip
            return per_s(found, records)

        return rate

    return {f"ours_{how}": rate_of(how, changes) for how, changes in ways.items()}


def _of_program(bench: Bench, command: Sequence[str], topic: str, at_once: Sequence[int]) -> Rate:
    """Of one that is given servers, topic, a group and the number of records, and prints how many seconds it took."""

    def rate(records: int, wait_s: float) -> float:
        group = f"bench-{uuid.uuid4().hex[:12]}"
        rest = [str(each) for each in (*at_once, *([round(wait_s * 1000)] if at_once else []))]
        done = subprocess.run(
            [*command, bench.bootstrap, topic, group, str(records), *rest],
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{command[-1]}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return records / float(done.stdout.split()[-1])

    return rate


SCENARIOS = {
    "consumer-peers": Scenario(consumer_peers, "aiokafka and Confluent's Parallel Consumer beside ours"),
}
