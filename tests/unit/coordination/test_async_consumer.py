"""Who takes a record, and when, if tasks are cancelled and handlers raise; a claim is held without a broker."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Message

from harvester.clock import clock_s
from harvester.coordination import consumer as consumers
from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.events import Claimed, Event, EventHandler, Lost
from harvester.coordination.session import Session
from harvester.errors import StoredValueMissing

PLACE = GroupPartition("g", "t", 0)
FIRST, COUNT = 10, 6
KAFKA = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


class Held:
    """A claim that does not run out."""

    batch = None

    def hand_out_until(self, _: object) -> float:
        return math.inf


class Holding:
    """Makes a consumer that holds one partition, of which records wait; each `let` opens one more wait for them."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.events: list[Event] = []
        self.may_fetch = threading.Event()
        self.fetching = threading.Event()
        self.closed = threading.Event()
        self.made: CoordinatedConsumer
        self.buffer: PartitionBuffer

    def begin(self, on_event: EventHandler) -> CoordinatedConsumer:
        self.made = made = CoordinatedConsumer(
            kafka=KAFKA, group="g", topics=("t",), heartbeat_interval_s=1.0, on_event=on_event, **self.given
        )
        made._look_at = made._mirror_at = math.inf
        self.buffer = made._session.buffer[PLACE] = PartitionBuffer(PLACE, 7, FIRST - 1, token=7)
        self.buffer.begin(None)
        fetcher: Any = made._fetcher
        session: Any = made._session
        session.holding = lambda _: Held()
        fetcher.follow, fetcher.fetch = self._follow, self._fetch
        closing: Any = made
        closing.close = self._close
        return made

    def lose(self) -> None:
        """As the session's thread does."""
        session = self.made._session
        with session.lock:
            del session.buffer[PLACE]
            if self.buffer.batch is not None:
                self.buffer.batch.end()
        self.events.append(Lost("t", 0, 7, "it ran out"))

    def _follow(self) -> Iterator[Event]:
        while self.events:
            yield self.events.pop(0)

    def _fetch(self, timeout_s: float) -> None:
        self.fetching.set()
        if not self.may_fetch.wait(timeout_s) or self.buffer.fetched_to != FIRST - 1:
            return
        self.buffer.fetch([
            Message(topic="t", partition=0, offset=offset, key=b"ab"[offset % 2 :][:1], value=b"")
            for offset in range(FIRST, FIRST + COUNT)
        ])  # fmt: skip

    def _close(self, *, release: bool = True) -> None:
        self.made._session.ended.set()
        self.made._session._log.close(0)
        self.closed.set()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "ensure_coordination_topic", lambda *_: None)
    monkeypatch.setattr(Session, "start", lambda _: None)


def opened(holding: Holding, on_event: Callable[[Event], Any] | None = None) -> AsyncCoordinatedConsumer:
    made = AsyncCoordinatedConsumer(kafka=KAFKA, group="g", topics=("t",), on_event=on_event)
    made._begin = lambda: holding.begin(made._events.append)
    return made


async def offsets(consumer: AsyncCoordinatedConsumer) -> list[int]:
    """All that comes, committed."""
    found = []
    while (record := await consumer.poll(0.2)) is not None:
        found.append(record.offset())
        await consumer.commit(record)
    return found


ALL = list(range(FIRST, FIRST + COUNT))


def test_an_event_handler_that_raises_costs_no_record() -> None:
    def raises(event: Event) -> None:
        raise OSError("the database is away")

    async def main() -> None:
        holding = Holding()
        holding.may_fetch.set()
        holding.events.append(Claimed("t", 0, 7))
        async with opened(holding, raises) as consumer:
            with pytest.raises(OSError, match="away"):
                await consumer.poll(1)
            assert await offsets(consumer) == ALL
            assert holding.buffer.last_offset == ALL[-1]

    asyncio.run(main())


