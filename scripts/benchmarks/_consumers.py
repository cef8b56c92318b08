"""Consumers to compare, each in a worker: a bare one, one that reads batches, and those that hold claims.

A loop reads a topic of a known size to its end and returns [[seconds of CLOCK_MONOTONIC, records so far], …]. All of
them own their partitions, paused, before the clock starts, so that the client has fetched nothing yet.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from itertools import count
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.settings import ConsumerSettings
from scripts.benchmarks._worker import Gate

Progress = list[tuple[float, int]]
_STUCK_S = 120.0
_BATCH = 500


def bare(
    gate: Gate, bootstrap: str, topic: str, records: int, partitions: int, batches: bool, rest_ms: int = 1000
) -> Progress:
    """What an application without us would write: subscribe, and `poll`; or `consume`, many at a time.

    `rest_ms`: how long the client rests once enough waits in its queue.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "broker.address.family": "v4",
            "group.id": f"bench-{uuid.uuid4().hex[:12]}",
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": rest_ms,
            "log_level": 0,
        }
    )
    gate.ready()
    deadline = time.monotonic() + _STUCK_S
    consumer.subscribe([topic], on_assign=_paused)
    while len(consumer.assignment()) < partitions:
        consumer.poll(0.05)
        _check(deadline)
    done, began = 0, time.monotonic()
    consumer.resume(consumer.assignment())
    while done < records:
        found = consumer.consume(_BATCH, 0.1) if batches else [consumer.poll(0.1)]
        for record in found:
            if record is None:
                _check(deadline)
            elif record.error() is None:
                record.offset()
                done += 1
    ended = time.monotonic()
    consumer.close()
    return [(began, 0), (ended, done)]


def _paused(consumer: Consumer, partitions: list[TopicPartition]) -> None:
    consumer.assign(partitions)
    consumer.pause(partitions)


def claimed(gate: Gate, settings: dict[str, Any], records: int, partitions: int, idle_s: float) -> dict[str, Any]:
    """The same with claims; then it holds them for a while. `messages`: in the coordination topic, at the end of the
    records, and after that while."""
    gate.ready()
    done, deadline, made = 0, time.monotonic() + _STUCK_S, settings_of(settings)
    with CoordinatedConsumer(made) as consumer:
        consumer.pause()
        while len(consumer.claims()) < partitions:
            consumer.poll(0.05)
            _check(deadline)
        consumer.poll(0.05)  # the last of them is assigned
        began = time.monotonic()
        consumer.resume()
        late = threading.Timer(_STUCK_S, consumer.stop)
        late.start()
        for record in consumer:
            record.offset()
            consumer.commit(record)
            done += 1
            if done == records:
                break
        late.cancel()
        ended = time.monotonic()
        messages = [written(made)]
        until = time.monotonic() + idle_s
        while time.monotonic() < until:
            consumer.poll(0.1)
        messages.append(written(made))
    return {"progress": [(began, 0), (ended, done)], "messages": messages}


def holding(gate: Gate, settings: dict[str, Any], partitions: int, idle_s: float) -> dict[str, float]:
    """What claims on so many partitions without records cost, once all are held: records and bytes in the coordination
    topic and CPU seconds of the process, each in a minute."""
    gate.ready()
    deadline = time.monotonic() + _STUCK_S
    with CoordinatedConsumer(settings_of(settings)) as consumer:
        while len(consumer.claims()) < partitions:
            consumer.poll(0.05)
            _check(deadline)

        def figures() -> dict[str, float]:
            counts = consumer.statistics()
            said, cpu_s = sum(counts.written.values()), time.process_time()
            return {"records": said, "bytes": counts.written_bytes, "cpu_s": cpu_s}

        until = time.monotonic() + settings["heartbeat_interval_s"]  # until their heartbeats go together
        while time.monotonic() < until:
            consumer.poll(0.1)
        before, began = figures(), time.monotonic()
        while time.monotonic() < began + idle_s:
            consumer.poll(0.1)
        after, took_s = figures(), time.monotonic() - began
    return {name: (after[name] - before[name]) / took_s * 60 for name in before}


