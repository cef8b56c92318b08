"""Coordinated consumers on a real broker, each on a thread of its own."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from harvester.clock import clock_s
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Claimed, Event
from harvester.coordination.settings import ConsumerSettings
from tests.support.consuming import read_topic
from tests.support.servers import Servers
from tests.support.wait import eventually

INTERVAL_S = 2.0  # with one second, claims run out on a machine that is busy with six tests at once
Handed = tuple[float, int, int]  # when, partition, offset


@pytest.fixture
def settings(servers: Servers, topic: str) -> ConsumerSettings:
    """Of a group of its own, with a coordination topic of its own."""
    name = uuid.uuid4().hex[:8]
    return ConsumerSettings(
        kafka={"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"},
        group=f"group-{name}",
        topics=(topic,),
        coordination_topic=f"marshal-{name}",
        coordination_partitions=2,
        heartbeat_interval_s=INTERVAL_S,
        batch_records=20,
    )


class Member:
    """A consumer, what it saw and what it was told."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.seen: list[int] = []
        self.handed: list[Handed] = []
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.consumer = CoordinatedConsumer(settings, on_event=self.events.append)
        self._asked: list[Callable[[CoordinatedConsumer], object]] = []
        self._release: bool | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._release is None:
                while self._asked:
                    self._asked.pop(0)(self.consumer)
                record = self.consumer.poll(0.05)
                if record is not None:
                    self.handed.append((clock_s(), record.partition(), record.offset()))
                    self.seen.append(int(record.value()))
                    self.consumer.commit(record)
        except Exception as error:
            self.error = error
        self.consumer.close(release=bool(self._release))

    def do(self, what: Callable[[CoordinatedConsumer], object]) -> None:
        """In its thread; returns before it is done."""
        self._asked.append(what)

    def told(self, kind: type[Any]) -> list[Any]:
        """Events of a kind."""
        return [event for event in tuple(self.events) if isinstance(event, kind)]

    def heard_of(self) -> list[Claimed]:
        """The `Claimed` events of the claims that it holds now."""
        claims = self.consumer.claims()
        return [each for each in self.told(Claimed) if claims.get((each.topic, each.partition)) == each.generation]

    def tell(self) -> None:
        """Print what it saw and was told, which pytest shows when the test fails."""
        again = {number: times for number, times in Counter(self.seen).items() if times > 1}
        print(f"{self.consumer.client}: {len(self.seen)} records seen, more than once {again}")
        print(*self.handed[-20:], *self.events, sep="\n")

    def stop(self, release: bool) -> None:
        """Close it."""
        self._release = release
        self._thread.join(20)
        assert not self._thread.is_alive()


class Join(Protocol):
    """The fixture `join`."""

    def __call__(self, **changes: Any) -> Member: ...


@pytest.fixture
def join(settings: ConsumerSettings) -> Iterator[Join]:
    """Starts consumers; those that failed have to be asked for their `error`, which takes it."""
    members: list[Member] = []

    def make(**changes: Any) -> Member:
        members.append(Member(replace(settings, **changes)))
        return members[-1]

    yield make
    for member in members:
        member.stop(release=False)
        member.tell()
    assert [member.error for member in members if member.error is not None] == []


def failure(member: Member, kind: type[BaseException]) -> BaseException:
    """What ended it, which is expected."""
    error = eventually(lambda: member.error, what="an end")
    assert isinstance(error, kind)
    member.error = None
    return error


def held(*members: Member) -> list[int]:
    """Claims of each of which it has been told, the fewest first."""
    return sorted(len(member.heard_of()) for member in members)


def heartbeats(consumer: CoordinatedConsumer) -> int:
    """Records with heartbeats that it has written."""
    written = consumer.statistics().written
    return written.get("Heartbeat", 0) + written.get("Heartbeats", 0)


def fill(settings: ConsumerSettings, count: int, first: int = 0, topic: str | None = None) -> None:
    """Records that are numbers, in all partitions."""
    producer = Producer(dict(settings.kafka))
    for number in range(first, first + count):
        producer.produce(topic or settings.topics[0], value=str(number).encode(), key=str(number).encode())
    producer.flush(30)


def admin(settings: ConsumerSettings) -> AdminClient:
    """Of the broker."""
    return AdminClient({**settings.kafka, "log_level": 3})


def create_topic(settings: ConsumerSettings, name: str, partitions: int) -> None:
    """Without waiting for anybody to see it."""
    client = admin(settings)  # which answers as long as it is there
    client.create_topics([NewTopic(name, partitions)])[name].result(30)


def grow_topic(settings: ConsumerSettings, name: str, partitions: int) -> None:
    """To so many."""
    client = admin(settings)
    client.create_partitions([NewPartitions(name, partitions)])[name].result(30)


def remove_records(settings: ConsumerSettings, before: dict[int, int]) -> None:
    """As retention does, by partition."""
    topic = settings.topics[0]
    asked = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
    client = admin(settings)
    for done in client.delete_records(asked).values():
        done.result(30)


def ends(settings: ConsumerSettings) -> dict[int, int]:
    """The next offset of each partition."""
    found = dict.fromkeys(range(4), 0)
    for record in read_topic(str(settings.kafka["bootstrap.servers"]), settings.topics[0]):
        found[record.partition] = record.offset + 1
    return found
