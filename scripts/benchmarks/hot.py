"""`cold`, `hot-key` and `stuck`: the cost of one key for itself and for the others."""

from __future__ import annotations

from scripts.benchmarks._backlog import HOT, Rows, fill, settle
from scripts.benchmarks._place import Place, fresh, make_topic, remove_topics
from scripts.benchmarks._relay import FULL, measure
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import run
from scripts.benchmarks.limits import overall

_REFUSED = "ARRAY['source'], ARRAY['bench']"


def cold(bench: Bench, samples: Samples) -> None:
    """Half of the rows are of one key, mixed with a thousand others: when are the others done?"""
    rows = Rows(bench.share(0.2), hot=0.5)
    for number in bench.each_round():
        with fresh(bench) as place:
            fill(place, rows)
            log = measure(bench, place, rows.count).log
        began, whole = log.appended_ms[0], max(1, log.appended_ms[-1] - log.appended_ms[0])
        samples.add("cold_over_whole", (log.others_ms[-1] - began) / whole)
        samples.add("whole_s", whole / 1000)
        samples.add("rate_per_s", log.rate_per_s)
        bench.say(f"round {number}: the others left after {samples.median('cold_over_whole'):.2f} of the whole")
    samples.use("all", FULL)


def hot_key(bench: Bench, samples: Samples) -> None:
    """One key alone, against the same round trips made by the shortest loop."""
    rows = Rows(bench.share(0.05), keys=1, hot=1.0)
    for number in bench.each_round():
        with fresh(bench) as place:
            fill(place, rows)
            alone = run(
                "scripts.benchmarks._baselines:one_by_one", dsn=place.dsn, bootstrap=place.bootstrap, topic=place.name,
                records=rows.count,
            )  # fmt: skip
        limit = overall(alone, rows.count)
        with fresh(bench) as place:
            fill(place, rows)
            done = measure(bench, place, rows.count)
        samples.add("rate_per_s", done.rate_per_s)
        samples.add("limit_per_s", limit)
        samples.add("ratio", done.rate_per_s / limit)
        samples.add("round_trip_ms", 1000 / done.rate_per_s)
        bench.say(f"round {number}: one key {done.rate_per_s:,.0f}/s, its round trips alone {limit:,.0f}/s")
    samples.use("all", FULL)


def stuck(bench: Bench, samples: Samples) -> None:
    """A key that is held, with twice the ordinary backlog at the head of the table, against the others alone."""
    settings = (*FULL, "poison.policy=hold")
    for number in bench.each_round():
        rates = {}
        for name in ("alone", "beside"):
            with fresh(bench) as place:
                above = _stick(bench, place, bench.share(2)) if name == "beside" else 0
                fill(place, Rows(bench.records))
                done = measure(bench, place, bench.records, settings=settings, above=above)
                if above:
                    remove_topics(bench, _small(place))
            rates[name] = done.rate_per_s
            samples.add(f"rate_per_s.{name}", done.rate_per_s)
        samples.add("others_ratio", rates["beside"] / rates["alone"])
        bench.say(f"round {number}: beside a stuck key the others have {samples.median('others_ratio'):.2f}")
    samples.use("all", settings)


def _stick(bench: Bench, place: Place, count: int) -> int:
    """A record that the broker refuses, and all others of its key behind it; returns the last id."""
    small = _small(place)
    make_topic(bench, small, 1, max_message_bytes="1000")
    with place.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            f" kafka_header_values) VALUES (clock_timestamp(), %s, %s, repeat('x', 5000), {_REFUSED})",
            (small, HOT),
        )
        connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            f" kafka_header_values) SELECT clock_timestamp(), %s, %s, rpad(i || ':', 200, '.'), {_REFUSED}"
            " FROM generate_series(1, %s) AS i",
            (place.name, HOT, count),
        )
        last: int = connection.execute("SELECT max(id) FROM outbox").fetchall()[0][0]
    settle(place)
    return last


def _small(place: Place) -> str:
    return f"{place.name}-small"


SCENARIOS = {
    "cold": Scenario(cold, "half of the rows on one key: when the others are done"),
    "hot-key": Scenario(hot_key, "one key alone, against its round trips"),
    "stuck": Scenario(stuck, "a held key with a long queue at the head of the table: the others' rate"),
}
