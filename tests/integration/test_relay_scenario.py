"""One scenario over both forms: the command line and the embedded object behave the same."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psycopg
import pytest

from harvester import Harvester, State
from tests.support.cli import RunningCli
from tests.support.harvesting import Embedded, Scene, messages, shards_of
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

_VARIES = re.compile(r"[0-9a-f-]{36}")


class Form(Protocol):
    """What the two have in common."""

    def said(self) -> list[str]: ...
    def stop(self) -> int: ...


class _Cli:
    def __init__(self, running: RunningCli) -> None:
        self._running = running

    def said(self) -> list[str]:
        return messages(self._running)

    def stop(self) -> int:
        shards = shards_of(self._running.pid)
        assert len(shards) == 2
        code = self._running.stop(signal.SIGTERM)
        assert not any(map(_exists, shards))
        return code


class _Object(logging.Handler):
    def __init__(self, harvester: Harvester) -> None:
        super().__init__()
        self._harvester = harvester
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage().removeprefix("[test] "))

    def said(self) -> list[str]:
        return list(self._said)

    def stop(self) -> int:
        shards = [shard.pid for shard in self._harvester.status().shards if shard.pid is not None]
        assert len(shards) == 2
        self._harvester.stop()
        assert self._harvester.wait(0)
        assert self._harvester.state is State.STOPPED
        assert not any(map(_exists, shards))
        return 0


def _exists(pid: int) -> bool:
    from tests.support.harvesting import alive

    return alive(pid)


@contextmanager
def _start(form: str, scene: Scene, marking: str = "memory") -> Iterator[Form]:
    if form == "cli":
        with scene.cli(marking=marking) as running:
            yield _Cli(running)
        return
    logger = logging.getLogger(f"test.{scene.group}")
    logger.setLevel(logging.INFO)
    harvester = Harvester(scene.config(marking=marking), logger=logger)
    said = _Object(harvester)
    logger.addHandler(said)
    with Embedded(harvester).run():
        yield said


@BOTH
@pytest.mark.parametrize("form", ["cli", "embedded"])
def test_rows_of_any_transaction_are_published_once_and_in_causal_order(form: str, scene: Scene, marking: str) -> None:
    backlog = 20
    for number in range(1, backlog + 1):
        scene.add(("a", str(number)), ("b", str(number)))
    with _start(form, scene, marking) as harvester, scene.writer() as late, scene.writer() as rolled_back:
        scene.wait_left()

        late_ids = scene.add(("c", "1"), ("d", "1"), db=late)
        scene.add(("a", "never"), ("e", "never"), db=rolled_back)
        later_ids = scene.add(("a", "21"), ("b", "21"))
        assert max(late_ids) < min(later_ids)
        scene.wait_left()
        rolled_back.rollback()
        late.commit()  # its ids lie below others that are published already
        scene.add(("c", "2"), ("d", "2"))
        scene.wait_left()

        with psycopg.connect(scene.dsn) as several:  # several rows of a key in one transaction
            scene.add(("a", "22"), ("a", "23"), ("b", "22"), ("c", "3"), ("a", "24"), db=several)
        scene.wait_left()
        assert harvester.stop() == 0
        assert _relevant(harvester.said()) == [
            "starts: outbox outbox, 2 shards",
            f"joined group {scene.group}, elected",
            "leads as ? under term 1",
            "stopped",
        ]
    assert scene.published() == {
        "a": [str(number) for number in range(1, 25)],
        "b": [str(number) for number in range(1, 23)],
        "c": ["1", "2", "3"],
        "d": ["1", "2"],
    }
    eventually(lambda: scene.sessions("harvester") == [], what="the end of its sessions")


def _relevant(said: list[str]) -> list[str]:
    """Without what Kafka's client says while a broker that has just started is not ready."""
    return [_VARIES.sub("?", line) for line in said if "[thrd:" not in line]


@pytest.mark.parametrize("form", ["cli", "embedded"])
def test_rows_behind_an_open_transaction_wait_for_nothing_and_it_is_found_later(form: str, scene: Scene) -> None:
    """The largest id is published before a smaller one is committed: nothing is marked by offset (P4)."""
    with _start(form, scene) as harvester, scene.writer() as late:
        first = scene.add(("k", "1"), db=late)
        for number in range(1, 31):
            (last,) = scene.add((f"other{number % 3}", str(number)))
        scene.wait_left()
        assert first[0] < last
        late.commit()
        scene.wait_left()
        assert harvester.stop() == 0
    assert scene.published()["k"] == ["1"]
    assert sum(map(len, scene.published().values())) == 31


@BOTH
def test_until_empty_ends_by_itself(scene: Scene, marking: str) -> None:
    for number in range(1, 51):
        scene.add(("a", str(number)), ("b", str(number)))
    with scene.embedded(until_empty=True, marking=marking) as running:
        assert eventually(lambda: running.harvester.wait(0.1), what="the end")
        assert running.harvester.state is State.STOPPED
    assert scene.left() == []
    assert {key: len(values) for key, values in scene.published().items()} == {"a": 50, "b": 50}
