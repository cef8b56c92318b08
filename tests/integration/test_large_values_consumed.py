"""Values that lie in a store, as consumers get them: coordinated ones, the inbox, `harvester consume`, `verify`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from harvester import AsyncCoordinatedConsumer, CoordinatedConsumer, StoreSettings
from harvester.claim_check import ClaimChecks
from harvester.claim_check.reference import HEADER, read, refer, replaced
from harvester.claim_check.stores import open_store
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.events import Claimed, Event, GivenUp
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import InboxError, StoredValueChanged, StoredValueMissing
from harvester.idempotence import AsyncInbox, Inbox
from harvester.outbox.schema import init
from harvester.outbox.tables import OutboxTable
from harvester.record import KafkaRecord
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from tests.support.cli import run_cli
from tests.support.coordinated import settings
from tests.support.harvesting import Scene
from tests.support.inbox import Forged
from tests.support.large_values import directory, s3
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]
__all__ = ["directory", "s3", "settings"]


def value_of(number: int) -> bytes:
    return b"%d:" % number + b"x" * 5000


def fill(
    settings: ConsumerSettings, store: StoreSettings, count: int = 10, key: Callable[[int], bytes] = lambda _: b"k"
) -> list[str]:
    """Records of one partition, every second with its value in the store; the names of those objects."""
    producer, names = Producer({**settings.kafka, "enable.idempotence": True}), []  # in order, whatever is sent again
    for number in range(count):
        record = KafkaRecord(number, key(number), settings.topics[0], value_of(number), [("n", b"%d" % number)], 0, 0)
        if number % 2:
            reference = refer(record)
            open_store(store).put(reference.name, value_of(number))
            names.append(reference.name)
            record = replaced(record, reference, store.url)
        headers: Any = record.headers
        producer.produce(record.topic, record.value, record.key, record.partition, headers=headers)
    producer.flush(30)
    return names


def spoil(store: StoreSettings, name: str) -> None:
    Path(store.url.removeprefix("file://"), name).write_bytes(b"y" * 5002)


def run_all(consumer: CoordinatedConsumer, count: int, seen: list[Any]) -> None:
    def handle(record: Any) -> None:
        seen.append(record)
        if len(seen) == count:
            consumer.stop()

    consumer.run(handle)


def by_batches(consumer: CoordinatedConsumer, count: int, seen: list[Any]) -> None:
    def handle(records: list[Any]) -> None:
        seen.extend(records)
        if len(seen) == count:
            consumer.stop()

    consumer.run_batches(handle, 3)


def by_loop(consumer: CoordinatedConsumer, count: int, seen: list[Any]) -> None:
    with consumer:
        for record in consumer:
            seen.append(record)
            consumer.commit(record)
            if len(seen) == count:
                consumer.stop()


def by_poll(consumer: CoordinatedConsumer, count: int, seen: list[Any]) -> None:
    with consumer:
        while len(seen) < count:
            record = consumer.poll(0.1)
            if record is not None:
                seen.append(record)
                consumer.commit(record)


def by_lists(consumer: CoordinatedConsumer, count: int, seen: list[Any]) -> None:
    with consumer:
        while len(seen) < count:
            records = consumer.consume(4, 0.1)
            seen.extend(records)
            consumer.commit(records)


@pytest.mark.parametrize("way", [run_all, by_batches, by_loop, by_poll, by_lists])
def test_a_coordinated_consumer_hands_out_values(
    settings: ConsumerSettings, directory: StoreSettings, way: Callable[[CoordinatedConsumer, int, list[Any]], None]
) -> None:
    fill(settings, directory)
    seen: list[Any] = []
    way(CoordinatedConsumer(replace(settings, claim_check=directory)), 10, seen)
    assert [record.value() for record in seen] == [value_of(number) for number in range(10)]
    assert [record.headers() for record in seen] == [[("n", b"%d" % number)] for number in range(10)]
    with CoordinatedConsumer(settings) as successor:  # of its group: all of it is committed
        assert successor.consume(1, 3.0) == []


@pytest.mark.parametrize("way", ["poll", "loop"])
def test_a_record_whose_claim_ended_while_its_value_was_fetched_is_not_handed_out(
    settings: ConsumerSettings, directory: StoreSettings, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have handled it, and what follows it."""
    fill(settings, directory, 2)
    asked, may_answer, seen = threading.Event(), threading.Event(), list[Any]()
    with CoordinatedConsumer(replace(settings, claim_check=directory)) as consumer:
        resolve = ClaimChecks.resolve

        def slow(checks: ClaimChecks, record: Any) -> Any:
            if seen:  # the first one
                asked.set()
                may_answer.wait(60)
            return resolve(checks, record)

        monkeypatch.setattr(ClaimChecks, "resolve", slow)

        def polled() -> Iterator[Any]:
            while not consumer._is_over:
                if (record := consumer.poll(0.1)) is not None:
                    yield record

        def take() -> None:
            for record in consumer if way == "loop" else polled():
                seen.append(record)
                consumer.commit(record)

        taking = threading.Thread(target=take)
        taking.start()
        assert asked.wait(60)
        token = consumer.claims()[settings.topics[0], 0]
        consumer.release(settings.topics[0], 0)
        eventually(lambda: consumer.claims().get((settings.topics[0], 0)) != token, what="the end of the claim")
        assert [record.offset() for record in seen] == [0]
        consumer.stop()
        may_answer.set()
        taking.join(30)
    assert [record.offset() for record in seen] == [0]


