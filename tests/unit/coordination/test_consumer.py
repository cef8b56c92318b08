"""Whose turn it is, and until when; over claims that nobody has to hold."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import pytest

from harvester.clock import clock_s
from harvester.coordination.consumer import Turns
from harvester.coordination.core.claim import BatchStep, BatchWaiting, ClaimedBatch, ClaimPhase, ClaimState, Event
from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.partition_buffer import NOTHING, PartitionBuffer, RecordBatch
from harvester.coordination.session import Session
from harvester.coordination.settings import ConsumerSettings

PLACES = [GroupPartition("g", "t", partition) for partition in range(3)]


@dataclass(eq=False)
class Message:
    place: GroupPartition
    number: int

    def offset(self) -> int:
        return self.number


class Claims:
    """What `Turns` sees of a session."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buffer: dict[GroupPartition, PartitionBuffer] = {}
        self.owned: deque[RecordBatch] = deque()
        self.holdings: dict[GroupPartition, ClaimState] = {}
        self.proposed: list[tuple[GroupPartition, int]] = []
        for place in PLACES:
            self.buffer[place] = PartitionBuffer(place, 1, None)
            self.buffer[place].fetch([Message(place, number) for number in range(4)])
            self.holdings[place] = ClaimState(place, Client("c", "i"), ClaimPhase.HELD, proof_at=clock_s())

    def holding(self, place: GroupPartition) -> ClaimState:
        return self.holdings[place]

    def tell(self, place: GroupPartition, event: Event) -> None:
        assert isinstance(event, BatchWaiting)
        self.proposed.append((place, event.last_offset))
        batch = ClaimedBatch(event.last_offset, BatchStep.CLAIMED, 1)
        self.holdings[place] = self.holdings[place]._replace(batch=batch)

    def accept(self, place: GroupPartition) -> None:
        """The batch is ours."""
        self.holdings[place] = self.holdings[place]._replace(batch=None)
        self.owned.append(self.buffer[place].own())


class Scene:
    def __init__(self, **changes: Any) -> None:
        settings = ConsumerSettings(kafka={}, group="g", topics=("t",), **changes)
        self.claims, self.paused = Claims(), set[GroupPartition]()
        self.turns = Turns(settings, cast(Session, self.claims), self.paused.__contains__)
        self.batch = NOTHING

    def next(self) -> RecordBatch:
        self.batch = self.turns.after(self.batch)
        return self.batch

    def take(self, count: int) -> list[Message]:
        return [self.batch.take(clock_s()) for _ in range(count)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_each_place_in_turn(scene: Scene) -> None:
    order = []
    for _ in range(4):
        order.append(scene.next().place.partition)
        scene.take(1)
    assert order == [0, 1, 2, 0]


def test_what_was_not_handed_out_comes_again(scene: Scene) -> None:
    scene.claims.buffer = {PLACES[0]: scene.claims.buffer[PLACES[0]]}
    scene.next()
    first = scene.take(3)
    scene.next()
    assert [record.offset() for record in [*first, *scene.take(1)]] == [0, 1, 2, 3]
    assert scene.next() is NOTHING


def test_a_claim_that_is_not_certain_now_has_no_turn(scene: Scene) -> None:
    late = clock_s() - scene.turns._settings.heartbeat_interval_s
    for place in PLACES[:2]:
        scene.claims.holdings[place] = scene.claims.holdings[place]._replace(proof_at=late)
    assert scene.next().place == PLACES[2]
    scene.claims.holdings[PLACES[2]] = scene.claims.holdings[PLACES[2]]._replace(phase=ClaimPhase.LEAVING)
    assert scene.next() is NOTHING


def test_no_lot_outlasts_the_claim_nor_a_tenth_of_a_second(scene: Scene) -> None:
    assert scene.next().until <= clock_s() + 0.1
    nearly = clock_s() - scene.turns._settings.heartbeat_interval_s + 0.02
    for place in PLACES:
        scene.claims.holdings[place] = scene.claims.holdings[place]._replace(proof_at=nearly)
    assert scene.next().until <= nearly + scene.turns._settings.heartbeat_interval_s


def test_a_place_has_no_turn_while_it_has_too_many_open_records() -> None:
    scene = Scene(max_open_records=2)
    scene.claims.buffer = {PLACES[0]: scene.claims.buffer[PLACES[0]]}
    scene.next()
    taken: list[Any] = scene.take(3)
    first = taken[0]
    assert taken[2] is None
    assert scene.next() is NOTHING
    scene.claims.buffer[PLACES[0]].finish(first.offset())
    scene.next()
    assert [record and record.offset() for record in scene.take(2)] == [2, None]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_what_is_paused_has_no_turn(at_most_once: bool) -> None:
    scene = Scene(at_most_once=at_most_once)
    scene.paused.update(PLACES[:2])
    scene.next()
    if at_most_once:
        assert scene.claims.proposed == [(PLACES[2], 3)]
        scene.claims.accept(PLACES[2])
    assert scene.next().place == PLACES[2]
    scene.paused.add(PLACES[2])
    assert scene.next() is NOTHING
    scene.paused.remove(PLACES[2])
    assert len(scene.next().records) == 4


def test_at_most_once_a_batch_waits_at_most_behind_the_one_in_hand() -> None:
    scene = Scene(at_most_once=True, batch_records=1)
    claims = scene.claims
    claims.buffer = {PLACES[0]: claims.buffer[PLACES[0]]}
    assert scene.next() is NOTHING
    claims.accept(PLACES[0])
    scene.next()  # the first is in hand, the second proposed
    assert [last for _, last in claims.proposed] == [0, 1]
    claims.accept(PLACES[0])
    claims.holdings[PLACES[0]] = claims.holdings[PLACES[0]]._replace(batch=None)
    scene.next()  # nothing was taken of the first: it comes again, and nothing is proposed
    assert [last for _, last in claims.proposed] == [0, 1]
    assert scene.take(1)[0].offset() == 0
    scene.next()
    assert [last for _, last in claims.proposed] == [0, 1, 2]
    assert scene.take(1)[0].offset() == 1


def test_what_is_ours_stays_ours_when_the_claim_is_over() -> None:
    scene = Scene(at_most_once=True)
    scene.next()
    scene.claims.accept(PLACES[1])
    scene.claims.buffer.clear()
    assert scene.next().place == PLACES[1]
    assert [record.offset() for record in scene.take(4)] == [0, 1, 2, 3]


def owning() -> Scene:
    """Of one place the first two records are in hand, and the others wait as a batch that is ours, too."""
    scene = Scene(at_most_once=True, batch_records=2)
    scene.claims.buffer = {PLACES[0]: scene.claims.buffer[PLACES[0]]}
    scene.next()
    scene.claims.accept(PLACES[0])
    scene.next()
    scene.claims.accept(PLACES[0])
    return scene


def test_at_most_once_what_is_in_hand_when_the_place_is_given_up_does_not_come_again() -> None:
    scene = owning()
    buffer = scene.claims.buffer[PLACES[0]]
    scene.take(1)
    buffer.stopping_at = clock_s() + 9
    scene.claims.owned.clear()
    before = buffer.open_records
    assert scene.next() is NOTHING
    assert (before, buffer.open_records, buffer.give_back()) == (1, 0, 0)


def test_at_most_once_what_was_given_back_meanwhile_does_not_come_again() -> None:
    scene = owning()
    buffer = scene.claims.buffer.pop(PLACES[0])
    scene.claims.owned.clear()
    scene.take(1)
    assert buffer.give_back() == 0
    assert scene.take(1) == [None]
    assert scene.next() is NOTHING
