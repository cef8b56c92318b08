"""What the coordination's thread does in one turn; there is no broker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from harvester.clock import clock_s
from harvester.coordination.consumer import Turns
from harvester.coordination.core.claim import ClaimPhase, ClaimState, StopHandingOut
from harvester.coordination.core.coordinator import Outcome, Stage
from harvester.coordination.core.messages import (
    ClaimingPartition,
    Client,
    GroupPartition,
    Message,
    ReleasingPartition,
    encode,
)
from harvester.coordination.core.partition_buffer import NOTHING, PartitionBuffer, RecordBatch
from harvester.coordination.session import Session
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerUnavailable
from tests.support.wait import eventually

PLACE, CLIENT = GroupPartition("g", "t", 0), Client("c", "i")


@dataclass(eq=False)
class Record:
    number: int

    def offset(self) -> int:
        return self.number


def heard(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What the session appends to the log from now on, instead of appending it."""
    said: list[Message] = []

    def append(_: int, message: Message, arrived: Future[bool] | None = None) -> int:
        said.append(message)
        return 0

    monkeypatch.setattr(session._log, "append", append)
    return said


def leave(session: Session, generation: int) -> float:
    """The claim of this generation is being given up; returns the time."""
    now = clock_s()
    session._coordinator.holdings[PLACE] = ClaimState(PLACE, CLIENT, ClaimPhase.LEAVING)._replace(
        generation=generation, proof_at=now, next_beat_at=now + 60
    )
    return now


def test_a_release_reports_what_was_finished_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    session = Session(ConsumerSettings(kafka=kafka, group="g", topics=("t",)), CLIENT)
    said = heard(session, monkeypatch)
    monkeypatch.setattr(session._log, "poll", lambda timeout_s: iter(()))
    buffer = session.buffer[PLACE] = PartitionBuffer(PLACE, 7, None)
    buffer.fetch([Record(3)])
    batch = buffer.open_batch()
    batch.until = 1.0
    record = batch.take(0.0)
    now = leave(session, 7)
    buffer.stopping_at = now + 60

    def finished_meanwhile(_: float) -> list[Outcome]:
        batch.finish(record)  # by the consumer's thread, which asks nobody
        return []

    session._turn()
    assert said == []
    monkeypatch.setattr(session._coordinator, "tick", finished_meanwhile)
    session._turn()
    (release,) = said
    assert isinstance(release, ReleasingPartition)
    assert release.last_offset == 3
    session._log.close(0)


def test_a_claim_under_way_when_it_is_closed_is_released_if_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    settings = ConsumerSettings(
        kafka=kafka, group="g", topics=("t",), coordination_partitions=1, heartbeat_interval_s=60.0
    )
    session = Session(settings, CLIENT)
    said, read = heard(session, monkeypatch), list[Message]()

    def poll(_: float) -> Iterator[tuple[int, int, int, bytes]]:
        """The log is slow: the claim comes back when the consumer is being closed."""
        while len(read) < len(said) and session._coordinator.stage is Stage.CLOSING:
            read.append(said[len(read)])
            yield 0, len(read) - 1, 1_000_000, encode(read[-1])

    monkeypatch.setattr(session._log, "begin", lambda worlds, *_: dict.fromkeys(worlds, 0))
    monkeypatch.setattr(session._log, "poll", poll)
    monkeypatch.setattr(session._log, "close", lambda timeout_s: None)
    session.consume({"t": 1})
    session.start()
    eventually(lambda: said, what="a claim")
    session.stop(release=True)
    claim, release = said
    assert isinstance(claim, ClaimingPartition)
    assert isinstance(release, ReleasingPartition)
    assert release.generation == 0


