"""Consumers of a real topic with an inbox: killed at every place, each effect happens once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from harvester.origin import HEADER
from tests.support.inbox import stamped
from tests.support.warm import PipedModule

pytestmark = pytest.mark.servers

Start = Callable[..., "Running"]


class Running:
    """A consumer process."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.process = PipedModule("tests.support.inbox_consumer", json.dumps(plan))

    def wait_for(self, line: str) -> None:
        assert self.process.stdout.readline().strip() == line

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self, kind: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, kind)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(servers: Any, empty_database: str, topic: str, group: str) -> Iterator[Start]:
    started: list[Running] = []
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (at serial, what text)")

    def new(**plan: Any) -> Running:
        common = {"dsn": empty_database, "bootstrap": servers.bootstrap, "topic": topic, "group": group}
        started.append(Running({**common, **plan}))
        return started[-1]

    yield new
    for running in started:
        running.end()


def produce(bootstrap: str, topic: str, *records: tuple[str, int | None], partition: int = 0) -> None:
    """(value, id) pairs, in this order."""
    producer = Producer({"bootstrap.servers": bootstrap, "broker.address.family": "v4", "linger.ms": 0})
    for value, record_id in records:
        headers: list[tuple[str, str | bytes | None]] = [] if record_id is None else [(HEADER, stamped(record_id))]
        producer.produce(topic, value.encode(), partition=partition, headers=headers)
    assert producer.flush(30) == 0


def effects(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT what FROM effect ORDER BY at")]


@pytest.mark.parametrize("place", ["effect", "commit"])
def test_a_consumer_that_is_killed(servers: Any, empty_database: str, topic: str, start: Start, place: str) -> None:
    # c was sent, and sent again behind d by a relay that did not know; ids are not in order; two records have none.
    produce(
        servers.bootstrap, topic, ("z", None), ("a", 2), ("b", 1), ("c", 5), ("d", 4), ("c", 5), ("e", None), ("f", 3)
    )
    first = start(**{f"hold_{place}": "c"})
    first.wait_for(f"{place} c")
    first.kill()
    assert first.process.wait() == -signal.SIGKILL
    assert effects(empty_database) == (["z", "a", "b"] if place == "effect" else ["z", "a", "b", "c"])

    produce(servers.bootstrap, topic, ("a", 2), ("g", 6), ("b", 1))  # the relay's own crash repeats more
    start().wait_for("end")
    assert effects(empty_database) == ["z", "a", "b", "c", "d", "e", "f", "g"]


def test_killed_again_and_again(servers: Any, empty_database: str, topic: str, start: Start) -> None:
    values = "abcdefgh"
    produce(servers.bootstrap, topic, *[(value, number) for number, value in enumerate(values, 1)])
    for value in values:
        for place in ("effect", "commit"):
            running = start(**{f"hold_{place}": value})
            running.wait_for(f"{place} {value}")
            running.kill()
            running.process.wait()
    start().wait_for("end")
    assert effects(empty_database) == list(values)


def test_a_frozen_owner_is_refused_when_it_thaws(servers: Any, empty_database: str, topic: str, start: Start) -> None:
    produce(servers.bootstrap, topic, ("a", 1), ("b", 2), ("c", 3))
    old = start(hold_commit="a")
    old.wait_for("commit a")
    old.kill(signal.SIGSTOP)
    old.go_on()
    start(group="another").wait_for("end")  # another group has effects of its own
    start().wait_for("end")
    old.kill(signal.SIGCONT)
    old.wait_for("fenced")
    assert effects(empty_database) == ["a", "a", "b", "c", "b", "c"]


def test_the_group_needs_no_offsets_in_kafka(servers: Any, empty_database: str, topic: str, start: Start) -> None:
    produce(servers.bootstrap, topic, ("a", 1), ("b", None), ("x", 3), partition=1)
    produce(servers.bootstrap, topic, ("c", 4), partition=2)
    start().wait_for("end")
    admin = AdminClient({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4"})
    with psycopg.connect(empty_database) as connection:
        (group,) = connection.execute("SELECT DISTINCT consumer_group FROM harvester_inbox").fetchone() or ("",)
    admin.delete_consumer_groups([group])[group].result(30)

    produce(servers.bootstrap, topic, ("d", 5), partition=2)
    start().wait_for("end")
    assert sorted(effects(empty_database)) == ["a", "b", "c", "d", "x"]