def test_a_poll_that_is_cancelled_while_an_event_is_told_costs_no_record() -> None:
    async def main() -> None:
        told, waits = asyncio.Event(), asyncio.Event()

        async def opens_an_inbox(event: Event) -> None:
            told.set()
            await waits.wait()

        holding = Holding()
        holding.may_fetch.set()
        holding.events.append(Claimed("t", 0, 7))
        async with opened(holding, opens_an_inbox) as consumer:
            poll = asyncio.create_task(consumer.poll(1))
            await told.wait()
            poll.cancel()
            await asyncio.wait([poll])
            assert await offsets(consumer) == ALL

    asyncio.run(main())


def test_a_record_that_came_after_the_poll_was_cancelled_is_not_handed_out_once_its_claim_is_over() -> None:
    async def main() -> None:
        holding = Holding()
        async with opened(holding) as consumer:
            poll = asyncio.create_task(consumer.poll(60))
            await asyncio.to_thread(holding.fetching.wait)
            poll.cancel()
            await asyncio.wait([poll])
            filling = consumer._filling
            assert filling is not None
            holding.may_fetch.set()
            await asyncio.wait([filling])
            holding.lose()
            assert await consumer.poll(0.1) is None
            assert holding.buffer.last_handed_out == FIRST - 1

    asyncio.run(main())


