"""`limits`: the two servers without a relay, each loop alone and all three at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from scripts.benchmarks._backlog import Rows, fill
from scripts.benchmarks._place import fresh
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import run, worker

BATCHES = (100, 500, 1_000, 4_000)
FORMS = ("copy", "pipeline")
DRIVER_BATCH = 1_000  # its best, by trial
BARE_CAPS = (1_000, 10_000)
_BASELINES = "scripts.benchmarks._baselines:"


def limits(bench: Bench, samples: Samples) -> None:
    """Each alone at every batch, then the best of each at once."""
    rows = Rows(bench.records)
    for number in bench.each_round():
        best: dict[str, tuple[int, str]] = {}
        for kind in ("mark_delete", "read_delete"):
            found = {(batch, form): database(bench, kind, rows, batch, form) for batch in BATCHES for form in FORMS}
            for (batch, form), per_s in found.items():
                samples.add(f"{kind}_per_s_by_batch.{batch}_{form}", per_s)
            best[kind] = max(found, key=lambda at: found[at])
            samples.add(f"{kind}_per_s", max(found.values()))
            samples.add(f"driver_{kind}_per_s", database(bench, kind, rows, DRIVER_BATCH, "cursor"))
        samples.add("produce_per_s", produce(bench, rows))
        for cap in BARE_CAPS:
            samples.add(f"bare_relay_per_s_by_cap.{cap}", bare_relay(bench, rows, cap))
        samples.add_all(_together(bench, rows, best), "together")
        bench.say(f"round {number}: mark+delete {samples.median('mark_delete_per_s'):,.0f}/s")


def best_mark_delete(bench: Bench, rows: Rows, samples: Samples | None = None) -> float:
    """The limit that a drain is compared with: the best of all batches, each in the form that suits it."""
    found = {}
    for batch in BATCHES:
        # Small batches gain by the pipeline, large ones by the cheaper rows of a COPY; in the middle both are tried.
        for form in FORMS if batch in (500, 1_000) else (FORMS[batch < 500],):
            found[batch, form] = database(bench, "mark_delete", rows, batch, form)
            if samples is not None:
                samples.add(f"limit_per_s_by_batch.{batch}_{form}", found[batch, form])
    return max(found.values())


def database(bench: Bench, kind: str, rows: Rows, batch: int, form: str) -> float:
    """Rows per second of one loop over a fresh backlog."""
    with fresh(bench) as place:
        fill(place, rows)
        return overall(run(_BASELINES + kind, dsn=place.dsn, batch=batch, form=form), rows.count)


def produce(bench: Bench, rows: Rows) -> float:
    """Records per second of a lone producer."""
    with fresh(bench) as place:
        return overall(run(_BASELINES + "produce", **_producing(bench, place.name, rows)), rows.count)


def bare_relay(bench: Bench, rows: Rows, cap: int) -> float:
    """Records per second of a relay without any guarantee that has so many in flight."""
    with fresh(bench) as place:
        fill(place, rows)
        return overall(
            run("scripts.benchmarks._bare:relay", dsn=place.dsn, bootstrap=bench.bootstrap, cap=cap), rows.count
        )


def overall(progress: Sequence[tuple[float, int]], expected: int) -> float:
    """From start to end; SystemExit when it did not do everything."""
    (began, _), (ended, done) = progress[0], progress[-1]
    if done != expected:
        raise SystemExit(f"a baseline handled {done} rows of {expected}")
    return done / max(ended - began, 1e-6)


def within(progress: Sequence[tuple[float, int]], began: float, ended: float) -> float:
    """Records per second in a window of its time; between two reports the progress counts as even.

    0 in a window that ends before it begins: with few records one may be done before another has started.
    """
    if ended <= began:
        return 0.0
    return (_at(progress, ended) - _at(progress, began)) / (ended - began)


def _at(progress: Sequence[tuple[float, int]], moment: float) -> float:
    earlier = progress[0]
    for later in progress[1:]:
        if later[0] >= moment:
            span = later[0] - earlier[0]
            share = (moment - earlier[0]) / span if span > 0 else 1.0
            return earlier[1] + max(share, 0.0) * (later[1] - earlier[1])
        earlier = later
    return float(progress[-1][1])


def _producing(bench: Bench, topic: str, rows: Rows) -> dict[str, Any]:
    return {
        "bootstrap": bench.bootstrap,
        "topic": topic,
        "records": rows.count,
        "keys": rows.keys,
        "size": rows.size,
    }


def _together(bench: Bench, rows: Rows, best: dict[str, tuple[int, str]]) -> dict[str, float]:
    """Rates while all three run. The quick ones get more to do, so that none is alone for long."""
    with ExitStack() as stack:
        workers = {}
        for kind, factor in (("mark_delete", 1), ("read_delete", 2)):
            place = stack.enter_context(fresh(bench))
            fill(place, Rows(rows.count * factor))
            batch, form = best[kind]
            workers[kind] = stack.enter_context(
                worker(_BASELINES + kind, dsn=place.dsn, batch=batch, form=form)
            )  # fmt: skip
        topic = stack.enter_context(fresh(bench)).name
        more = Rows(rows.count * 3)
        workers["produce"] = stack.enter_context(worker(_BASELINES + "produce", **_producing(bench, topic, more)))
        for each in workers.values():
            each.start()
        done = {kind: each.result() for kind, each in workers.items()}
    began = max(progress[0][0] for progress in done.values())
    ended = min(progress[-1][0] for progress in done.values())
    return {f"{kind}_per_s": within(progress, began, ended) for kind, progress in done.items()}


SCENARIOS = {
    "limits": Scenario(limits, "PostgreSQL and Kafka alone: mark and delete, read and delete, produce, all at once"),
}