@pytest.mark.parametrize(("workers", "keys"), [(1, 1), (1, 60), (2, 1)])
def test_an_async_consumer_hands_out_values(
    settings: ConsumerSettings, directory: StoreSettings, workers: int, keys: int
) -> None:
    """With one worker, a record passes by the queue if none of its key is there."""
    fill(settings, directory, 60, lambda number: b"%d" % (number % keys))
    looped, handled = list[bytes](), list[bytes]()

    async def main(claim_check: Any) -> None:
        async with AsyncCoordinatedConsumer(replace(settings, claim_check=claim_check)) as consumer:
            async for record in consumer:
                looped.append(record.value())
                await consumer.commit(record)
                if len(looped) == 4:
                    consumer.stop()
        consumer = AsyncCoordinatedConsumer(replace(settings, claim_check=claim_check, workers=workers))

        async def handle(record: Any) -> None:
            handled.append(record.value())
            if len(handled) == 56:
                consumer.stop()

        await consumer.run(handle)

    asyncio.run(asyncio.wait_for(main({"url": directory.url}), 60))
    if keys > 1:
        handled.sort(key=lambda value: int(value.split(b":")[0]))
    assert looped + handled == [value_of(number) for number in range(60)]


def test_a_value_that_cannot_be_had_is_a_failure_of_its_handler(
    settings: ConsumerSettings, directory: StoreSettings
) -> None:
    """The dead letter holds the reference, not the value: it is as large as the record was."""
    names = fill(settings, directory)
    spoil(directory, names[1])
    seen, told = list[bytes](), list[GivenUp]()
    given = replace(settings, claim_check=directory, on_error="dead-letter", attempts=2, backoff_s=0.01)
    consumer = CoordinatedConsumer(
        given, on_event=lambda event: told.append(event) if isinstance(event, GivenUp) else None
    )

    def handle(record: Any) -> None:
        seen.append(record.value())
        if len(seen) + len(told) == 10:
            consumer.stop()

    consumer.run(handle)
    assert seen == [value_of(number) for number in range(10) if number != 3]
    assert isinstance(told[0].error, StoredValueChanged)
    (letter,) = DeadLetterTopic(given.dead_letters, given.kafka).read()
    assert read(letter.value, letter.headers) is not None
    assert len(letter.value or b"") < 1000


