"""`pipeline`: the lake beside a bare copy of the same topic, the drain beside the relay, and ten times the data."""

from __future__ import annotations

from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._drained import drained_per_s
from scripts.benchmarks._harvest import Harvest, harvested
from scripts.benchmarks._lake import Warm, bare_copy_run, lake_run
from scripts.benchmarks._relay import drain
from scripts.benchmarks._scenario import Bench, Samples, Scenario

_BATCHES = 5
_SMALL = 200_000
_WARM = 0.3  # of what is measured,
_WARM_BATCHES = 10  # in so many batches: Spark's compiler and Java's have seen most of it by then
_TENFOLD = 10


def pipeline(bench: Bench, samples: Samples) -> None:
    """The lake and the copy in turns, in batches of the job's own size, on a backlog of which each is full.

    `lake_ratio` compares their rates, `bytes_ratio` the files of all records. `small_batch_s` is the lake's time for a
    batch of up to 200,000. What is done after the last batch, folding all states for one, is `after_s`. `spent_ms` says
    what the stream's batches were spent on. Every key is another one.
    """
    size = bench.share(100, least=2_000)
    most = max(1, size // _BATCHES)
    read_before = max(1_000, int(size * _WARM))
    keys = size
    with (
        harvested(bench, Harvest(size, keys, late=size // 4)) as topic,
        harvested(bench, Harvest(read_before, keys, late=read_before // 4)) as other,
    ):
        warm = Warm(other, max(100, read_before // _WARM_BATCHES))
        for number in bench.each_round():
            copied = bare_copy_run(bench, topic, most=most, warm=warm)
            done = lake_run(bench, topic, most=most, warm=warm)
            small = lake_run(bench, other, most=min(_SMALL, read_before // 5), warm=warm)
            samples.add("lake_per_s", done.per_s)
            samples.add("bare_copy_per_s", copied.per_s)
            samples.add("lake_ratio", done.per_s / copied.per_s)
            records = sum(done.sizes.get(name, 0) for name in ("silver", "repeats", "rejects"))
            samples.add("bytes_ratio", records / sum(copied.sizes.values()))
            samples.add("small_batch_s", small.batch_s)
            samples.add("after_s", done.after_s)
            samples.note("spent_ms", {"lake": dict(done.spent_ms), "bare_copy": dict(copied.spent_ms)})
            samples.note("sizes", {"lake": dict(done.sizes), "bare_copy": dict(copied.sizes)})
            rates = f"lake {done.per_s:,.0f}/s, bare copy {copied.per_s:,.0f}/s, small batch {small.batch_s:.2f} s"
            bench.say(f"round {number}: {rates}")
    _drain_beside_relay(bench, samples)


def _drain_beside_relay(bench: Bench, samples: Samples) -> None:
    rows = Rows(bench.share(10, least=10_000))
    for number in bench.each_round():
        relay, job = drain(bench, rows).rate_per_s, drained_per_s(bench, rows)
        samples.add("drain_per_s", job)
        samples.add("relay_per_s", relay)
        samples.add("drain_over_relay", job / relay)
        bench.say(f"round {number}: drain {job:,.0f}/s, relay {relay:,.0f}/s")


def growth(bench: Bench, samples: Samples) -> None:
    """Batches of one size, ten times as many of them: `cost_growth` is 1 where each record costs the same.

    Both read with all that belongs to the job, joining of small files as well.
    """
    small = bench.share(4, least=1_000)
    most = max(1, small // 2)
    with (
        harvested(bench, Harvest(small, small)) as few,
        harvested(bench, Harvest(small * _TENFOLD, small * _TENFOLD)) as many,
        harvested(bench, Harvest(small * 5, small)) as other,
    ):
        warm = Warm(other, most)
        for number in bench.each_round():
            short = lake_run(bench, few, most=most, warm=warm, compact_every=10)
            long = lake_run(bench, many, most=most, warm=warm, compact_every=10)
            samples.add("per_s.1", short.per_s)
            samples.add("per_s.10", long.per_s)
            samples.add("cost_growth", (long.seconds / long.records) / (short.seconds / short.records))
            bench.say(f"round {number}: {short.per_s:,.0f}/s, of ten times as many {long.per_s:,.0f}/s")


SCENARIOS = {
    "pipeline": Scenario(pipeline, "the lake beside a bare copy of the topic, the drain beside the relay", chosen=True),
    "pipeline-growth": Scenario(growth, "the lake with ten times the data", chosen=True),
}