def test_a_loop_that_is_late_is_handed_what_the_thread_opened_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has a tenth of a second, which begins when the loop comes to it."""
    monkeypatch.setattr(consumers, "_OPEN_S", 0.005)

    async def main() -> None:
        holding = Holding()
        holding.may_fetch.set()
        async with opened(holding) as consumer:
            filling = consumer._fill(1)
            await asyncio.wait([filling])
            opened_until = consumer._started._batch.until
            await asyncio.sleep(0.01)
            assert opened_until < clock_s()
            assert (await consumer.poll(0)).offset() == FIRST

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_a_reader_that_is_cancelled_closes_the_consumer(times: int) -> None:
    """Twice is what an outer scope does that ends while the inner one does."""

    async def reads(consumer: AsyncCoordinatedConsumer) -> None:
        async with consumer:
            async for _ in consumer:
                raise AssertionError("nothing comes")

    async def main() -> None:
        holding = Holding()
        reader = asyncio.create_task(reads(opened(holding)))
        await asyncio.to_thread(holding.fetching.wait)
        for _ in range(times):
            reader.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([reader])
        assert reader.cancelled()
        assert await asyncio.to_thread(holding.closed.wait, 10)

    asyncio.run(main())


def test_what_is_closed_can_be_closed_again_and_polled() -> None:
    async def main() -> None:
        async with opened(Holding()) as consumer:
            await consumer.close(release=False)
            await consumer.close()
            assert await consumer.poll(1) is None
            assert [record async for record in consumer] == []

    asyncio.run(main())


@pytest.mark.parametrize("by_run", [False, True])
def test_a_reader_ends_when_another_task_closes_the_consumer(by_run: bool) -> None:
    """In the very moment in which it would wait for more."""

    async def main() -> None:
        holding, read, last = Holding(), list[int](), asyncio.Event()
        holding.may_fetch.set()
        consumer = opened(holding)

        async def handle(record: Any) -> None:
            read.append(record.offset())
            if read == ALL:
                last.set()

        async def reads() -> None:
            if by_run:
                await consumer.run(handle)
                return
            async with consumer:
                async for record in consumer:
                    await handle(record)

        async def closes() -> None:
            await last.wait()
            await consumer.close()

        await asyncio.gather(reads(), closes())
        assert read == ALL
        assert await consumer.poll(1) is None

    asyncio.run(main())


def test_what_begins_after_its_task_was_cancelled_is_closed() -> None:
    async def main() -> None:
        holding, may_begin, begins = Holding(), threading.Event(), threading.Event()
        consumer = opened(holding)
        begin: Callable[[], CoordinatedConsumer] = consumer._begin

        def late() -> CoordinatedConsumer:
            begins.set()
            may_begin.wait()
            return begin()

        consumer._begin = late
        entering = asyncio.create_task(consumer.__aenter__())
        await asyncio.to_thread(begins.wait)
        entering.cancel()
        await asyncio.wait([entering])
        may_begin.set()
        assert await asyncio.to_thread(holding.closed.wait, 10)

    asyncio.run(main())


def test_a_handler_whose_own_task_was_cancelled_has_failed() -> None:
    """Otherwise its record would stay in hand for ever, and its key with it."""

    async def handle(record: Any) -> None:
        if record.offset() == FIRST:
            other = asyncio.ensure_future(asyncio.sleep(60))
            other.cancel()
            await other

    async def main() -> None:
        holding = Holding(workers=2)
        holding.may_fetch.set()
        run = asyncio.create_task(opened(holding).run(handle))
        await asyncio.wait([run], timeout=10)
        assert run.done()
        assert "cancelled" in str(run.exception())
        assert holding.closed.is_set()

    asyncio.run(main())


class Store:
    """Has the value of each record, but for that of `missing`; `may_answer` holds the answers back."""

    def __init__(self, missing: int | None = None) -> None:
        self.missing = missing
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def applies_to(self, _: Any) -> bool:
        return True

    def resolve(self, record: Any) -> Any:
        self.asked.set()
        self.may_answer.wait()
        if record.offset() == self.missing:
            raise StoredValueMissing("it is not there")
        return record


def test_a_poll_that_is_cancelled_while_a_value_comes_costs_no_record() -> None:
    async def main() -> None:
        holding, store = Holding(), Store()
        holding.may_fetch.set()
        async with opened(holding) as consumer:
            with_values: Any = consumer._started
            with_values._claim_checks = store
            store.may_answer.clear()
            poll = asyncio.create_task(consumer.poll(1))
            await asyncio.to_thread(store.asked.wait)
            poll.cancel()
            await asyncio.wait([poll])
            store.may_answer.set()
            assert await offsets(consumer) == ALL

    asyncio.run(main())


def test_a_value_that_takes_longer_than_a_batch_is_open_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_OPEN_S", 0.005)

    class Slow(Store):
        def resolve(self, record: Any) -> Any:
            threading.Event().wait(0.02)
            return record

    async def main() -> None:
        holding = Holding()
        holding.may_fetch.set()
        async with opened(holding) as consumer:
            with_values: Any = consumer._started
            with_values._claim_checks = Slow()
            assert (await consumer.poll(1)).offset() == FIRST

    asyncio.run(main())


def test_a_list_ends_before_a_value_that_is_missing_and_the_next_one_tells_of_it() -> None:
    async def main() -> None:
        holding = Holding()
        holding.may_fetch.set()
        async with opened(holding) as consumer:
            with_values: Any = consumer._started
            with_values._claim_checks = Store(missing=FIRST + 2)
            assert [record.offset() for record in await consumer.consume(100, 1)] == ALL[:2]
            with pytest.raises(StoredValueMissing):
                await consumer.consume(100, 1)
            assert [record.offset() for record in await consumer.consume(100, 1)] == ALL[3:]

    asyncio.run(main())


def test_events_are_told_before_the_first_record_of_a_list_and_not_within_it() -> None:
    """A handler that raises there would cost the records that were taken."""
    holding = Holding()
    holding.may_fetch.set()
    told: list[Event] = []
    consumer = holding.begin(told.append)
    attended: Any = consumer._fetcher
    calls = iter(([], [], [Claimed("t", 1, 8)]))
    attended.follow = lambda: iter(next(calls, []))
    assert [record.offset() for record in consumer.consume(100, 1)] == ALL
    assert told == []
    assert consumer.consume(100, 0) == []
    assert told == [Claimed("t", 1, 8)]
    consumer.close()


def test_without_a_loop_a_list_ends_before_a_missing_value_as_well() -> None:
    holding = Holding()
    holding.may_fetch.set()
    consumer = holding.begin(lambda _: None)
    with_values: Any = consumer
    with_values._claim_checks = Store(missing=FIRST + 2)
    assert [record.offset() for record in consumer.consume(100, 1)] == ALL[:2]
    with pytest.raises(StoredValueMissing):
        consumer.consume(100, 1)
    assert [record.offset() for record in consumer.consume(100, 1)] == ALL[3:]
    consumer.close()


def test_events_are_told_between_lists_of_a_long_batch_with_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_OPEN_S", 0.0)
    holding = Holding()
    holding.may_fetch.set()
    told: list[Event] = []
    consumer = holding.begin(told.append)
    with_values: Any = consumer
    with_values._claim_checks = Store()
    consumer._open_batch(1)
    holding.events.append(Claimed("t", 1, 8))
    consumer.consume(1, 0)
    assert told == [Claimed("t", 1, 8)]
    consumer.close()


class Flowing(Holding):
    """Eight partitions that each bring 450 records whenever there are none, after a first one of 200."""

    def begin(self, on_event: EventHandler) -> CoordinatedConsumer:
        made = super().begin(on_event)
        places = [GroupPartition("g", "t", number) for number in range(8)]
        self.buffers = [
            made._session.buffer.setdefault(place, PartitionBuffer(place, 7, FIRST - 1)) for place in places
        ]
        self.attended = 0
        self.fails = False
        return made

    def _follow(self) -> Iterator[Event]:
        self.attended += 1
        return iter(())

    def _fetch(self, timeout_s: float) -> None:
        if self.fails:
            self.made._session.fail(OSError("it is refused"))
        for buffer in self.buffers:
            first = buffer.next_offset
            count = 200 if buffer is self.buffers[0] and first == FIRST else 450
            if not buffer.fetched and buffer.open_records < 1000:
                buffer.fetch([
                    Message(topic="t", partition=buffer.place.partition, offset=first + number, key=b"", value=b"")
                    for number in range(count)
                ])  # fmt: skip


def test_lists_that_each_begin_with_what_was_left_do_not_keep_events_and_claims_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock_s()]
    monkeypatch.setattr(consumers, "clock_s", lambda: now[0])
    holding = Flowing()
    consumer = holding.begin(lambda _: None)
    for _ in range(200):
        consumer.commit(consumer.consume(500, 0.1))
        now[0] += 0.01
    assert holding.attended >= 10, "once in a tenth of a second"
    consumer.close()


def test_nothing_is_handed_out_behind_what_ends_the_consumer() -> None:
    """It is met while a list is being filled, and told with the next one."""
    holding = Flowing()
    consumer = holding.begin(lambda _: None)
    consumer._open_batch(0.1)
    there = sum(len(buffer.fetched) for buffer in holding.buffers) + len(consumer._batch.records)
    holding.fails = True
    assert len(consumer.consume(100_000, 0.1)) == there
    with pytest.raises(OSError, match="refused"):
        consumer.consume(100_000, 0.1)
    consumer.close()


def test_a_claim_that_ends_while_an_earlier_event_is_handled_is_not_told_of() -> None:
    """Whatever would be opened for it belongs to another consumer by now."""
    told: list[Event] = []

    async def main() -> None:
        holding = Holding()

        async def tell(event: Event) -> None:
            told.append(event)
            if len(told) == 1:
                holding.lose()

        async with opened(holding, tell) as consumer:
            consumer._events += [Lost("t", 1, 6, "its time is over"), Claimed("t", 0, 7)]
            await consumer._tell()
            await consumer.poll(0.2)
            assert told[1:] == []

    asyncio.run(main())


def test_a_claim_that_is_over_when_the_task_hears_of_it_is_not_told_of() -> None:
    told: list[Event] = []
    consumer = AsyncCoordinatedConsumer(kafka=KAFKA, group="g", topics=("t",), on_event=told.append)
    lost = Lost("t", 0, 7, "its time is over")
    consumer._events += [Claimed("t", 0, 7), Claimed("t", 1, 8), lost, Claimed("t", 0, 9)]
    asyncio.run(consumer._tell())
    assert told == [Claimed("t", 1, 8), Claimed("t", 0, 9)]