@pytest.mark.parametrize("workers", [1, 2])
def test_an_async_handler_is_given_the_value_at_each_try_and_fails_where_it_cannot_be_had(
    settings: ConsumerSettings, directory: StoreSettings, workers: int
) -> None:
    names = fill(settings, directory)
    spoil(directory, names[1])
    tried, told = list[bytes](), list[GivenUp]()
    given = replace(
        settings, claim_check=directory, workers=workers, on_error="dead-letter", attempts=2, backoff_s=0.01
    )

    def stop_after_all() -> None:
        if len(set(tried)) + len(told) == 10:
            consumer.stop()

    async def handle(record: Any) -> None:
        tried.append(record.value())
        if record.value() == value_of(5) and tried.count(value_of(5)) == 1:
            raise ValueError
        stop_after_all()

    def note(event: Event) -> None:
        if isinstance(event, GivenUp):
            told.append(event)
            stop_after_all()

    consumer = AsyncCoordinatedConsumer(given, on_event=note)
    asyncio.run(asyncio.wait_for(consumer.run(handle), 60))
    assert tried == [value_of(number) for number in (0, 1, 2, 4, 5, 5, 6, 7, 8, 9)]
    assert [(type(event.error), event.attempts) for event in told] == [(StoredValueChanged, 2)]
    (letter,) = DeadLetterTopic(given.dead_letters, given.kafka).read()
    assert read(letter.value, letter.headers) is not None


def test_async_lists_and_poll_have_values(settings: ConsumerSettings, directory: StoreSettings) -> None:
    fill(settings, directory)

    async def main() -> list[bytes]:
        seen: list[bytes] = []
        async with AsyncCoordinatedConsumer(replace(settings, claim_check=directory)) as consumer:
            while len(seen) < 10:
                records = [await consumer.poll(0.1)] if len(seen) < 4 else await consumer.consume(3, 0.1)
                seen += [record.value() for record in records if record is not None]
        return seen

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [value_of(number) for number in range(10)]


def test_a_loop_ends_with_the_record_whose_value_cannot_be_had(
    settings: ConsumerSettings, directory: StoreSettings
) -> None:
    names = fill(settings, directory)
    spoil(directory, names[0])
    seen: list[Any] = []
    with pytest.raises(StoredValueChanged, match=names[0]):
        by_loop(CoordinatedConsumer(replace(settings, claim_check=directory)), 10, seen)
    assert [record.value() for record in seen] == [value_of(0)]
    open_store(directory).put(names[0], value_of(1))
    again: list[Any] = []
    by_poll(CoordinatedConsumer(replace(settings, claim_check=directory)), 9, again)
    assert [record.value() for record in again] == [value_of(number) for number in range(1, 10)]


def test_consume_prints_values(settings: ConsumerSettings, s3: StoreSettings) -> None:
    fill(settings, s3)
    done = run_cli(
        "consume", "--group", settings.group, "--topic", settings.topics[0], "--count", "10",
        "--coordination-topic", settings.coordination_topic, "--heartbeat-interval", "3s",
        "--bootstrap", str(settings.kafka["bootstrap.servers"]),
        "--set", f"oversize.store={s3.url}", "--set", f"oversize.s3_endpoint={s3.endpoint}",
        "--set", f"oversize.s3_region={s3.region}",
    )  # fmt: skip
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["value"] for record in printed] == [value_of(number).decode() for number in range(10)]
    assert HEADER not in done.stdout


# -- the inbox


class Referring(Forged):
    """A message whose value lies in a store."""

    def record(self) -> KafkaRecord:
        return KafkaRecord(self.at, None, "orders", value_of(self.at), [], 0, 0)

    def published(self) -> KafkaRecord:
        return replaced(self.record(), refer(self.record()), "s3://somewhere")

    def value(self) -> Any:
        return self.published().value

    def headers(self) -> Any:
        return self.published().headers


