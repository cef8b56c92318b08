"""`exactly-once`: transactions compared with single acknowledgements, in the same rounds."""

from __future__ import annotations

from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._place import fresh
from scripts.benchmarks._relay import FULL, drain, relay
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, percentile, travel
from scripts.benchmarks.drain import ONCE
from scripts.benchmarks.latency import SHARES, lead

RATES = (200, 1_000, 5_000)
_WARM = 5  # times the length of a phase, until the broker's compiler has seen enough


def exactly_once(bench: Bench, samples: Samples) -> None:
    """A backlog in both modes, one of a single key, and the way of a record; defaults for the last."""
    rows, hot = Rows(bench.records), Rows(bench.records, keys=1)
    for number in bench.each_round():
        least = drain(bench, rows)
        once = drain(bench, rows, settings=(*FULL, *ONCE))
        default = drain(bench, rows, settings=ONCE)
        single = drain(bench, hot, settings=(*FULL, *ONCE))
        samples.add_all(once.figures())
        samples.add("at_least_once_per_s", least.rate_per_s)
        samples.add("ratio", once.rate_per_s / least.rate_per_s)
        samples.add("defaults_per_s", default.rate_per_s)
        samples.add("hot_key_per_s", single.rate_per_s)
        bench.say(f"round {number}: {once.rate_per_s:,.0f}/s, one key {single.rate_per_s:,.0f}/s")
        with fresh(bench, notify=True) as place, relay(place, shards=bench.count, settings=(*bench.settings, *ONCE)):
            lead(place)
            if number == 1:  # small transactions are not what drains have warmed up
                travel(place, Load(1_000, _WARM * (bench.seconds or 20)))
            for per_s in RATES:
                journey = travel(place, Load(per_s, bench.seconds or 20, rows=5 if per_s > 1_000 else 1))
                for name, share in SHARES.items():
                    value = percentile(journey.latencies_ms(), share)
                    samples.add(name if per_s == 1_000 else f"by_rate.{name}.{per_s}", value)
                    late = percentile(journey.latencies_ms(from_commit=True), share)
                    samples.add(f"from_commit.{name}.{per_s}", late)
                bench.say(f"round {number}: {per_s}/s: p50 {percentile(journey.latencies_ms(), 0.5):.1f} ms")
    samples.use("drains", (*FULL, *ONCE))
    samples.use("latency", ONCE)


SCENARIOS = {
    "exactly-once": Scenario(exactly_once, "a backlog, one key and the way of a record, in transactions"),
}
