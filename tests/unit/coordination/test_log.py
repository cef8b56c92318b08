"""What the writer of the coordination topic does with messages that it cannot take; there is no broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester.coordination.core.claim import PositionFound
from harvester.coordination.core.messages import ClaimingPartition, Client, GroupPartition
from harvester.coordination.core.world import World
from harvester.coordination.log import CoordinationLog, LogBackfill
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError
from tests.support.wait import eventually

PLACE, CLIENT = GroupPartition("g", "t", 0), Client("c", "i")
KAFKA = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


def message(number: int) -> ClaimingPartition:
    return ClaimingPartition(PLACE, CLIENT, number, None, None)


class Broken:
    """Stands for a producer that has given itself up, which cannot be brought about from outside.

    The next `poll` raises a fatal error, too, before it brings reports; `report` is one.
    """

    def __init__(self, error: KafkaError) -> None:
        self.error, self.purged = error, False
        self.report: Callable[[], None] | None = None
        self._says = error.fatal()

    def produce(self, *_: object, **__: object) -> None:
        raise KafkaException(self.error)

    def purge(self) -> None:
        self.purged = True

    def poll(self, _: float) -> int:
        if self._says:
            self._says = False
            raise KafkaException(self.error)
        if self.purged and self.report is not None:
            self.report()
        return 0


def written_with(error: KafkaError, given_up: list[int]) -> tuple[CoordinationLog, Broken]:
    log = CoordinationLog("marshal", KAFKA, lambda _, number: given_up.append(number))
    writer: Any = Broken(error)
    log._writer = writer
    return log, writer


@pytest.mark.parametrize(("expires_s", "longest_ms"), [(1.5, 500), (7.5, 1000)])  # intervals of 1 s and 5 s
def test_who_was_cut_off_is_back_before_half_of_a_short_interval_has_passed(expires_s: float, longest_ms: int) -> None:
    log = CoordinationLog("marshal", KAFKA, lambda *_: None, expires_s)
    assert log._options["reconnect.backoff.max.ms"] == longest_ms


def test_a_writer_that_has_given_itself_up_is_replaced() -> None:
    given_up: list[int] = []
    log, writer = written_with(KafkaError(KafkaError._FATAL, "out of sequence", True), given_up)
    log.append(0, message(3))
    assert given_up == []  # who appends is not told while it appends
    assert list(log.poll(0)) == []
    assert given_up == [3]
    assert writer.purged
    log.append(0, message(4))  # by another one
    log.close(0)


def test_a_writer_that_says_so_when_it_is_served_is_replaced_and_what_it_had_is_reported() -> None:
    given_up: list[int] = []
    log, writer = written_with(KafkaError(KafkaError._FATAL, "out of sequence", True), given_up)
    writer.report = lambda: log._given_up.append((PLACE, 2))
    assert list(log.poll(0)) == []
    assert given_up == [2]
    log.append(0, message(3))  # by another one
    log.close(0)


def test_what_may_pass_is_given_up_and_the_writer_is_kept() -> None:
    given_up: list[int] = []
    log, writer = written_with(KafkaError(KafkaError._UNKNOWN_TOPIC), given_up)
    log.append(0, message(3))
    list(log.poll(0))
    assert given_up == [3]
    assert not writer.purged


def test_what_does_not_pass_is_an_error_of_ours() -> None:
    log, _ = written_with(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), [])
    with pytest.raises(BrokerError, match="'marshal' cannot be used"):
        log.append(0, message(3))


def test_who_repeats_at_once_what_was_given_up_does_not_do_so_for_ever() -> None:
    """As a claim does with the messages of its batch; the queue of the writer is full."""
    repeated: list[int] = []

    def repeat(place: GroupPartition, number: int) -> None:
        repeated.append(number)
        log.append(0, message(number + 1))

    log = CoordinationLog("marshal", {**KAFKA, "queue.buffering.max.messages": 1}, repeat)
    log.append(0, message(1))
    log.append(0, message(2))
    list(log.poll(0))
    assert repeated == [2]
    list(log.poll(0))
    assert repeated == [2, 3]
    log.close(0)


def test_what_goes_wrong_in_one_search_for_a_position_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[GroupPartition, PositionFound]] = []
    settings = ConsumerSettings(kafka={}, group="g", topics=("t",))
    past = LogBackfill(settings, lambda place, position: found.append((place, position)))
    world = World.begin(settings.timing)
    world.miss(100)
    failures = [KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE))]

    def search(partition: int, place: GroupPartition, generation: int) -> World:
        if failures:
            raise failures.pop()
        return world

    monkeypatch.setattr(past, "_search", search)
    for number, generation in enumerate((5, 7)):
        past.find(0, GroupPartition("g", "t", number), generation)
    eventually(lambda: len(found) == 1, what="the second answer")
    assert found[0][1].generation == 7
    past.close()


def test_the_end_does_not_wait_for_brokers_that_are_asked_for_a_position() -> None:
    settings = ConsumerSettings(kafka=KAFKA, group="g", topics=("t",), heartbeat_interval_s=1.0)
    past = LogBackfill(settings, lambda *_: None)
    past.find(0, PLACE, 7)
    eventually(lambda: past._pasts, what="the look into the log")
    closing = threading.Thread(target=past.close, daemon=True)
    closing.start()
    closing.join(15)
    assert not closing.is_alive(), "it would wait for half a minute"


def test_a_search_for_the_next_claim_goes_on_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records have come since, but far fewer than were read: else a busy log would be read anew for each claim."""
    past = LogBackfill(ConsumerSettings(kafka={}, group="g", topics=("t",)), lambda *_: None)
    reads: list[int] = []

    def read(_: int, known: Any, generation: int) -> None:
        reads.append(generation + 1 - known.world.next_offset)
        known.world.next_offset = generation + 1

    monkeypatch.setattr(past, "_read", read)
    monkeypatch.setattr("harvester.coordination.log._Past.knows", lambda self, _: self.start < 1_600_000)
    assert past._search(0, PLACE, 2_000_000) is not None
    so_far = len(reads)
    assert 500_000 < sum(reads) < 2_000_000, "not the whole log"
    assert past._search(0, PLACE, 2_002_500) is not None
    assert reads[so_far:] == [2_500]


def test_only_the_last_question_about_a_partition_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    past = LogBackfill(ConsumerSettings(kafka={}, group="g", topics=("t",)), lambda *_: None)
    begun, go_on = threading.Event(), threading.Event()
    searched: list[int] = []

    def search(_: int, __: GroupPartition, generation: int) -> None:
        searched.append(generation)
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(past, "_search", search)
    past.find(0, PLACE, 5)
    begun.wait(30)
    for generation in (7, 9, 11):
        past.find(0, PLACE, generation)
    go_on.set()
    eventually(lambda: 11 in searched, what="the last search")
    past.close()
    assert searched == [5, 11]