def test_the_inbox_gives_values_and_does_nothing_where_one_is_missing(database: str, directory: StoreSettings) -> None:
    first, second, third = Referring(1), Referring(2), Forged(3)
    open_store(directory).put(refer(first.record()).name, value_of(1))
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE TABLE effect (value bytea)")
        inbox = Inbox(db, "group", claim_check=directory)
        inbox.create_table()
        inbox.open("orders", 0)
        with inbox.record(first) as effect:
            assert effect.message.value() == value_of(1)
            effect.cursor.execute("INSERT INTO effect VALUES (%s)", (effect.message.value(),))
        with pytest.raises(StoredValueMissing), inbox.batch([second, third]) as batch:
            batch.cursor.executemany("INSERT INTO effect VALUES (%s)", ((each.value(),) for each in batch.new[::-1]))
        with pytest.raises(InboxError, match="@2 was not committed"), inbox.record(third):
            """It would be passed over, and nobody told."""
        open_store(directory).put(refer(second.record()).name, value_of(2))
        with inbox.batch([second, third]) as batch:
            assert [message.value() for message in batch.new] == [value_of(2), None]
        assert db.execute("SELECT value FROM effect").fetchall() == [(value_of(1),)]


def test_a_record_whose_value_is_lost_is_given_up_and_left_out_by_the_inbox(
    settings: ConsumerSettings, directory: StoreSettings, database: str
) -> None:
    names = fill(settings, directory)
    spoil(directory, names[1])
    Path(directory.url.removeprefix("file://"), names[2]).unlink()
    given = replace(settings, on_error="dead-letter", order="partition", attempts=1)
    seen: list[bytes] = []

    def told(event: Event) -> None:
        match event:
            case Claimed(topic, partition, generation):
                inbox.open(topic, partition, generation)
            case GivenUp(record):
                with inbox.record(record):
                    """Without an effect."""

    def handle(record: Any) -> None:
        with inbox.record(record) as effect:
            seen.append(effect.message.value())
            if seen[-1] == value_of(9):
                consumer.stop()

    with psycopg.connect(database, autocommit=True) as db:
        inbox = Inbox(db, given.group, claim_check=directory)
        inbox.create_table()
        consumer = CoordinatedConsumer(given, on_event=told)
        consumer.run(handle)
    assert seen == [value_of(number) for number in range(10) if number not in (3, 5)]
    errors = [letter.error.partition(":")[0] for letter in DeadLetterTopic(given.dead_letters, given.kafka).read()]
    assert errors == ["StoredValueChanged", "StoredValueMissing"]


def test_the_async_inbox_gives_values(database: str, directory: StoreSettings) -> None:
    message = Referring(1)
    open_store(directory).put(refer(message.record()).name, value_of(1))

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
            inbox = AsyncInbox(db, "group", claim_check={"url": directory.url})
            await inbox.create_table()
            await inbox.open("orders", 0)
            async with inbox.record(message) as effect:
                assert effect.message.value() == value_of(1)
            with pytest.raises(StoredValueMissing):
                async with inbox.record(Referring(2)) as effect:
                    effect.message.value()
            with pytest.raises(InboxError, match="@2 was not committed"):
                async with inbox.record(Forged(3)):
                    """It would be passed over, and nobody told."""
            async with inbox.record(Referring(2)):
                """It is left out."""
            async with inbox.record(Forged(3)) as effect:
                assert effect.is_new

    asyncio.run(main())


# -- verify


def test_verify_reads_values(scene: Scene, directory: StoreSettings) -> None:
    table = OutboxTable.parse("outbox")
    init(scene.db, table)
    pump(scene.dsn, table, Load(records=40, keys=4, topics=(scene.topic,), value_bytes=5000))
    claim_check = {"policy": "claim-check", "store": directory.url, "above": 2000}
    with scene.embedded(oversize=claim_check):
        scene.wait_left()
    options = scene.config().common_options()
    report = verify(scene.dsn, table, options, claim_check=directory)
    assert (report.verdict.delivered, report.verdict.holds) == (40, True)
    blind = verify(scene.dsn, table, options)
    assert blind.verdict.lost == 40
    root = Path(directory.url.removeprefix("file://"))
    spoil(directory, next(path for path in root.rglob("*") if path.is_file()).relative_to(root).as_posix())
    with pytest.raises(StoredValueChanged):
        verify(scene.dsn, table, options, claim_check=directory)
