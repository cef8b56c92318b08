"""`coordination`: consumers with claims and a bare one, alternating on the same topic; and the cost of claims."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harvester.coordination.admin import Observer
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.core.world import Freshness
from scripts.benchmarks._backlog import Rows
from scripts.benchmarks._consumers import settings_of
from scripts.benchmarks._place import make_topic, remove_topics
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._worker import run, worker

INTERVAL_S = 5.0
PARTITIONS = 8
LOG_PARTITIONS = 8
HELD = (10, 100, 1_000)
_LONGER = 20  # a second of start and end shall not count
_IDLE_INTERVALS = 4
_CONSUMERS = "scripts.benchmarks._consumers:"
_STUCK_S = 120.0


def coordination(bench: Bench, samples: Samples) -> None:
    """A bare consumer before, between and after the two with claims, and the take-over from one that is killed."""
    records = bench.share(_LONGER, least=200)
    with topics(bench, records) as used:
        for number in bench.each_round():
            _compare(bench, samples, used[0], records, used)
            samples.add("recovery_s", _recovery_s(bench, used[0], used))
            bench.say(f"round {number}: {samples.median('alo_ratio'):.2f} and {samples.median('amo_ratio'):.2f}")
    samples.note("heartbeat_interval_s", INTERVAL_S)
    samples.note("partitions", PARTITIONS)


def _compare(bench: Bench, samples: Samples, topic: str, records: int, used: list[str]) -> None:
    reading = {"bootstrap": bench.bootstrap, "topic": topic, "records": records, "partitions": PARTITIONS}
    idle_s = bench.seconds or _IDLE_INTERVALS * INTERVAL_S
    rates: dict[str, float] = {}
    bares = []
    for mode in ("alo", "amo"):
        bares.append(per_s(run(_CONSUMERS + "bare", batches=False, **reading), records))
        settings = settings_for(bench, topic, used, at_most_once=mode == "amo")
        found = run(
            _CONSUMERS + "claimed", settings=settings, records=records, partitions=PARTITIONS,
            idle_s=idle_s if mode == "alo" else 0.0,
        )  # fmt: skip
        rates[mode] = per_s(found["progress"], records)
        before, after = found["messages"]
        if mode == "alo":
            samples.add("messages_per_partition_minute", (after - before) / PARTITIONS / idle_s * 60)
        else:
            samples.add("amo_messages_per_1000_records", before / records * 1000)
    bares.append(per_s(run(_CONSUMERS + "bare", batches=False, **reading), records))
    batched = per_s(run(_CONSUMERS + "bare", batches=True, **reading), records)
    # Each beside the bare ones that ran before and after it.
    samples.add("alo_ratio", rates["alo"] / ((bares[0] + bares[1]) / 2))
    samples.add("amo_ratio", rates["amo"] / ((bares[1] + bares[2]) / 2))
    samples.add("bare_per_s", sum(bares) / len(bares))
    samples.add("bare_batches_per_s", batched)
    samples.add_all({f"{mode}_per_s": rate for mode, rate in rates.items()})


def per_s(progress: list[tuple[float, int]], records: int) -> float:
    """From when all partitions were read to the end."""
    (began, before), (ended, done) = progress[0], progress[-1]
    if done != records:
        raise SystemExit(f"a consumer read {done} records of {records}")
    return (done - before) / max(ended - began, 1e-6)


def _recovery_s(bench: Bench, topic: str, used: list[str]) -> float:
    """From the killing of one of two until the other holds everything."""
    given = settings_for(bench, topic, used)
    settings = settings_of(given)
    with CoordinatedConsumer(settings) as survivor, worker(_CONSUMERS + "member", settings=given) as victim:
        victim.start()
        with Observer(settings) as observer:
            _poll_until(survivor, lambda: _halves(observer))
        killed_at = time.monotonic()
        victim.end()
        _poll_until(survivor, lambda: len(survivor.claims()) == PARTITIONS)
        return time.monotonic() - killed_at


def _halves(observer: Observer) -> bool:
    observer.follow(0)
    counts: Counter[str] = Counter()
    for world in observer.worlds.values():
        for place, claim in world.claims.items():
            if claim.holder is not None and world.freshness(place) is not Freshness.STALE:
                counts[claim.holder.id] += 1
    return list(counts.values()) == [PARTITIONS // 2] * 2


def _poll_until(consumer: CoordinatedConsumer, done: Any) -> None:
    deadline = time.monotonic() + _STUCK_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("claims did not come to where they should be")
        record = consumer.poll(0.01)
        if record is not None:
            consumer.commit(record)


@contextmanager
def topics(bench: Bench, records: int = 0, *, partitions: int | None = None) -> Iterator[list[str]]:
    """The name of a topic with so many records; all whose names are added are removed at the end, too."""
    used = [f"bench-{uuid.uuid4().hex[:12]}"]
    make_topic(bench, used[0], partitions or PARTITIONS)
    try:
        if records:
            rows = Rows(records)
            run(
                "scripts.benchmarks._baselines:produce",
                bootstrap=bench.bootstrap, topic=used[0], records=records, keys=rows.keys, size=rows.size,
            )  # fmt: skip
        yield used
    finally:
        remove_topics(bench, *used)


def settings_for(bench: Bench, topic: str, used: list[str], *, at_most_once: bool = False) -> dict[str, Any]:
    """Of a new group with a coordination topic of its own."""
    name = f"bench-marshal-{uuid.uuid4().hex[:12]}"
    used.append(name)
    return {
        "kafka": {"bootstrap.servers": bench.bootstrap, "broker.address.family": "v4", "log_level": 0},
        "group": name,
        "topics": [topic],
        "coordination_topic": name,
        "coordination_partitions": LOG_PARTITIONS,
        "heartbeat_interval_s": INTERVAL_S,
        "at_most_once": at_most_once,
    }


def claims(bench: Bench, samples: Samples) -> None:
    """One consumer that holds all partitions of a topic in which nothing happens."""
    idle_s = bench.seconds or _IDLE_INTERVALS * INTERVAL_S
    for partitions in HELD:
        with topics(bench, partitions=partitions) as used:
            for _ in bench.each_round():
                settings = settings_for(bench, used[0], used)
                found = run(_CONSUMERS + "holding", settings=settings, partitions=partitions, idle_s=idle_s)
                samples.add_all(found, under=f"{partitions}")
        bench.say(f"{partitions} partitions: {samples.median(f'{partitions}.records'):,.0f} records a minute")
    samples.note("heartbeat_interval_s", INTERVAL_S)
    samples.note("coordination_partitions", LOG_PARTITIONS)


SCENARIOS = {
    "claims": Scenario(claims, "what claims on many partitions cost while nothing is consumed"),
    "coordination": Scenario(
        coordination, "consumers that coordinate through Kafka beside a bare one, and a take-over"
    ),
}
