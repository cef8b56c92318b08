"""Steady traffic: writers at a fixed rate, and a consumer that records the time of each record. Both run in workers.

A value is `<number>:<nanoseconds>:` and dots. The nanoseconds are this machine's clock immediately before the INSERT
was sent, which is a transaction of its own; so the time until a record is received holds the statement, its commit and
its way back, too. The writers also note when each commit had returned.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from scripts.benchmarks._place import Place
from scripts.benchmarks._worker import Gate, worker

_ROW = "(clock_timestamp(), %s, %s, %s, ARRAY['source'], ARRAY['bench'])"
_INSERT = (
    "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)"
    "\nVALUES "
)
_QUIET_S = 1.0
_WRITER = 1_000_000_000


def write(
    gate: Gate, dsn: str, topic: str, per_s: float, seconds: float, writers: int, rows: int, size: int = 200
) -> list[list[int]]:
    """Insert at a rate, `rows` in each transaction; returns [number, sent, returned] of every record, in ns."""
    done: list[list[int]] = []
    errors: list[BaseException] = []
    transactions = max(1, round(per_s * seconds / rows))
    connections = [psycopg.connect(dsn, autocommit=True, application_name="bench writer") for _ in range(writers)]
    statement = _INSERT + ", ".join([_ROW] * rows)
    gate.ready()
    began = time.monotonic()

    def run(index: int, connection: psycopg.Connection[Any]) -> None:
        chance, number = random.Random(index), index * _WRITER
        try:
            for transaction in range(index, transactions, writers):
                left = began + transaction * rows / per_s - time.monotonic()
                if gate.stopped.wait(left) if left > 0 else gate.stopped.is_set():
                    return
                values: list[str] = []
                sent = time.time_ns()
                for row in range(rows):
                    text = f"{number + row + 1}:{sent}:".ljust(size, ".")
                    values += (topic, f"k-{chance.randrange(1_000)}", text)
                connection.execute(statement, values)
                returned = time.time_ns()
                done.extend([number + row + 1, sent, returned] for row in range(rows))
                number += rows
        except BaseException as error:  # noqa: BLE001 - a thread's top frame: told to the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return done


def receive(gate: Gate, bootstrap: str, topic: str) -> list[list[int]]:
    """Take every record that comes from now on; [number, sent, received] in ns. It ends after a stop, when quiet."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "group.id": "bench-latency",  # demanded by the client; nothing joins or commits
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.min.bytes": 1,
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 0,
            "log_level": 0,
        }
    )
    found: list[list[int]] = []
    places = [
        TopicPartition(topic, number) for number in consumer.list_topics(topic, timeout=30).topics[topic].partitions
    ]
    for place in places:  # an offset, not OFFSET_END: that would be looked up later, perhaps too late
        bounds = consumer.get_watermark_offsets(place, 30)
        place.offset = bounds[1] if bounds is not None else 0
    consumer.assign(places)
    consumer.poll(0.5)  # connected, and waiting at the broker
    gate.ready()
    quiet_at = 0.0
    while True:
        message = consumer.poll(0.02)
        received = time.time_ns()
        if message is None:
            if gate.stopped.is_set():
                quiet_at = quiet_at or time.monotonic() + _QUIET_S
                if time.monotonic() > quiet_at:
                    break
            continue
        if message.error() is None:
            number, sent, _ = (message.value() or b"0:0:").split(b":", 2)
            found.append([int(number), int(sent), received])
            quiet_at = 0.0
    consumer.close()
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """`rows` in each transaction."""

    per_s: float
    seconds: float
    writers: int = 4
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Journey:
    """All records of a load, by the time they were sent: (sent, commit returned, received), in ns.

    `repeats`: how many were received again; the first time counts.
    """

    moments: list[tuple[int, int, int]]
    repeats: int = 0

    def latencies_ms(self, *, from_commit: bool = False) -> list[float]:
        """Until it was received: from before the INSERT was sent, or from when its commit had returned."""
        return [(received - (committed if from_commit else sent)) / 1e6 for sent, committed, received in self.moments]

    def inserts_ms(self) -> list[float]:
        """How long each INSERT took its writer."""
        return [(committed - sent) / 1e6 for sent, committed, _ in self.moments]

    @property
    def per_s(self) -> float:
        """What the writers came to."""
        span = (self.moments[-1][0] - self.moments[0][0]) / 1e9
        return (len(self.moments) - 1) / span if span > 0 else 0.0


def travel(place: Place, load: Load, wait: Callable[[Place], None] | None = None) -> Journey:
    """Write, receive, and put both together; SystemExit when a record did not arrive.

    `wait` returns when all is through; by default that is when the outbox is empty.
    """
    with worker("scripts.benchmarks._traffic:receive", bootstrap=place.bootstrap, topic=place.name) as receiver:
        receiver.start()
        sent = write_alone(place, load)
        (wait or wait_empty)(place)
        receiver.stop()
        arrived = receiver.result()
    times = {number: received for number, _, received in reversed(arrived)}
    ours = [number for number, *_ in sent]
    if any(number not in times for number in ours):
        raise SystemExit("a record did not arrive")
    moments = sorted((at, committed, times[number]) for number, at, committed in sent)
    journey = Journey(moments, len(arrived) - len(times))
    if not journey.moments:
        raise SystemExit("the writers wrote nothing")
    return journey


def write_alone(place: Place, load: Load) -> list[list[int]]:
    """Only write; what `write` returns."""
    arguments = {"per_s": load.per_s, "seconds": load.seconds, "writers": load.writers, "rows": load.rows}
    with worker("scripts.benchmarks._traffic:write", dsn=place.dsn, topic=place.name, **arguments) as writer:
        writer.start()
        sent: list[list[int]] = writer.result(timeout_s=load.seconds * 3 + 300)
        return sent


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0, look_s: float = 0.05) -> None:
    """Returns once the condition is met; SystemExit if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(look_s)


def wait_empty(place: Place, timeout_s: float = 120.0) -> None:
    """Until the outbox is empty."""
    with place.connect() as connection:
        wait_until(lambda: _is_empty(connection), "an empty outbox", timeout_s)


def _is_empty(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("SELECT 1 FROM outbox ORDER BY id DESC LIMIT 1").fetchone() is None


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: always one of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