def waiting_for_the_log(monkeypatch: pytest.MonkeyPatch, outages: int) -> tuple[Session, list[int]]:
    """A session that has begun, whose log cannot be read so many times; how many times it has been asked."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    session = Session(ConsumerSettings(kafka=kafka, group="g", topics=("t",)), CLIENT)
    asked: list[int] = []

    def begin(*_: object) -> dict[int, int]:
        asked.append(len(asked))
        if len(asked) <= outages:
            raise BrokerUnavailable("no partition has a leader")
        return dict.fromkeys(session._coordinator.worlds, 0)

    monkeypatch.setattr(session._log, "begin", begin)
    monkeypatch.setattr(session._log, "poll", lambda timeout_s: iter(()))
    monkeypatch.setattr("harvester.coordination.session._AGAIN_S", 0.01)
    session.start()
    return session, asked


def test_who_begins_while_the_log_cannot_be_read_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session, asked = waiting_for_the_log(monkeypatch, outages=3)
    eventually(lambda: session._coordinator.stage is not Stage.READING, what="the log's end")
    assert (len(asked), session.error) == (4, None)
    session.stop(release=False)


def test_who_waits_for_the_log_ends_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    session, asked = waiting_for_the_log(monkeypatch, outages=10**9)
    eventually(lambda: len(asked) > 1, what="a second attempt")
    session.stop(release=False)
    assert session.error is None
    assert not session._thread.is_alive()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_release_waits_for_what_became_ours_under_an_earlier_claim(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """At most once: that claim was lost for a moment. A successor begins behind all of it (P42)."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    settings = ConsumerSettings(kafka=kafka, group="g", topics=("t",), at_most_once=True, batch_records=5)
    session = Session(settings, CLIENT)
    said = heard(session, monkeypatch)
    turns = Turns(settings, session, lambda _: False)
    first, second = (RecordBatch(PLACE, [Record(n) for n in range(low, low + 5)]) for low in (0, 5))
    session.owned += [first, second]
    current = turns.after(NOTHING)
    assert current.take(0.0) is first.records[0]
    session.buffer[PLACE] = buffer = PartitionBuffer(PLACE, 9, 9)
    now = leave(session, 9)
    buffer.stopping_at = now + 60
    handed_out = [0]
    if in_time:
        while (current := turns.after(current)) is not NOTHING:
            session._drain(now)
            assert said == []
            handed_out += [record.number for record in current.take_some(3, 0.0)]
    session._drain(now if in_time else now + 60)
    assert [type(message) for message in said] == [ReleasingPartition]
    while (current := turns.after(current)) is not NOTHING:
        handed_out += [record.number for record in current.take_some(3, 0.0)]
    assert handed_out == (list(range(10)) if in_time else [0])
    session._log.close(0)


def test_nothing_of_an_earlier_claim_comes_once_the_position_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most once: that claim was lost for a moment, and one batch of it is in hand."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    settings = ConsumerSettings(kafka=kafka, group="g", topics=("t",), at_most_once=True, batch_records=5)
    session = Session(settings, CLIENT)
    turns = Turns(settings, session, lambda _: False)
    session.owned += [RecordBatch(PLACE, [Record(n) for n in range(low, low + 5)]) for low in (0, 5)]
    current = turns.after(NOTHING)
    assert current.take(0.0) is current.records[0]
    session.buffer[PLACE] = PartitionBuffer(PLACE, 9, 9)
    session._perform([StopHandingOut(PLACE, 9, "its position was set", lost=True, moved=True)])
    assert current.take(0.0) is None
    assert turns.after(current) is NOTHING
    session._log.close(0)


def test_at_most_once_a_record_that_is_held_back_at_the_last_moment_is_not_counted_as_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim is given up while the consumer's thread decides; a successor begins behind what is counted (P42)."""
    kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    session = Session(ConsumerSettings(kafka=kafka, group="g", topics=("t",), at_most_once=True), CLIENT)
    said = heard(session, monkeypatch)
    session.buffer[PLACE] = buffer = PartitionBuffer(PLACE, 9, None)
    buffer.fetch([Record(number) for number in range(5)])
    buffer.propose(5)
    buffer.batch = batch = buffer.own()
    batch.until = math.inf
    now = leave(session, 9)
    is_given_up = False

    def clock() -> float:
        if is_given_up:
            batch.end()
            buffer.stopping_at = now
            session._drain(now)  # by the coordination's thread
        return 0.0

    handing_out = batch.handed_out(clock)
    assert batch.finish(next(handing_out))
    is_given_up = True
    assert next(handing_out, None) is None
    session._drain(now)
    (release,) = said
    assert isinstance(release, ReleasingPartition)
    assert release.last_offset == 0
    session._log.close(0)
