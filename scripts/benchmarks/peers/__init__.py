"""`peers`: goharvest and Debezium, with the same drain, keys, latency and crash, each beside us on the same servers.

goharvest's client does not speak to Kafka 4, so it and we get a broker 3.9.1; Debezium and we get the newest, and a
PostgreSQL with wal_level=logical. Where Go or Maven is missing, the peer is left out, which is said.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
from confluent_kafka import Consumer, TopicPartition

from harvester.stack import StackOptions, down, start, stop, up
from scripts.benchmarks import _procs
from scripts.benchmarks._backlog import Log, Rows, fill, read
from scripts.benchmarks._place import Place, fresh, make_topic
from scripts.benchmarks._relay import FULL, warm
from scripts.benchmarks._scenario import Bench, Samples, Scenario
from scripts.benchmarks._traffic import Load, percentile, travel, wait_empty, write_alone
from scripts.benchmarks._worker import worker
from scripts.benchmarks.drain import ONCE
from scripts.benchmarks.peers import _relays, _tools
from scripts.benchmarks.peers._relays import Peer, process

# The share of the records that a relay gets which sends a key's one at a time; how many keys, and their skew.
KEYS: dict[str, tuple[float, int, float]] = {"1": (0.02, 1, 0.0), "10": (0.1, 10, 0.0), "zipf": (0.2, 1_000, 1.0)}
RATES = (200, 1_000)
_CRASH_PER_S = 200
_WAIT_S = 300.0


def peers(bench: Bench, samples: Samples) -> None:
    """The figures stand under the name of each relay."""
    lacking = _tools.missing("go", "gcc", "mvn")
    if lacking:
        bench.say(f"not installed: {', '.join(lacking)}")
    if not lacking:
        bench.say("building goharvest; the first time this downloads and takes minutes")
        relays = [
            _relays.goharvest("default"),
            _relays.goharvest("tuned", "1000", "10000"),
            *_ours(bench),
        ]
        with _servers(bench, "3.9.1", jars=_tools.jars("kafka39")) as servers:
            _compare(servers, samples, "kafka_3_9", relays)
    else:
        bench.say("goharvest is left out: it needs Go with a C compiler, and Maven for a broker that it can speak to")
    if "mvn" not in lacking:
        relays = [
            _relays.debezium("default", None, None),
            _relays.debezium("tuned", 5, 0),
            _relays.debezium_once("exactly_once", 5, 0),
            *_ours(bench),
            _relays.ours([*FULL, *ONCE, f"limits.shards={bench.count}", *bench.settings], "exactly_once"),
        ]
        with _servers(bench, "newest", logical=True) as servers:
            _compare(servers, samples, "kafka_4", relays)
    else:
        bench.say("Debezium is left out: it needs Maven")


def _ours(bench: Bench) -> list[Peer]:
    given = (f"limits.shards={bench.count}", *bench.settings)
    return [_relays.ours(given, "default"), _relays.ours([*FULL, *given], "tuned")]


def _compare(bench: Bench, samples: Samples, servers: str, relays: Sequence[Peer]) -> None:
    warm(bench)  # the broker, for all of them
    for peer in relays:
        if peer.like:
            samples.note(peer.name, peer.like)
        under = f"{servers}.{peer.name}"
        _drains(bench, samples, peer, under)
        _latencies(bench, samples, peer, under)
        _crash(bench, samples, peer, under)


def _drains(bench: Bench, samples: Samples, peer: Peer, under: str) -> None:
    """The first round of a fresh process is cold; where processes last, the others are warm."""
    loads = {"rate_per_s": Rows(bench.records)}
    for name, (share, count, skew) in KEYS.items():
        records = bench.share(share) if peer.one_at_a_time else bench.records
        loads[f"keys_{name}_per_s"] = Rows(records, keys=count, skew=skew)
    with _fresh(bench, peer) as place, ExitStack() as lasting:
        if not peer.deletes:
            running = lasting.enter_context(process(peer, place))
            _wait_slot(place)
            samples.add(f"{under}.cold_per_s", _one(bench, peer, place, loads["rate_per_s"], running.pid)[0].rate_per_s)
        for number in bench.each_round():
            for name, rows in loads.items():
                if peer.deletes:
                    with _fresh(bench, peer) as other:
                        fill(other, rows)
                        with process(peer, other) as one:
                            log, cpu_us, pss_mb = _one(bench, peer, other, rows, one.pid)
                else:
                    log, cpu_us, pss_mb = _one(bench, peer, place, rows, running.pid)
                samples.add(f"{under}.{name}", log.rate_per_s)
                samples.add(f"{under}.repeats.{name.removesuffix('_per_s')}", log.repeats)
                if name == "rate_per_s":
                    samples.add(f"{under}.cpu_us_per_record", cpu_us)
                    samples.add(f"{under}.pss_mb", pss_mb)
                again = f", {log.repeats:,} of {rows.count:,} records repeated" if log.repeats else ""
                bench.say(f"round {number}: {under}: {name} {log.rate_per_s:,.0f}{again}")


def _one(bench: Bench, peer: Peer, place: Place, rows: Rows, pid: int) -> tuple[Log, float, float]:
    """(the records, CPU per record in µs from before the first to the last, MB of memory after it).

    The outbox of a relay that deletes is filled already. A peer's own repeats are counted.
    """
    topic = place.name
    if not peer.deletes:
        topic = f"{place.name}-{time.time_ns()}"
        make_topic(bench, topic)
    consumer = _consumer(place)
    try:
        before = _procs.cpu(pid)
        if not peer.deletes:
            fill(place, rows, topic)
        wait_records(consumer, topic, 1)
        if peer.deletes:
            before = _procs.cpu(pid)  # what starting took is not in it
        _all_arrived(consumer, peer, place, topic, rows.count)
        used, pss_mb = _procs.cpu(pid).since(before).all_s, _procs.tree_pss_mb(pid)
    finally:
        consumer.close()
    may_repeat = not peer.name.startswith("harvester")
    return read(place, rows.count, topic, may_repeat=may_repeat), used / rows.count * 1e6, pss_mb


def _all_arrived(consumer: Consumer, peer: Peer, place: Place, topic: str, count: int) -> None:
    """Until all records are in the log; counting them is misled by repeats, so an outbox that gets empty says more."""
    if peer.deletes:
        wait_empty(place, _WAIT_S)
    elif peer.once:
        wait_committed(consumer, topic, count)
    else:
        wait_records(consumer, topic, count)


def _latencies(bench: Bench, samples: Samples, peer: Peer, under: str) -> None:
    with _fresh(bench, peer, steady=True) as place, process(peer, place):
        consumer = _consumer(place)
        try:
            if not peer.deletes:
                _wait_slot(place)
            done = len(write_alone(place, Load(50, 1.0, writers=1)))
            _all_arrived(consumer, peer, place, place.name, done)
            for per_s in RATES:
                load = Load(per_s, bench.seconds or 20)
                done += round(load.per_s * load.seconds / load.rows)
                expected = done

                def arrived(where: Place, expected: int = expected) -> None:
                    _all_arrived(consumer, peer, where, where.name, expected)

                journey = travel(place, load, arrived)
                found = journey.latencies_ms()
                samples.add(f"{under}.repeats.at_{per_s}", journey.repeats)
                samples.add(f"{under}.p50_ms.{per_s}", percentile(found, 0.5))
                samples.add(f"{under}.p99_ms.{per_s}", percentile(found, 0.99))
        finally:
            consumer.close()


def _crash(bench: Bench, samples: Samples, peer: Peer, under: str) -> None:
    """SIGKILL under a steady load: goharvest and we have a standby, Connect is started again at once."""
    seconds = max(3.0, bench.seconds or 60.0)
    with _fresh(bench, peer) as place, ExitStack() as stack:
        consumer = _consumer(place)
        stack.callback(consumer.close)
        leader = stack.enter_context(process(peer, place, "one"))
        if not peer.deletes:
            _wait_slot(place)
        begun = len(write_alone(place, Load(50, 0.5, writers=1)))
        _all_arrived(consumer, peer, place, place.name, begun)
        if peer.deletes:
            stack.enter_context(process(peer, place, "two"))
        load = {"per_s": _CRASH_PER_S, "seconds": seconds, "writers": 2, "rows": 1}
        receiver = stack.enter_context(
            worker("scripts.benchmarks._traffic:receive", bootstrap=place.bootstrap, topic=place.name)
        )
        writer = stack.enter_context(
            worker("scripts.benchmarks._traffic:write", dsn=place.dsn, topic=place.name, **load)
        )
        receiver.start()
        writer.start()
        time.sleep(seconds / 3)
        killed_at = time.time_ns()
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        if not peer.deletes:
            stack.enter_context(process(peer, place, "two"))
        sent = writer.result()
        _all_arrived(consumer, peer, place, place.name, begun + len(sent))
        receiver.stop()
        arrived = receiver.result()
    numbers = [number for number, *_ in arrived]
    times = sorted(at for *_, at in arrived)
    gap_ns = max((later - earlier for earlier, later in itertools.pairwise(times) if later > killed_at), default=0)
    samples.add(f"{under}.crash_gap_s", gap_ns / 1e9)
    samples.add(f"{under}.crash_repeats", len(numbers) - len(set(numbers)))
    samples.add(f"{under}.crash_lost", len({number for number, *_ in sent} - set(numbers)))
    bench.say(f"{under}: after a crash nothing came for {gap_ns / 1e9:.1f} s")


@contextmanager
def _fresh(bench: Bench, peer: Peer, *, steady: bool = False) -> Iterator[Place]:
    """An outbox as this relay wants it; `steady`: ours with its trigger."""
    with fresh(bench, notify=steady and peer.name.startswith("harvester")) as place:
        if peer.leader_topic:
            make_topic(bench, f"{place.name}.neli", 1)
        yield place


def wait_records(consumer: Consumer, topic: str, count: int) -> None:
    """Until the log of a topic holds so many; repeats count, too, so what is asked for may come a little later."""
    deadline = time.monotonic() + _WAIT_S
    partitions = list(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
    while True:
        ends = [consumer.get_watermark_offsets(TopicPartition(topic, number), 30) for number in partitions]
        if sum(end[1] for end in ends if end is not None) >= count:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"{topic} did not get {count} records within {_WAIT_S:g} s")
        time.sleep(0.02)


def wait_committed(consumer: Consumer, topic: str, count: int) -> None:
    """The same in transactions, whose markers have offsets of their own: the records are read."""
    deadline, seen = time.monotonic() + _WAIT_S, 0
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    while seen < count:
        seen += sum(one.error() is None for one in consumer.consume(10_000, 0.1))
        if time.monotonic() > deadline:
            raise SystemExit(f"{topic} had {seen} records of {count} after {_WAIT_S:g} s")
    consumer.unassign()


def _wait_slot(place: Place) -> None:
    """Until Debezium reads the log: what is inserted before, it would not see."""
    deadline = time.monotonic() + _WAIT_S
    query = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
    with place.connect() as connection:
        while connection.execute(query, (place.name,)).fetchall()[0][0] == 0:
            if time.monotonic() > deadline:
                raise SystemExit("Debezium did not begin to read")
            time.sleep(0.1)


@contextmanager
def _servers(bench: Bench, kafka: str, *, jars: Path | None = None, logical: bool = False) -> Iterator[Bench]:
    """Servers of this comparison's own."""
    directory = bench.place / f"stack-{kafka}"
    before = os.environ.get("HARVESTER_KAFKA_JARS")
    if jars is not None:
        os.environ["HARVESTER_KAFKA_JARS"] = str(jars)
    try:
        info = up(directory, StackOptions(), progress=bench.say)
        if logical:
            with psycopg.connect(info.dsn, autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET wal_level = logical")
            stop(directory, "postgres")
            info = start(directory, "postgres")
        yield replace(bench, dsn=info.dsn, bootstrap=info.bootstrap)
    finally:
        down(directory, delete=True)
        if jars is not None:
            os.environ.pop("HARVESTER_KAFKA_JARS")
            if before is not None:
                os.environ["HARVESTER_KAFKA_JARS"] = before


def _consumer(place: Place) -> Consumer:
    return Consumer(
        {"bootstrap.servers": place.bootstrap, "broker.address.family": "v4", "group.id": "bench-ends", "log_level": 0}
    )


SCENARIOS = {
    "peers": Scenario(peers, "goharvest and Debezium beside us, on the same servers", chosen=True, own_servers=True),
}
