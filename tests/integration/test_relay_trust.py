"""Trust that lapses before the fence comes: shards refuse rows, and the relay waits instead of marking in vain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from harvester import FakeGroup, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.clock import clock_s
from harvester.relay.core.state_machine import StateMachine
from tests.support.harvesting import Embedded, Scene
from tests.support.marking import BOTH
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

KEYS = tuple("abcdefgh")
LOOKS = 20  # at the clock, by the relay


class Lapsing(FakeGroup):
    """A group whose proof of leadership can run out without a word."""

    def lapse(self) -> None:
        """The last proof is too old from now on."""
        self._joined(10.0).trust(clock_s() - 1.0)

    def renew(self) -> None:
        """A new proof."""
        self._joined(10.0).trust(clock_s() + 1e6)


class Looks:
    """Counts how often the relay has looked at the clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._count = 0
        tick = StateMachine.tick

        def counted(machine: StateMachine, *args: Any, **named: Any) -> Any:
            self._count += 1
            return tick(machine, *args, **named)

        patch.setattr(StateMachine, "tick", counted)

    def wait(self) -> None:
        """Until it has looked so many times more."""
        until = self._count + LOOKS
        eventually(lambda: self._count >= until, what=f"{LOOKS} looks at the clock")


@contextmanager
def writing(scene: Scene) -> Iterator[dict[str, list[str]]]:
    """Insert rows all the time; yields what has been inserted, by key.

    At a pace: a key has one record on the wire at a time, and all that gathers while trust is gone has to follow.
    """
    inserted: dict[str, list[str]] = {key: [] for key in KEYS}
    stop = threading.Event()

    def write() -> None:
        with scene.writer() as db:
            number = 0
            while not stop.wait(0.03):
                number += 1
                for key in KEYS:
                    scene.add((key, str(number)), db=db)
                    inserted[key].append(str(number))
                db.commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield inserted
    finally:
        stop.set()
        writer.join()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of remarks."""
    return [text for text in (entry.getMessage() for entry in caplog.records) if "marks again" in text]


def lapse(group: Lapsing, running: Embedded, looks: Looks) -> None:
    """Let trust lapse for a while, under load."""
    group.lapse()
    looks.wait()
    assert len(running.of(LeaderRefreshed)) <= 1, "it marks again and again"


@BOTH
def test_lapsed_trust_is_waited_for(
    scene: Scene, marking: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, looks = Lapsing(elected=True), Looks(monkeypatch)
    with caplog.at_level(logging.WARNING), scene.embedded(group=group, marking=marking) as running:
        acquired = running.wait_leading()
        with writing(scene) as inserted:
            eventually(lambda: len(inserted["a"]) > 20, what="rows")
            lapse(group, running, looks)
            sent = len(scene.log())
            looks.wait()
            assert len(scene.log()) == sent  # nobody sends without trust
            group.renew()
            refreshed = running.wait_refreshed("ran out of trust")
            held = len(inserted["a"])
            eventually(lambda: len(inserted["a"]) > held + 20, what="more rows")
        scene.wait_left()
        assert refreshed.term == acquired.term
        assert len(running.of(LeaderRefreshed)) <= 2
        assert len(warnings(caplog)) <= 2
        assert not running.of(LeaderFenced)
    assert scene.published() == inserted


@BOTH
def test_a_fence_ends_the_wait_for_trust(
    scene: Scene, marking: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, looks = Lapsing(elected=True), Looks(monkeypatch)
    with caplog.at_level(logging.WARNING), scene.embedded(group=group, marking=marking) as running:
        acquired = running.wait_leading()
        with writing(scene) as inserted:
            eventually(lambda: len(inserted["a"]) > 20, what="rows")
            lapse(group, running, looks)
            group.fence()
            running.wait_for(LeaderFenced)
            assert group.elect()
            again = running.wait_for(LeaderAcquired, 2)
            held = len(inserted["a"])
            eventually(lambda: len(inserted["a"]) > held + 20, what="more rows")
        scene.wait_left()
        assert again.term > acquired.term
        assert len(running.of(LeaderRefreshed)) <= 1
        assert len(warnings(caplog)) <= 1
    assert scene.published() == inserted


def test_lapsed_trust_is_waited_for_in_exactly_once_mode(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, looks = Lapsing(elected=True), Looks(monkeypatch)
    with caplog.at_level(logging.WARNING), scene.embedded(group=group, delivery="exactly-once") as running:
        running.wait_leading()
        with writing(scene) as inserted:
            eventually(lambda: len(inserted["a"]) > 20, what="rows")
            lapse(group, running, looks)
            group.renew()
            running.wait_refreshed("ran out of trust")
            held = len(inserted["a"])
            eventually(lambda: len(inserted["a"]) > held + 20, what="more rows")
        scene.wait_left()
        assert len(running.of(LeaderRefreshed)) <= 2
        assert not running.of(LeaderFenced)
    assert scene.published() == inserted
