"""At least once, one record that is never committed, on a real broker: what a successor repeats is bounded."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Blocked, Event, Unblocked
from harvester.coordination.settings import ConsumerSettings
from harvester.http.consumers import ConsumerMetrics
from tests.support.coordinated import Join, fill, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]

MOST, RECORDS = 50, 3000


def test_one_record_that_is_not_committed_holds_its_partition_and_no_other(
    settings: ConsumerSettings, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "harvester.coordination")
    # A claim that is lost to a busy machine would hand records out again.
    settings = replace(settings, heartbeat_interval_s=2.0)
    fill(settings, RECORDS)
    seen: Counter[int] = Counter()
    events: list[Event] = []
    partitions: Counter[int] = Counter()
    held_back: list[Any] = []
    consumer = CoordinatedConsumer(replace(settings, max_open_records=MOST, client_id="stable"), on_event=events.append)

    def take() -> bool:
        record = consumer.poll(0.01)
        if record is None:
            return False
        seen[int(record.value())] += 1
        partitions[record.partition()] += 1
        if record.partition() == 2 and not held_back:
            held_back.append(record)
        else:
            consumer.commit(record)
        return True

    def blocked() -> list[Blocked]:
        while take():
            pass
        others = all(partitions[each] > RECORDS / 4 - 200 for each in (0, 1, 3))
        return [event for event in events if isinstance(event, Blocked)] if others else []

    (event,) = eventually(blocked, 60, what="news of the partition that waits, and all records of the others")
    first = held_back[0].offset()
    assert (event.partition, event.offset, event.open_records) == (2, first, MOST)
    assert partitions[2] == MOST
    (found,) = consumer.open_records().values()
    assert (found.records, found.offset) == (MOST, first)
    assert found.age_s >= event.age_s >= settings.heartbeat_interval_s
    samples = {sample.name: sample.value for family in ConsumerMetrics(consumer).collect() for sample in family.samples}
    assert samples["harvester_consumer_open_records"] == MOST
    assert samples["harvester_consumer_oldest_open_seconds"] >= found.age_s
    (text,) = (record.message for record in caplog.records if "waits for a commit" in record.message)
    assert f"offset {first} was handed out" in text
    assert f"{MOST} records are open" in text

    consumer.close(release=False)  # as a crash does
    other = join(client_id="stable", max_open_records=MOST)
    eventually(lambda: len(set(seen) | set(other.seen)) == RECORDS, 60, what="all records")
    repeated = [offset for _, partition, offset in other.handed if partition == 2 and offset < first + MOST]
    assert repeated == list(range(first, first + MOST))


def test_a_partition_goes_on_when_the_record_is_committed(settings: ConsumerSettings) -> None:
    fill(settings, RECORDS)
    events: list[Event] = []
    held_back: dict[int, Any] = {}
    seen: set[tuple[int, int]] = set()  # on a busy machine a claim may be lost, and begins anew with the same record
    holds = True
    with CoordinatedConsumer(replace(settings, max_open_records=MOST), on_event=events.append) as consumer:

        def take() -> bool:
            record = consumer.poll(0.01)
            if record is None:
                return False
            seen.add((record.partition(), record.offset()))
            first = held_back.setdefault(record.partition(), record)
            if holds and first.offset() == record.offset():
                held_back[record.partition()] = record
            else:
                consumer.commit(record)
            return True

        def told(kind: type[Blocked | Unblocked]) -> bool:
            while take():
                pass
            return {event.partition for event in events if isinstance(event, kind)} == {0, 1, 2, 3}

        eventually(lambda: told(Blocked), 60, what="news of all partitions")
        assert len(seen) == 4 * MOST
        holds = False
        for record in held_back.values():
            consumer.commit(record)
        eventually(lambda: told(Unblocked), 60, what="news that they go on")

        def all_seen() -> bool:
            while take():
                pass
            return len(seen) == RECORDS

        eventually(all_seen, 60, what="all records")
        eventually(lambda: not consumer.open_records(), what="that nothing is open")
