"""What waits for the group's coordinator, and what does not; there is no broker."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.events import Claimed, Event, Lost, Released
from harvester.coordination.fetcher import Fetcher
from harvester.coordination.session import Change, Session
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable
from tests.support.wait import eventually

ONE, TWO, THREE = (GroupPartition("g", "t", partition) for partition in range(3))


class Data:
    """Stands for the client that fetches: what it is assigned."""

    def __init__(self) -> None:
        self.assigned: dict[int, int] = {}

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned |= {each.partition: each.offset for each in partitions}

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            del self.assigned[each.partition]

    def pause(self, partitions: list[TopicPartition]) -> None: ...

    resume = pause


class Coordinator:
    """Stands for the group's: `answers` for places, after `may_answer`; an error is raised once."""

    def __init__(self) -> None:
        self.answers: dict[GroupPartition, int | None] = {}
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.questions: list[set[GroupPartition]] = []

    def committed(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int | None]:
        self.questions.append(set(places))
        assert self.may_answer.wait(60)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return {place: self.answers[place] for place in places if place in self.answers}

    def ends(self, places: Collection[GroupPartition]) -> dict[GroupPartition, int]:
        raise NotImplementedError  # nobody looks for stalls here


class Scene:
    def __init__(self) -> None:
        kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
        settings = ConsumerSettings(kafka=kafka, group="g", topics=("t",), heartbeat_interval_s=1.0)
        self.session = Session(settings, Client("c", "i"))
        self.data, self.coordinator = Data(), Coordinator()
        data: Any = self.data
        offsets: Any = self.coordinator
        self.fetcher = Fetcher(settings, self.session, data, offsets)
        self.told: list[Event] = []

    def begin(self, place: GroupPartition, generation: int = 7, last_offset: int | None = None) -> None:
        self.session.buffer[place] = buffer = PartitionBuffer(place, generation, last_offset)
        self.change((place, buffer, Claimed(place.topic, place.partition, generation)))

    def change(self, change: Change) -> None:
        self.session.changes.append(change)

    def follow(self) -> list[Event]:
        self.told += self.fetcher.follow()
        return self.told


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.coordinator.may_answer.set()
    made.session._log.close(0)


def test_what_ends_does_not_wait_for_what_begins(scene: Scene) -> None:
    ended = Released("t", 1, 5, "on request")
    scene.begin(ONE)
    scene.change((TWO, None, ended))
    assert scene.follow() == [ended]
    assert scene.follow() == [ended]
    assert [change[0] for change in scene.session.changes] == [ONE]
    scene.coordinator.answers[ONE] = 40
    scene.coordinator.may_answer.set()
    eventually(lambda: len(scene.follow()) == 2, what="a claim that begins")
    assert scene.told[1] == Claimed("t", 0, 7)
    assert scene.data.assigned == {0: 40}


def test_the_changes_of_a_place_stay_in_order(scene: Scene) -> None:
    scene.begin(ONE)
    scene.follow()
    lost = Lost("t", 0, 7, "another client holds it")
    scene.change((ONE, None, lost))
    assert scene.follow() == []  # what begins is still held, so far as is known here
    del scene.session.buffer[ONE]
    assert scene.follow() == [Claimed("t", 0, 7), lost]
    assert scene.data.assigned == {}


def test_no_answer_is_asked_for_again_and_others_go_on(scene: Scene) -> None:
    scene.coordinator.error = BrokerUnavailable("the coordinator is away")
    scene.coordinator.may_answer.set()
    scene.coordinator.answers = {ONE: None, TWO: 8}
    scene.begin(ONE)
    eventually(lambda: scene.follow() == [] and scene.coordinator.error is None, what="a question in vain")
    scene.begin(TWO, last_offset=9)
    eventually(lambda: len(scene.follow()) == 2, what="both claims")
    assert scene.data.assigned == {0: OFFSET_BEGINNING, 1: 10}
    assert scene.coordinator.questions[-1] == {ONE, TWO}


def test_one_partition_without_an_answer_holds_back_no_other(scene: Scene) -> None:
    scene.coordinator.may_answer.set()
    scene.coordinator.answers = {TWO: 8}
    scene.begin(ONE)
    scene.begin(TWO)
    eventually(lambda: scene.follow() == [Claimed("t", 1, 7)], what="the one with an answer")
    scene.coordinator.answers[ONE] = 3
    eventually(lambda: len(scene.follow()) == 2, what="the other")
    assert scene.data.assigned == {0: 3, 1: 8}


def test_the_answer_for_an_older_claim_does_not_count(scene: Scene) -> None:
    scene.begin(ONE)
    scene.follow()
    scene.begin(ONE, generation=9)
    scene.coordinator.answers[ONE] = 3
    scene.coordinator.may_answer.set()
    eventually(lambda: scene.follow()[-1:] == [Claimed("t", 0, 9)], what="the newer claim")
    assert len(scene.coordinator.questions) == 2


def test_a_missing_right_ends_the_consumer(scene: Scene) -> None:
    error = BrokerError("the offsets cannot be read")
    scene.coordinator.error = error
    scene.coordinator.may_answer.set()
    scene.begin(ONE)
    eventually(lambda: scene.follow() == [] and scene.session.error, what="an error")
    assert scene.session.error is error


def test_what_waits_is_kept_when_the_application_raises(scene: Scene) -> None:
    scene.begin(ONE)
    scene.change((TWO, None, Released("t", 1, 5, "on request")))
    scene.change((THREE, None, Released("t", 2, 5, "on request")))
    following: Any = scene.fetcher.follow()
    next(following)
    following.close()  # as when its handler raises
    assert [change[0] for change in scene.session.changes] == [ONE, THREE]