def one_of_many(
    gate: Gate, settings: dict[str, Any], refused_offset: int | None, wait_s: float = 0.0, most: int | None = None
) -> tuple[float, float, int]:
    """One consumer of as many as there are partitions: when it began and ended, and how many records it has taken. Its
    handler waits for so long over each, and never takes the one at this offset. `most`: only so many of the first.
    """
    taken = 0
    made = settings_of(settings)
    with CoordinatedConsumer(made) as consumer:
        consumer.pause()
        shared_since, deadline = time.monotonic(), time.monotonic() + _STUCK_S
        while time.monotonic() - shared_since < 2 * made.heartbeat_interval_s:
            consumer.poll(0.05)
            if len(consumer.claims()) != 1:
                shared_since = time.monotonic()
            _check(deadline)
        ((topic, partition),) = consumer.claims()
        wanted = (_end(made, topic, partition) if most is None else most) - (refused_offset is not None)

        def handle(record: Any) -> None:
            nonlocal taken
            if record.offset() == refused_offset:
                raise ValueError("no handler takes it")
            if wait_s:
                time.sleep(wait_s)
            taken += 1
            if taken == wanted:
                consumer.stop()

        gate.ready()
        began = time.monotonic()
        consumer.resume()
        consumer.run(handle)
        return began, time.monotonic(), taken


def member(gate: Gate, settings: dict[str, Any]) -> None:
    """Hold claims until told to stop, or killed."""
    with CoordinatedConsumer(settings_of(settings)) as consumer:
        gate.ready()
        while not gate.stopped.is_set():
            record = consumer.poll(0.1)
            if record is not None:
                consumer.commit(record)


def settings_of(given: dict[str, Any]) -> ConsumerSettings:
    """From what has gone through JSON."""
    return ConsumerSettings(**{**given, "topics": tuple(given["topics"])})


def written(settings: ConsumerSettings) -> int:
    """How many messages the coordination topic has had."""
    return sum(_end(settings, settings.coordination_topic, each) for each in range(settings.coordination_partitions))


def _end(settings: ConsumerSettings, topic: str, partition: int) -> int:
    reader = Consumer({**settings.kafka, "group.id": "bench-reader"})
    try:
        return reader.get_watermark_offsets(TopicPartition(topic, partition), 10)[1]
    finally:
        reader.close()


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SystemExit(f"a consumer did not come to the end within {_STUCK_S:g} s")


def handed(gate: Gate, settings: dict[str, Any], records: int, partitions: int, how: str, wait_s: float) -> Progress:
    """Records are handed out with claims in one of the ways that there are, until so many were committed. `wait_s`: how
    long the handler takes over each.
    """
    gate.ready()
    if how == "async":
        return asyncio.run(_handed_async(settings_of(settings), records, partitions))
    done, ends, deadline = count(1), list[float](), time.monotonic() + _STUCK_S
    consumer = CoordinatedConsumer(settings_of(settings))
    consumer.pause()
    while len(consumer.claims()) < partitions:
        consumer.poll(0.05)
        _check(deadline)
    consumer.poll(0.05)  # the last of them is assigned

    def handle(record: Any) -> None:
        record.offset()
        if wait_s:
            time.sleep(wait_s)
        if next(done) == records:
            ends.append(time.monotonic())
            consumer.stop()

    def handle_batch(batch: list[Any]) -> None:
        for record in batch:
            handle(record)

    began = time.monotonic()
    consumer.resume()
    if how == "run":
        consumer.run(handle)
    elif how == "run_batches":
        consumer.run_batches(handle_batch, _BATCH)
    elif how == "arrow":
        left = records
        while left > 0:
            rows = consumer.consume_arrow(_BATCH, 0.1)
            consumer.commit(rows)
            left -= rows.num_rows
        ends.append(time.monotonic())
    else:
        left = records
        while left > 0:
            batch = consumer.consume(_BATCH, 0.1)
            for record in batch:
                record.offset()
            consumer.commit(batch)
            left -= len(batch)
        ends.append(time.monotonic())
    consumer.close()
    return [(began, 0), (ends[0], records)]


async def _handed_async(settings: ConsumerSettings, records: int, partitions: int) -> Progress:
    done, deadline = 0, time.monotonic() + _STUCK_S
    async with AsyncCoordinatedConsumer(settings) as consumer:
        await consumer.pause()
        while len(consumer.claims()) < partitions:
            await consumer.poll(0.05)
            _check(deadline)
        await consumer.poll(0.05)
        began = time.monotonic()
        await consumer.resume()
        async for record in consumer:
            record.offset()
            await consumer.commit(record)
            done += 1
            if done == records:
                break
        ended = time.monotonic()
    return [(began, 0), (ended, done)]
