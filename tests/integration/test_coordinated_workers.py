"""A coordinated consumer that handles several records at once, on a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from harvester import AsyncCoordinatedConsumer, CoordinatedConsumer
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.events import Claimed, Event, GivenUp, Released
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import fill, settings
from tests.support.handled import Handled, Poison, Start, fill_keys, start
from tests.support.wait import eventually

__all__ = ["settings", "start"]

WORKERS, KEYS, EACH = 8, 20, 10
ALL = KEYS * EACH
QUICK: dict[str, Any] = {"backoff_s": 0.01, "longest_backoff_s": 0.05}


def values(key: int) -> list[str]:
    return [f"{key}-{number}" for number in range(EACH)]


class AtOnce(Handled):
    """Notices how many records are handled at once, and that of a key it is one."""

    def __init__(self, fails: Any = lambda _: False) -> None:
        super().__init__(fails)
        self.busy: Counter[Any] = Counter()
        self.most = 0
        self.broken: list[Any] = []
        self._lock = threading.Lock()

    def lane(self, record: Any) -> Any:
        return record.key()

    def __call__(self, record: Any) -> None:
        lane = self.lane(record)
        with self._lock:
            self.busy[lane] += 1
            if self.busy[lane] > 1:
                self.broken.append(lane)
            self.most = max(self.most, sum(self.busy.values()))
        try:
            super().__call__(record)
        finally:
            with self._lock:
                self.busy[lane] -= 1


def test_records_of_as_many_keys_as_there_are_workers_are_handled_at_once(
    settings: ConsumerSettings, start: Start
) -> None:
    barrier = threading.Barrier(WORKERS)
    fill_keys(settings, WORKERS, 3, partition=0)
    handled: list[Any] = []

    def handle(record: Any) -> None:
        barrier.wait(30)  # until all of them are here
        handled.append(record.value())

    runner = start(handle, workers=WORKERS)
    eventually(lambda: len(handled) == WORKERS * 3, what="all records")
    assert runner.error is None


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_of_records_whose_order_is_kept_one_is_handled_at_a_time(
    settings: ConsumerSettings, start: Start, order: Any
) -> None:
    fill_keys(settings, KEYS, EACH)
    tried: Counter[str] = Counter()

    def fails(value: str) -> bool:
        tried[value] += 1
        return value.endswith("3") and tried[value] < 3

    handled = AtOnce(fails)
    lanes: dict[str, Any] = {
        "key": lambda record: record.key(),
        "partition": lambda record: record.partition(),
        "none": lambda record: record.value(),
    }
    handled.lane = lanes[order]  # type: ignore[method-assign]
    runner = start(handled, workers=WORKERS, on_error="retry", order=order, **QUICK)
    eventually(lambda: len(handled.values) == ALL, what="all records")
    assert handled.broken == []
    assert (order == "none") or [handled.of_key(key) for key in range(KEYS)] == [values(key) for key in range(KEYS)]
    eventually(lambda: not runner.consumer.open_records(), what="that all is committed")


def test_one_record_that_takes_long_holds_the_position_and_bounds_what_is_repeated(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    going_on = threading.Event()
    first, second = Handled(), Handled()

    def handle(record: Any) -> None:
        if record.value() == b"2-0":
            assert going_on.wait(60)
        first(record)

    runner = start(handle, workers=WORKERS, max_open_records=50)
    eventually(lambda: len(first.values) == 2 + 50 - 3, what="as many as may be open, but two of that key behind it")
    (found,) = eventually(
        lambda: [each for each in runner.consumer.open_records().values() if each.records == 50], what="open records"
    )
    assert found.offset == 2
    going_on.set()
    eventually(lambda: len(first.values) == ALL, what="all records")
    assert first.of_key(2) == values(2)
    runner.stop()
    fill_keys(settings, 1, 1, partition=0)
    start(second, workers=WORKERS)
    eventually(lambda: bool(second.values), what="what is new")
    assert second.values == ["0-0"]


def test_a_stop_waits_for_what_is_in_hand_and_commits_it(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, WORKERS, 2, partition=0)
    barrier = threading.Barrier(WORKERS + 1)
    handled: list[Any] = []

    def handle(record: Any) -> None:
        barrier.wait(30)
        barrier.wait(30)
        handled.append(record.value())

    runner = start(handle, workers=WORKERS)
    barrier.wait(30)
    runner.consumer.stop()
    barrier.wait(30)
    assert runner.wait() is None
    assert sorted(handled) == [f"{key}-0".encode() for key in range(WORKERS)]
    second = Handled()
    start(second)
    eventually(lambda: len(second.values) == WORKERS, what="the rest")
    assert sorted(second.values) == [f"{key}-1" for key in range(WORKERS)]


def test_the_first_error_ends_all_workers(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    first, second = Handled(lambda value: value == "3-4"), Handled()
    error = start(first, workers=WORKERS).wait()
    assert isinstance(error, Poison)
    start(second)
    eventually(lambda: len(set(first.values) | set(second.values)) == ALL, what="the rest")
    assert second.of_key(3)[-6:] == values(3)[4:]


def test_poison_records_of_all_keys_go_to_the_dead_letter_topic(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    handled = AtOnce(lambda value: value.endswith("-4"))
    runner = start(handled, workers=WORKERS, on_error="dead-letter", attempts=2, **QUICK)
    eventually(lambda: len(runner.told(GivenUp)) == KEYS and len(handled.values) == ALL - KEYS, what="all others")
    letters = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert {each.value for each in letters} == {f"{key}-4".encode() for key in range(KEYS)}
    eventually(lambda: not runner.consumer.open_records(), what="that all is committed")
    for key in range(KEYS):
        assert handled.of_key(key) == [value for value in values(key) if value != f"{key}-4"]


def test_workers_share_the_partitions_with_others(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    one, two = AtOnce(), AtOnce()
    first = start(one, workers=WORKERS, heartbeat_interval_s=3.0)
    eventually(lambda: len(one.values) == ALL, what="all records")
    start(two, workers=WORKERS, heartbeat_interval_s=3.0)
    eventually(lambda: len(first.consumer.claims()) == 2, what="a fair share")
    fill_keys(settings, KEYS, EACH)
    eventually(lambda: len(one.values) + len(two.values) >= 2 * ALL, what="all records, again")
    assert set(Counter(one.values + two.values).values()) == {2}
    assert two.values


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_the_consumer_waits_for_what_is_in_hand_and_commits_it(
    settings: ConsumerSettings, is_async: bool
) -> None:
    """Here of `on_event`, as another partition is released."""
    fill(settings, 4)
    begun, lock, raised, handled = list[int](), threading.Lock(), threading.Event(), list[tuple[int, int]]()

    claimed: set[tuple[str, int]] = set()

    def told(event: Event) -> None:
        if isinstance(event, Claimed):
            claimed.add((event.topic, event.partition))
        if isinstance(event, Released):
            raised.set()
            raise ZeroDivisionError

    def finish(record: Any) -> None:
        with lock:  # two workers begin at once; a release would wait for a record of its partition
            if not begun:
                begun.append(record.partition())
        if record.partition() == begun[0]:
            assert raised.wait(60)
        handled.append((record.partition(), record.offset()))

    async def finish_in_a_thread(record: Any) -> None:
        await asyncio.to_thread(finish, record)

    def release(find: Callable[[], CoordinatedConsumer]) -> None:
        eventually(lambda: begun, what="a record in hand")
        consumer = find()
        # Of a claim that ends before it was announced, nothing is told.
        others = eventually(lambda: claimed - {(settings.topics[0], begun[0])}, what="another claim")
        consumer.release(*min(others))

    given = replace(settings, workers=2)
    with ThreadPoolExecutor() as pool, pytest.raises(ZeroDivisionError):  # noqa: PT012
        if is_async:
            consumer = AsyncCoordinatedConsumer(given, on_event=told)
            releasing = pool.submit(release, lambda: consumer._started)
            asyncio.run(consumer.run(finish_in_a_thread))
        else:
            started = CoordinatedConsumer(given, on_event=told)
            releasing = pool.submit(release, lambda: started)
            started.run(finish)
    releasing.result(30)
    assert begun[0] in dict(handled)
    with CoordinatedConsumer(settings) as successor:
        left = {(record.partition(), record.offset()) for record in iter(lambda: successor.poll(3.0), None)}
    assert not left & set(handled)
