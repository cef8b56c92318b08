"""`drain` and its variations: the number of shards and keys, the size of values."""

from __future__ import annotations

from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._relay import FULL, drain
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks.limits import DRIVER_BATCH, bare_relay, best_mark_delete, database

ONCE = ("delivery=exactly-once",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "cap_10000": FULL,
    "cap_1000": ("limits.mark_query_records=1000", "limits.max_in_flight_records=1000"),
    "defaults": (),
}
SHARDS = (1, 2, 4, 8, 16)
KEYS: dict[str, tuple[float, int, float]] = {  # share of the records, keys, skew
    "1": (0.02, 1, 0.0),
    "10": (0.2, 10, 0.0),
    "100": (1.0, 100, 0.0),
    "1000": (1.0, 1_000, 0.0),
    "100000": (1.0, 100_000, 0.0),
    "zipf": (0.2, 1_000, 1.0),
}
SIZES = (100, 1_000, 10_000, 100_000)
_MOST_BYTES = 100_000_000


def drain_a_backlog(bench: Bench, samples: Samples) -> None:
    """The figures at the top are with a cap of 10,000; those of the other settings stand under `variants`."""
    rows = Rows(bench.records)
    for number in bench.each_round():
        limit = best_mark_delete(bench, rows, samples)
        driver = database(bench, "mark_delete", rows, DRIVER_BATCH, "cursor")
        bare = bare_relay(bench, rows, rows.keys)  # as many in flight as there are keys, which is all the barrier lets
        for variant, settings in VARIANTS.items():
            done = drain(bench, rows, settings=settings)
            figures = done.figures() | {"limit_per_s": limit, "ratio": done.rate_per_s / limit}
            figures |= {"driver_limit_per_s": driver, "driver_ratio": done.rate_per_s / driver}
            figures |= {"bare_relay_per_s": bare, "bare_ratio": done.rate_per_s / bare}
            samples.use(variant, settings)
            samples.add_all(figures, "" if settings is FULL else f"variants.{variant}")
            bench.say(f"round {number}: {variant}: {done.rate_per_s:,.0f}/s, mark+delete alone {limit:,.0f}/s")


def shards(bench: Bench, samples: Samples) -> None:
    """The same backlog with different numbers of shards."""
    counts = bench.shards or SHARDS
    for number in bench.each_round():
        for count in counts:
            done = drain(bench, Rows(bench.records), shards=count)
            for name, value in done.figures().items():
                samples.add(f"{name}.{count}", value)
            bench.say(f"round {number}: {count} shards: {done.rate_per_s:,.0f}/s")
    medians = {count: samples.median(f"rate_per_s.{count}") for count in counts}
    compared = [medians[count] for count in counts if count in (4, 8, 16)] or list(medians.values())
    samples.add("slowest_over_best", min(compared) / max(medians.values()))
    samples.use("all", FULL)


def keys(bench: Bench, samples: Samples) -> None:
    """In both modes. At least once few keys are bound by their round trips, so they get fewer records."""
    for number in bench.each_round():
        for name, (share, count, skew) in KEYS.items():
            done = drain(bench, Rows(bench.share(share), keys=count, skew=skew))
            once = drain(bench, Rows(bench.records, keys=count, skew=skew), settings=(*FULL, *ONCE))
            for mode, found in (("", done), ("exactly_once.", once)):
                samples.add(f"{mode}rate_per_s.{name}", found.rate_per_s)
                samples.add(f"{mode}cpu_us_per_record.{name}", found.figures()["cpu_us_per_record"])
            bench.say(f"round {number}: keys {name}: {done.rate_per_s:,.0f}/s, exactly once {once.rate_per_s:,.0f}/s")
    samples.use("all", FULL)
    samples.use("exactly_once", (*FULL, *ONCE))


def size(bench: Bench, samples: Samples) -> None:
    """Values of different sizes, 100 MB of them at the most."""
    for number in bench.each_round():
        for value_bytes in SIZES:
            records = min(bench.records, _MOST_BYTES // value_bytes)
            done = drain(bench, Rows(records, size=value_bytes))
            samples.add(f"rate_per_s.{value_bytes}", done.rate_per_s)
            samples.add(f"mb_per_s.{value_bytes}", done.rate_per_s * value_bytes / 1e6)
            samples.add(f"rss_mb.{value_bytes}", done.pss_mb)
            bench.say(f"round {number}: {value_bytes} bytes: {done.rate_per_s:,.0f}/s")
    samples.use("all", FULL)


SCENARIOS = {
    "drain": Scenario(drain_a_backlog, "a backlog, beside what the database alone does in the same minute"),
    "shards": Scenario(shards, "a backlog with 1, 2, 4, 8 and 16 shards"),
    "keys": Scenario(keys, "a backlog with few keys, many, and a skew"),
    "size": Scenario(size, "values of 100 B to 100 kB"),
}
