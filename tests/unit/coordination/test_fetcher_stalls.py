"""Which held places are taken to stand still; what their ends are is told by the test."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest

from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.fetcher import Stalls
from harvester.errors import BrokerUnavailable
from tests.support.wait import eventually

ONE, TWO = (GroupPartition("g", "t", partition) for partition in range(2))
INTERVAL_S = 5.0


class Brokers:
    """Stands for the client that asks for ends."""

    def __init__(self) -> None:
        self.ends: dict[GroupPartition, int] = {}
        self.away = False
        self.asked: list[set[GroupPartition]] = []

    def __call__(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int]:
        self.asked.append(set(places))
        if self.away:
            raise BrokerUnavailable("nobody is there")
        return {place: self.ends[place] for place in places}


class Scene:
    """Looks, an interval apart; each waits for the answer to the question of the one before."""

    def __init__(self) -> None:
        self.brokers = Brokers()
        self.stalls = Stalls(self.brokers, INTERVAL_S)
        self.now = 100.0

    def look(self, waiting: dict[GroupPartition, int], count: int = 1) -> list[GroupPartition]:
        found: list[GroupPartition] = []
        for _ in range(count):
            future = self.stalls.question._future
            if future is not None:
                eventually(future.done)
            found += self.stalls.look(waiting, self.now)
            self.now += INTERVAL_S
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_is_silent_and_has_nothing_is_left_alone(scene: Scene) -> None:
    scene.brokers.ends = {ONE: 7}
    assert scene.look({ONE: 7}, 20) == []
    assert scene.brokers.asked[0] == {ONE}


def test_what_is_silent_and_has_something_stands_still(scene: Scene) -> None:
    scene.brokers.ends = {ONE: 8, TWO: 3}
    assert scene.look({ONE: 7, TWO: 3}, 5) == [], "behind for two intervals, not longer"
    assert scene.look({ONE: 7, TWO: 3}) == [ONE]
    assert scene.look({ONE: 7, TWO: 3}, 3) == [], "it is given time"
    assert scene.look({ONE: 7, TWO: 3}) == [ONE]


def test_what_moves_is_not_asked_for(scene: Scene) -> None:
    scene.brokers.ends = {ONE: 1000}
    for position in range(20):
        assert scene.look({ONE: position}) == []
    assert scene.brokers.asked == []


def test_what_the_application_keeps_waiting_is_not_silent(scene: Scene) -> None:
    scene.brokers.ends = {ONE: 8}
    for _ in range(10):
        assert scene.look({ONE: 7}, 4) == []
        assert scene.look({}) == []


def test_brokers_that_are_away_tell_nothing(scene: Scene) -> None:
    scene.brokers.ends = {ONE: 8}
    assert scene.look({ONE: 7}, 3) == []
    scene.brokers.away = True
    assert scene.look({ONE: 7}, 10) == []
    scene.brokers.away = False
    assert scene.look({ONE: 7}, 2) == [ONE], "they are back, and it did not go on"


def test_one_question_at_a_time(scene: Scene) -> None:
    answer = threading.Event()
    ends = scene.brokers

    def wait(places: Collection[GroupPartition]) -> dict[GroupPartition, int]:
        assert answer.wait(60)
        return ends(places)

    scene.stalls = Stalls(wait, INTERVAL_S)
    scene.brokers.ends = {ONE: 8}
    for now in range(20):
        assert scene.stalls.look({ONE: 7}, float(now)) == []
    assert scene.brokers.asked == []
    answer.set()
    eventually(lambda: scene.brokers.asked == [{ONE}])
