"""Coordinated consumers that give their records to a handler, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest
from confluent_kafka import Producer

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Event
from harvester.coordination.settings import ConsumerSettings

Run = Callable[[CoordinatedConsumer, Callable[[Any], object]], object]


class Poison(Exception):
    """What a handler raises on a record that it cannot take."""


class Runner:
    """A consumer that runs, and what it was told."""

    def __init__(self, settings: ConsumerSettings, handler: Callable[[Any], object], run: Run) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.consumer = CoordinatedConsumer(settings, on_event=self.events.append)
        self._thread = threading.Thread(target=self._run, args=(handler, run), daemon=True)
        self._thread.start()

    def _run(self, handler: Callable[[Any], object], run: Run) -> None:
        try:
            run(self.consumer, handler)
        except BaseException as error:
            self.error = error

    def told(self, kind: type[Any]) -> list[Any]:
        """Events of a kind."""
        return [event for event in tuple(self.events) if isinstance(event, kind)]

    def wait(self) -> BaseException | None:
        """For its end; what it raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error

    def stop(self) -> None:
        """End it in good order."""
        self.consumer.stop()
        self.wait()


class Start(Protocol):
    """The fixture `start`."""

    def __call__(self, handler: Callable[[Any], object], *, run: Run = ..., **changes: Any) -> Runner: ...


@pytest.fixture
def start(settings: ConsumerSettings) -> Iterator[Start]:
    """Runs consumers with these settings."""
    runners: list[Runner] = []

    def make(handler: Callable[[Any], object], *, run: Run = CoordinatedConsumer.run, **changes: Any) -> Runner:
        runners.append(Runner(replace(settings, **changes), handler, run))
        return runners[-1]

    yield make
    for runner in runners:
        runner.stop()


def fill_keys(settings: ConsumerSettings, keys: int, each: int, partition: int | None = None) -> None:
    """Records `k-n` of keys k, n rising; the values of a key in order, the keys by turns."""
    producer = Producer(dict(settings.kafka))
    where: dict[str, Any] = {} if partition is None else {"partition": partition}
    for number in range(each):
        for key in range(keys):
            producer.produce(settings.topics[0], value=f"{key}-{number}".encode(), key=str(key).encode(), **where)
    producer.flush(30)


class Handled:
    """Values that a handler has taken, in order; it raises on what `fails` says."""

    def __init__(self, fails: Callable[[str], bool] = lambda _: False) -> None:
        self.values: list[str] = []
        self.tries: list[str] = []
        self.fails = fails

    def __call__(self, record: Any) -> None:
        value = record.value().decode()
        self.tries.append(value)
        if self.fails(value):
            raise Poison(f"cannot take {value}")
        self.values.append(value)

    def of_key(self, key: int) -> list[str]:
        """In the order in which they were taken."""
        return [value for value in tuple(self.values) if value.startswith(f"{key}-")]
