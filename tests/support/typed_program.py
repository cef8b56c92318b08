"""A program of a user with the public names: the checks type it with the product, strictly."""

from __future__ import annotations

from typing import Any

import psycopg

from harvester import (
    AsyncCoordinatedConsumer,
    AsyncInbox,
    Config,
    ConsumerSettings,
    CoordinatedConsumer,
    Event,
    Harvester,
    Inbox,
    LeaderAcquired,
    OutboxRecord,
    Stasher,
)
from harvester.coordination.events import Claimed, GivenUp, Lost, Released
from harvester.coordination.events import Event as ConsumerEvent


def stash(connection: psycopg.Connection[Any]) -> int:
    return Stasher("outbox").stash(connection, OutboxRecord(topic="orders", key="customer-42", value="{}"))


def relay() -> bool:
    def on_event(event: Event) -> None:
        if isinstance(event, LeaderAcquired):
            print(event.term)

    with Harvester(Config(), on_event=on_event) as harvester:
        return harvester.wait(1.0)


async def relay_async() -> None:
    async with Harvester(Config()) as harvester:
        await harvester.wait_async()


def consume(connection: psycopg.Connection[Any]) -> None:
    inbox = Inbox(connection, "billing")

    def told(event: ConsumerEvent) -> None:
        match event:
            case Claimed(topic, partition, generation):
                inbox.open(topic, partition, generation)
            case Released(topic, partition) | Lost(topic, partition):
                inbox.close(topic, partition)
            case GivenUp(record):
                with inbox.record(record):
                    pass

    def handle(records: list[Any]) -> None:
        with inbox.batch(records) as batch:
            for record in batch.new:
                batch.cursor.execute("INSERT INTO ledger VALUES (%s, %s)", (record.key(), record.value().decode()))

    settings = ConsumerSettings(kafka={}, group="billing", topics=["orders"], on_error="dead-letter")
    CoordinatedConsumer(settings, on_event=told).run_batches(handle, 500)
    with CoordinatedConsumer(kafka={}, group="billing", topics="orders") as consumer:
        for record in consumer:
            with inbox.record(record) as effect:
                if effect.novelty:
                    effect.cursor.execute("SELECT 1")
            consumer.commit(record)


async def consume_async(connection: psycopg.AsyncConnection[Any], settings: ConsumerSettings) -> None:
    inbox = AsyncInbox(connection, "billing")
    async with AsyncCoordinatedConsumer(settings) as consumer:
        async for record in consumer:
            async with inbox.batch([record]) as batch:
                for new in batch.new:
                    print(new.value(), new.topic())
            await consumer.commit(record)
