"""Coordinated consumers in an event loop, on a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.events import Claimed, Event, GivenUp, Lost, Released
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import ConfigurationError
from harvester.idempotence import AsyncInbox
from harvester.outbox import schema
from harvester.outbox.async_stasher import AsyncStasher
from harvester.outbox.tables import OutboxTable
from harvester.record import OutboxRecord
from tests.support.coordinated import fill, settings
from tests.support.handled import Poison, fill_keys

__all__ = ["settings"]

KEYS, EACH = 20, 10
ALL = KEYS * EACH
QUICK: dict[str, Any] = {"backoff_s": 0.01, "longest_backoff_s": 0.05}
TIMEOUT_S = 60


def run(main: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await main

    return asyncio.run(bounded())


class Taken:
    """Values that a handler has taken; it raises on what `fails` says, and stops the consumer after the last."""

    def __init__(self, wanted: int, fails: Callable[[str], bool] = lambda _: False) -> None:
        self.values: list[str] = []
        self.fails, self.wanted = fails, wanted
        self.consumer: AsyncCoordinatedConsumer
        self.busy: Counter[bytes] = Counter()
        self.most = 0

    async def __call__(self, record: Any) -> None:
        value, key = record.value().decode(), record.key()
        self.busy[key] += 1
        assert self.busy[key] == 1, "two records of a key at once"
        self.most = max(self.most, sum(self.busy.values()))
        await asyncio.sleep(0)
        self.busy[key] -= 1
        if self.fails(value):
            raise Poison(value)
        self.values.append(value)
        if len(self.values) == self.wanted:
            self.consumer.stop()

    def run(self, settings: ConsumerSettings, **given: Any) -> AsyncCoordinatedConsumer:
        self.consumer = AsyncCoordinatedConsumer(settings, **given)
        run(self.consumer.run(self))
        return self.consumer

    def of_key(self, key: int) -> list[str]:
        return [value for value in self.values if value.startswith(f"{key}-")]


def values(key: int) -> list[str]:
    return [f"{key}-{number}" for number in range(EACH)]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_records_are_iterated_and_committed_in_the_loops_thread(settings: ConsumerSettings, at_most_once: bool) -> None:
    fill(settings, 400)
    changed = replace(settings, at_most_once=at_most_once, client_id="same")

    async def consume(wanted: int) -> list[int]:
        seen: list[int] = []
        events: list[tuple[Event, threading.Thread]] = []

        async def told(event: Event) -> None:
            await asyncio.sleep(0)
            events.append((event, threading.current_thread()))

        async with AsyncCoordinatedConsumer(changed, on_event=told) as consumer:
            async for record in consumer:
                held = {event.partition for event, _ in events if isinstance(event, Claimed)}
                assert record.partition() in held
                seen.append(int(record.value()))
                await consumer.commit(record)
                if len(seen) == wanted:
                    consumer.stop()
        assert {thread for _, thread in events} == {threading.main_thread()}
        kinds = Counter(type(event) for event, _ in events)
        assert kinds[Claimed] == kinds[Released] > 0
        return seen

    assert sorted(run(consume(400))) == list(range(400))
    fill(settings, 10, first=400)
    assert sorted(run(consume(10))) == list(range(400, 410))


@pytest.mark.parametrize("arrow", [False, True])
def test_lists_and_arrow_batches_are_consumed_and_committed(settings: ConsumerSettings, arrow: bool) -> None:
    fill(settings, 400)

    async def consume(wanted: int) -> list[int]:
        seen: list[int] = []
        async with AsyncCoordinatedConsumer(settings) as consumer:
            with pytest.raises(ValueError, match="at least one record"):
                await (consumer.consume_arrow if arrow else consumer.consume)(0, 0.1)
            while len(seen) < wanted:
                if arrow:
                    batch = await consumer.consume_arrow(50, 0.1)
                    rows = batch.to_pylist()
                    partitions, values = [row["partition"] for row in rows], [row["value"] for row in rows]
                else:
                    batch = await consumer.consume(50, 0.1)
                    partitions, values = [each.partition() for each in batch], [each.value() for each in batch]
                assert len(values) <= 50
                assert len(set(partitions)) <= 1
                seen += map(int, values)
                await consumer.commit(batch)
        return seen

    assert sorted(run(consume(400))) == list(range(400))
    fill(settings, 10, first=400)
    assert sorted(run(consume(10))) == list(range(400, 410))


def test_others_of_the_loop_run_while_nothing_comes(settings: ConsumerSettings) -> None:
    async def main() -> int:
        turns = 0
        async with AsyncCoordinatedConsumer(settings) as consumer:

            async def others() -> None:
                nonlocal turns
                while turns < 50:
                    turns += 1
                    await asyncio.sleep(0.01)
                consumer.stop()

            task = asyncio.create_task(others())
            async for _ in consumer:
                pytest.fail("there is no record")
            await task
        return turns

    assert run(main()) == 50


def test_what_is_not_committed_comes_again(settings: ConsumerSettings) -> None:
    fill_keys(settings, 1, 20, partition=1)

    async def main(left_out: int | None, wanted: int) -> list[str]:
        seen: list[str] = []
        async with AsyncCoordinatedConsumer(settings) as consumer:
            async for record in consumer:
                seen.append(record.value().decode())
                if record.offset() != left_out:
                    await consumer.commit(record)
                if len(seen) == wanted:
                    consumer.stop()
        return seen

    assert run(main(7, 20)) == [f"0-{number}" for number in range(20)]
    assert run(main(None, 13)) == [f"0-{number}" for number in range(7, 20)]


def test_a_commit_by_another_task_while_the_reader_waits_is_not_lost(settings: ConsumerSettings) -> None:
    fill_keys(settings, 1, 20, partition=1)

    async def main() -> None:
        async with AsyncCoordinatedConsumer(settings) as consumer:
            records = [await _polled(consumer) for _ in range(20)]
            waiting = asyncio.create_task(consumer.poll(0.3))
            await asyncio.sleep(0)  # it has begun
            assert consumer._filling is not None
            for record in reversed(records):
                await consumer.commit(record)
            assert await waiting is None
            assert consumer.open_records() == {}

    run(main())
    fill_keys(settings, 1, 1, partition=1)
    taken = Taken(1)
    taken.run(settings)
    assert taken.values == ["0-0"]


def test_a_record_that_comes_after_its_reader_was_cancelled_goes_to_the_next(settings: ConsumerSettings) -> None:
    async def main() -> None:
        async with AsyncCoordinatedConsumer(settings) as consumer:
            while len(consumer.claims()) < 4:
                await consumer.poll(0.05)
            waiting = asyncio.create_task(consumer.poll(30))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(fill_keys, settings, 1, 1, 1)
            record = await _polled(consumer)
            assert record.value() == b"0-0"

    run(main())


async def _polled(consumer: AsyncCoordinatedConsumer) -> Any:
    while (record := await consumer.poll(0.1)) is None:
        pass
    return record


@pytest.mark.parametrize("workers", [1, 8])
def test_a_poison_record_goes_to_the_dead_letter_topic(settings: ConsumerSettings, workers: int) -> None:
    fill_keys(settings, KEYS, EACH)
    taken = Taken(ALL - 1, lambda value: value == "3-4")
    told: list[Event] = []
    changed = replace(settings, workers=workers, on_error="dead-letter", attempts=3, **QUICK)
    consumer = taken.run(changed, on_event=told.append)
    assert [taken.of_key(key) for key in range(KEYS) if key != 3] == [values(key) for key in range(KEYS) if key != 3]
    assert taken.of_key(3) == [value for value in values(3) if value != "3-4"]
    (given_up,) = [event for event in told if isinstance(event, GivenUp)]
    assert (given_up.record.value(), given_up.attempts, given_up.dead_letter) == (b"3-4", 3, True)
    (letter,) = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert letter.value == b"3-4"
    assert consumer.statistics().failures == 3
    assert (taken.most > 1) is (workers > 1)
    fill_keys(settings, 1, 1)
    again = Taken(1)
    again.run(changed)
    assert again.values == ["0-0"]  # everything else was committed


@pytest.mark.parametrize("workers", [1, 8])
def test_a_handler_that_awaits_what_others_have_cancelled_has_failed(settings: ConsumerSettings, workers: int) -> None:
    """Nobody has cancelled the consumer: it goes on."""
    fill_keys(settings, KEYS, EACH)
    tries: list[str] = []

    def fails(value: str) -> bool:
        tries.append(value)
        return False

    taken = Taken(ALL, fails)

    async def handle(record: Any) -> None:
        if record.value() == b"3-4" and "3-4" not in tries:
            tries.append("3-4")
            call = asyncio.create_task(asyncio.sleep(60))
            call.cancel()
            await call
        await taken(record)

    changed = replace(settings, workers=workers, on_error="retry", **QUICK)
    taken.consumer = AsyncCoordinatedConsumer(changed)
    run(taken.consumer.run(handle))
    assert [taken.of_key(key) for key in range(KEYS)] == [values(key) for key in range(KEYS)]
    assert tries.count("3-4") == 2


def test_a_poison_record_costs_the_others_of_its_batch_nothing(settings: ConsumerSettings) -> None:
    fill_keys(settings, KEYS, EACH)
    taken = Taken(ALL - 1, lambda value: value == "3-4")
    sizes: list[int] = []

    async def handle(records: list[Any]) -> None:
        sizes.append(len(records))
        if len(records) > 1 and any(record.value() == b"3-4" for record in records):
            raise Poison("3-4")
        for record in records:
            await taken(record)

    taken.consumer = AsyncCoordinatedConsumer(replace(settings, on_error="dead-letter", attempts=2, **QUICK))
    run(taken.consumer.run_batches(handle, 50))
    assert 20 < max(sizes) <= 50
    assert [taken.of_key(key) for key in range(KEYS) if key != 3] == [values(key) for key in range(KEYS) if key != 3]
    assert taken.of_key(3) == [value for value in values(3) if value != "3-4"]
    (letter,) = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert (letter.value, letter.attempts) == (b"3-4", 2)
    fill_keys(settings, 1, 1)
    again = Taken(1)
    again.run(settings)
    assert again.values == ["0-0"]  # everything else was committed


def test_batches_are_not_handled_by_several_tasks(settings: ConsumerSettings) -> None:
    async def handle(_: list[Any]) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="workers"):
        run(AsyncCoordinatedConsumer(replace(settings, workers=2)).run_batches(handle))


def test_a_key_that_fails_keeps_its_order_while_others_go_on(settings: ConsumerSettings) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    taken = Taken(ALL, lambda value: value == "3-4" and len(taken.values) < ALL - EACH + 4)
    taken.run(replace(settings, on_error="retry", **QUICK))
    assert [taken.of_key(key) for key in range(KEYS)] == [values(key) for key in range(KEYS)]


def test_one_task_takes_a_partition_in_its_order(settings: ConsumerSettings) -> None:
    fill_keys(settings, KEYS, EACH, partition=1)
    taken = Taken(ALL)
    taken.run(settings)
    assert taken.values == [f"{key}-{number}" for number in range(EACH) for key in range(KEYS)]


def test_the_error_of_a_handler_comes_out(settings: ConsumerSettings) -> None:
    fill_keys(settings, KEYS, EACH)
    taken = Taken(ALL, lambda value: value == "3-4")
    with pytest.raises(Poison):
        taken.run(settings)
    rest = Taken(ALL - len(taken.values))
    rest.run(settings)
    assert sorted(taken.values + rest.values) == sorted(value for key in range(KEYS) for value in values(key))


def test_places(settings: ConsumerSettings) -> None:
    fill_keys(settings, 1, 20, partition=1)
    topic = settings.topics[0]

    async def main() -> None:
        async with AsyncCoordinatedConsumer(settings) as consumer:
            first = await _polled(consumer)
            assert (first.offset(), consumer.position(topic, 1)) == (0, 1)
            await consumer.seek(topic, 1, 15)
            assert (await _polled(consumer)).offset() == 15
            await consumer.pause(topic, 1)
            assert await consumer.poll(0.1) is None
            await consumer.resume(topic, 1)
            assert (await _polled(consumer)).offset() == 16

    run(main())


def keeping(inbox: AsyncInbox) -> Callable[[Event], Awaitable[None]]:
    """Opens and closes the inbox as claims come and go."""

    async def told(event: Event) -> None:
        match event:
            case Claimed(topic, partition, generation):
                await inbox.open(topic, partition, generation)
            case Released(topic, partition) | Lost(topic, partition):
                inbox.close(topic, partition)

    return told


def test_with_an_inbox_each_record_has_one_effect(settings: ConsumerSettings, empty_database: str) -> None:
    fill_keys(settings, KEYS, EACH)

    async def main() -> list[str]:
        async with await psycopg.AsyncConnection.connect(empty_database, autocommit=True) as connection:
            inbox = AsyncInbox(connection, settings.group)
            await inbox.create_table()
            await connection.execute("CREATE TABLE ledger (entry text)")

            handled = 0
            async with AsyncCoordinatedConsumer(settings, on_event=keeping(inbox)) as consumer:
                async for record in consumer:
                    async with inbox.record(record) as effect:
                        await effect.cursor.execute("INSERT INTO ledger VALUES (%s)", (record.value().decode(),))
                    await consumer.commit(record)
                    handled += 1
                    if handled == ALL:
                        consumer.stop()
            found = await connection.execute("SELECT entry FROM ledger")
            return [entry for (entry,) in await found.fetchall()]

    assert sorted(run(main())) == sorted(value for key in range(KEYS) for value in values(key))


def test_what_a_record_leads_to_is_stashed_once_in_the_same_transaction(
    settings: ConsumerSettings, empty_database: str
) -> None:
    """The handler fails after its row was written: inbox and outbox take it back together."""
    fill_keys(settings, KEYS, EACH)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        schema.init(connection, OutboxTable.parse("outbox"))
    failed: set[str] = set()

    async def main() -> list[tuple[str, str]]:
        async with await psycopg.AsyncConnection.connect(empty_database, autocommit=True) as connection:
            inbox, stasher = AsyncInbox(connection, settings.group), AsyncStasher()
            await inbox.create_table()
            handled = 0

            async def handle(record: Any) -> None:
                nonlocal handled
                key, value = record.key().decode(), record.value().decode()
                async with inbox.record(record) as effect:
                    await stasher.stash(effect.cursor, OutboxRecord("invoices", key, f"invoice of {value}"))
                    if value.endswith("-4") and value not in failed:
                        failed.add(value)
                        raise Poison(value)
                handled += 1
                if handled == ALL:
                    consumer.stop()

            changed = replace(settings, on_error="retry", order="partition", **QUICK)
            consumer = AsyncCoordinatedConsumer(changed, on_event=keeping(inbox))
            await consumer.run(handle)
            found = await connection.execute("SELECT kafka_key, kafka_value FROM outbox ORDER BY id")
            return list(await found.fetchall())

    rows = run(main())
    assert len(failed) == KEYS
    assert len(rows) == ALL
    for key in range(KEYS):
        assert [text for each, text in rows if each == str(key)] == [f"invoice of {value}" for value in values(key)]
