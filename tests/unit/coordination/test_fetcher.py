"""What waits for the group's coordinator, and what the client is to fetch; there is no broker."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from harvester.clock import clock_s
from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.errors import OffsetOutOfRange
from harvester.coordination.events import Claimed, Event, Lost, OutOfRange, Released
from harvester.coordination.fetcher import Fetcher, _Displaced
from harvester.coordination.session import Change, Session
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable
from tests.support.wait import eventually

ONE, TWO, THREE = PLACES = tuple(GroupPartition("g", "t", partition) for partition in range(3))
MOST_OPEN = 100


class Data:
    """Stands for the client that fetches: what it is assigned, in how many calls, and what it has fetched."""

    bounds = (0, 0)
    topics: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.assigned: dict[int, int] = {}
        self.is_stranded, self.is_closed = False, threading.Event()
        self.calls = 0
        self.records: list[Message] = []
        self.callback_error: Exception | None = None  # raised once, with records in hand

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.calls += 1
        assert self.assigned.keys().isdisjoint(each.partition for each in partitions), "the client refuses that"
        self.assigned |= {each.partition: each.offset for each in partitions}

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self.calls += 1
        for each in partitions:
            del self.assigned[each.partition]

    def get_watermark_offsets(self, _: TopicPartition, __: float) -> tuple[int, int]:
        return self.bounds

    def list_topics(self, _: str | None, *, timeout: float) -> Any:
        if self.is_stranded:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics=self.topics)

    def close(self) -> None:
        self.is_closed.set()

    def poll(self, _: float) -> Message | None:
        return self.records.pop(0) if self.records else None

    def consume(self, most: int, _: float) -> list[Message]:
        found, self.records = self.records[:most], self.records[most:]
        error, self.callback_error = self.callback_error, None
        if error is not None:
            raise error
        return found


class Coordinator:
    """Stands for the group's: `answers` for places, after `may_answer`; an error is raised once."""

    def __init__(self) -> None:
        self.answers: dict[GroupPartition, int | None] = {}
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.questions: list[set[GroupPartition]] = []
        self.topic_id = "one"

    def topic_ids(self, places: Collection[GroupPartition]) -> dict[str, str]:
        return {place.topic: self.topic_id for place in places}

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
    def __init__(self, **given: Any) -> None:
        kafka = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
        settings = ConsumerSettings(
            kafka=kafka, group="g", topics=("t",), heartbeat_interval_s=1.0, max_open_records=MOST_OPEN, **given
        )
        self.session = Session(settings, Client("c", "i"))
        self.coordinator = Coordinator()
        offsets: Any = self.coordinator
        self.fetcher = Fetcher(settings, self.session, offsets, self._connect)
        self.told: list[Event] = []

    def _connect(self, _: ConsumerSettings) -> Any:
        self.data = Data()
        return self.data

    def begin(self, place: GroupPartition, generation: int = 7, last_offset: int | None = None) -> None:
        self.session.buffer[place] = buffer = PartitionBuffer(place, generation, last_offset)
        self.change((place, buffer, Claimed(place.topic, place.partition, generation)))

    def change(self, change: Change) -> None:
        self.session.changes.append(change)

    def hold(self, *places: GroupPartition) -> None:
        """Claims that have begun, with the record at 10."""
        self.coordinator.may_answer.set()
        for place in places:
            self.coordinator.answers[place] = 10
            self.begin(place)
        eventually(lambda: len(self.follow()) == len(places), what="claims")
        self.data.calls = 0

    def fetch(self, place: GroupPartition, count: int) -> None:
        """So many records come, from where the client is."""
        first = self.data.assigned[place.partition]
        self.data.records += [
            Message(topic="t", partition=place.partition, offset=first + number) for number in range(count)
        ]
        self.data.assigned[place.partition] += count
        self.fetcher.fetch(0)

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
    scene.begin(ONE, generation=9, last_offset=3)
    again = Lost("t", 0, 9, "another client holds it")
    assert scene.follow() == [Claimed("t", 0, 9)]
    del scene.session.buffer[ONE]
    scene.change((ONE, None, again))
    assert scene.follow() == [Claimed("t", 0, 9), again]
    assert scene.data.assigned == {}


def test_a_claim_that_is_over_is_not_told_of(scene: Scene) -> None:
    """An inbox that is opened for it, with a token that is not the newest, refuses that, and ends the consumer."""
    scene.begin(ONE, last_offset=3)
    del scene.session.buffer[ONE]
    scene.change((ONE, None, Lost("t", 0, 7, "its time is over")))
    assert scene.follow() == []
    assert not scene.session.changes


def test_no_answer_is_asked_for_again_and_others_go_on(scene: Scene) -> None:
    scene.coordinator.error = BrokerUnavailable("the coordinator is away")
    scene.coordinator.may_answer.set()
    scene.coordinator.answers = {ONE: None, TWO: 8}
    scene.begin(ONE)
    eventually(lambda: scene.follow() == [] and scene.coordinator.error is None, what="a question in vain")
    scene.begin(TWO, last_offset=9)
    eventually(lambda: len(scene.follow()) == 2, what="both claims")
    assert scene.data.assigned == {0: OFFSET_BEGINNING, 1: 10}
    assert scene.coordinator.questions[-1] == {ONE}


def test_a_claim_whose_position_is_certain_asks_nobody(scene: Scene) -> None:
    scene.begin(ONE, last_offset=9)
    scene.begin(TWO)
    assert scene.follow() == [Claimed("t", 0, 7)]  # although the coordinator does not answer
    assert scene.data.assigned == {0: 10}
    assert scene.coordinator.questions == [{TWO}]


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


# -- what is fetched


def test_what_is_paused_is_taken_from_the_client_and_given_back_in_one_call_each(scene: Scene) -> None:
    scene.hold(*PLACES)
    scene.fetch(TWO, 5)
    scene.fetcher.pause(None, None)
    assert (scene.data.assigned, scene.data.calls) == ({}, 1)
    scene.fetcher.pause("t", 1)
    scene.fetcher.resume("t", 1)
    assert scene.data.assigned == {}, "everything is paused still"
    scene.fetcher.resume(None, None)
    assert (scene.data.assigned, scene.data.calls) == ({0: 10, 1: 15, 2: 10}, 2)


def test_a_claim_that_begins_while_it_is_paused_is_fetched_from_the_right_record_later(scene: Scene) -> None:
    scene.fetcher.pause("t", 0)
    scene.hold(ONE, TWO)
    scene.coordinator.answers[THREE] = None
    scene.fetcher.pause("t", 2)
    scene.begin(THREE)
    eventually(lambda: len(scene.follow()) == 3, what="the third")
    assert scene.data.assigned == {1: 10}
    scene.fetcher.resume(None, None)
    assert scene.data.assigned == {0: 10, 1: 10, 2: OFFSET_BEGINNING}


def test_what_is_given_up_is_not_fetched_when_everything_goes_on(scene: Scene) -> None:
    scene.hold(ONE, TWO)
    scene.fetcher.pause(None, None)
    scene.session.buffer[ONE].stopping_at = 0.0
    scene.fetcher.resume(None, None)
    assert scene.data.assigned == {1: 10}


def test_a_place_that_waits_for_a_commit_is_fetched_again_once_little_waits(scene: Scene) -> None:
    """Not after each commit: whatever the client has fetched ahead is gone each time."""
    scene.hold(ONE, TWO)
    buffer = scene.session.buffer[ONE]
    scene.fetch(ONE, MOST_OPEN)
    handed_out = buffer.open_batch()
    handed_out.until = math.inf
    handed_out.take_some(MOST_OPEN, 0)
    assert buffer.open_records == MOST_OPEN
    scene.fetch(ONE, 2000)
    scene.fetcher.fetch(0)
    assert scene.data.assigned == {1: 10}, "there is no room for it"
    buffer.finish(*range(10, 10 + MOST_OPEN))
    scene.fetcher.fetch(0)
    assert scene.data.assigned == {1: 10}, "enough waits"
    del buffer.fetched[0]
    scene.fetcher.fetch(0)
    assert scene.data.assigned == {0: 10 + MOST_OPEN + 2000, 1: 10}


def test_places_that_wait_for_a_commit_keep_no_other_from_being_fetched(scene: Scene) -> None:
    """Each has less than what would leave it out, and all together more than what stops the fetching."""
    blocked, healthy = [GroupPartition("g", "t", number) for number in range(4)], GroupPartition("g", "t", 4)
    scene.hold(*blocked, healthy)
    for place in blocked:
        scene.fetch(place, MOST_OPEN)
        handed_out = scene.session.buffer[place].open_batch()
        handed_out.until = math.inf
        handed_out.take_some(MOST_OPEN, 0)
        scene.fetch(place, 1600)
    scene.fetch(healthy, 1)
    assert len(scene.session.buffer[healthy].fetched) == 1


def test_records_are_put_where_they_belong_in_order(scene: Scene) -> None:
    scene.hold(*PLACES)
    came = [(0, 10), (1, 10), (0, 11), (0, 12), (1, 11), (2, 10), (1, 12)]
    scene.data.records = [Message(topic="t", partition=partition, offset=offset) for partition, offset in came]
    scene.fetcher.fetch(0)
    fetched = [[record.offset() for record in scene.session.buffer[place].fetched] for place in PLACES]
    assert fetched == [[10, 11, 12], [10, 11, 12], [10]]


def test_what_a_callback_of_the_application_costs_is_fetched_again(scene: Scene) -> None:
    """The client drops what it has taken out when its `stats_cb` raises."""
    scene.hold(ONE, TWO)
    scene.fetch(ONE, 3)
    scene.data.callback_error = ValueError("statsd is away")
    with pytest.raises(ValueError, match="statsd"):
        scene.fetch(ONE, 4)
    assert scene.data.assigned == {ONE.partition: 13, TWO.partition: 10}


def test_where_a_claim_goes_on_at_the_end_is_where_its_successor_begins() -> None:
    """Else records that come until then are passed over by the successor, too, and nobody is told."""
    scene = Scene(out_of_range="latest")
    scene.begin(ONE, last_offset=100)
    scene.follow()
    scene.data.bounds = (500, 600)
    scene.fetcher._displaced[ONE] = _Displaced(clock_s())
    assert scene.follow()[-1] == OutOfRange("t", 0, 101, 500, 600, 600)
    assert scene.data.assigned == {0: 600}
    assert scene.session.processed() == {ONE: 599}
    scene.session._log.close(0)


def test_who_hears_of_a_missing_position_may_pause_the_partition() -> None:
    """And others, whose positions are missing as well: nothing is fetched of them before they are resumed."""
    scene = Scene(out_of_range="earliest")
    for place in (ONE, TWO):
        scene.begin(place, last_offset=100)
    scene.follow()
    scene.data.bounds = (500, 600)
    scene.fetcher._displaced |= {place: _Displaced(clock_s() - 60) for place in (ONE, TWO)}
    told = []
    for event in scene.fetcher.follow():
        told.append(event)
        scene.fetcher.pause(None, None)
    assert told == [OutOfRange("t", 0, 101, 500, 600, 500)]
    assert scene.data.assigned == {}
    scene.fetcher.resume(None, None)
    assert scene.data.assigned == {0: 500, 1: 101}  # of the second, the client will say so again
    scene.session._log.close(0)


def test_a_client_that_finds_no_broker_while_claims_are_held_is_replaced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("harvester.coordination.fetcher.clock_s", lambda: now[0])
    first = scene.data
    first.is_stranded = True

    def ask(at: float) -> bool:
        """Whether there is another client then."""
        now[0] = at
        scene.fetcher.topics()
        return scene.data is not first

    assert not ask(100.0)
    assert not ask(129.0)  # nothing is held: the brokers may be away
    scene.hold(ONE, TWO)
    scene.fetch(ONE, 3)
    first.is_stranded = False
    assert not ask(130.0)
    first.is_stranded = True
    assert not ask(131.0)
    scene.fetch(ONE, 1)  # so it is not
    assert not ask(140.0)
    assert not ask(147.0)
    assert ask(148.0)
    assert first.is_closed.wait(30)
    assert scene.data.assigned == {ONE.partition: 14, TWO.partition: 10}
    scene.fetch(ONE, 2)
    with scene.session.lock:
        assert [record.offset() for record in scene.session.buffer[ONE].fetched] == [10, 11, 12, 13, 14, 15]
    scene.data.is_stranded = True
    scene.session.buffer.clear()
    first = scene.data
    assert not ask(200.0)
    assert not ask(229.0)
    assert ask(230.0)


def ended_below_its_position(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, list[float]]:
    """A partition that holds 0 to 90 while its claim continues at 101, as the client has just said; and the clock."""
    now = [100.0]
    monkeypatch.setattr("harvester.coordination.fetcher.clock_s", lambda: now[0])
    scene = Scene(out_of_range="latest")
    scene.begin(ONE, last_offset=100)
    scene.follow()
    scene.data.bounds = (0, 90)
    scene.fetcher._displaced[ONE] = _Displaced(now[0])
    return scene, now


def test_a_partition_that_ended_below_the_position_and_has_grown_since_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lost records, or is another one: what is at these offsets now was never handed out."""
    scene, now = ended_below_its_position(monkeypatch)
    assert not [event for event in scene.follow() if isinstance(event, OutOfRange)]
    now[0] += 2.0
    scene.data.bounds = (0, 140)
    assert scene.follow()[-1] == OutOfRange("t", 0, 101, 0, 90, None)
    assert isinstance(scene.session.error, OffsetOutOfRange)
    scene.session._log.close(0)


@pytest.mark.parametrize("another", [True, False])
def test_a_topic_made_anew_that_has_grown_past_the_position_is_an_error(another: bool) -> None:
    """Its end was never seen below the position: nothing but its id tells it from the former one."""
    scene = Scene(out_of_range="latest")
    scene.begin(ONE, last_offset=100)
    scene.follow()

    def knows_the_topic() -> bool:
        scene.fetcher.look()
        return scene.fetcher._begun_in == {ONE: "one"}

    eventually(knows_the_topic, what="the topic's id")
    scene.coordinator.topic_id = "another" if another else "one"
    scene.data.bounds = (0, 140)
    scene.fetcher._displaced[ONE] = _Displaced(clock_s())
    told = [event for event in scene.follow() if isinstance(event, OutOfRange)]
    assert told == ([OutOfRange("t", 0, 101, 0, 140, None)] if another else [])
    assert isinstance(scene.session.error, OffsetOutOfRange) == another
    scene.session._log.close(0)


def test_a_missing_topic_is_told_of_once_and_not_at_the_first_look(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for said in (0, 1, 1):
        scene.fetcher.topics()
        assert len(caplog.messages) == said
    assert "there is no topic 't'" in caplog.messages[0]
    scene.data.topics = {"t": SimpleNamespace(error=None, partitions={0: None})}
    for _ in range(2):
        scene.fetcher.topics()
    assert caplog.messages[1:] == ["topic 't' is there now"]


def test_a_new_leader_that_learns_its_end_a_moment_later_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, now = ended_below_its_position(monkeypatch)
    scene.follow()
    now[0] += 0.9
    scene.data.bounds = (0, 140)
    assert not [event for event in scene.follow() if isinstance(event, OutOfRange)]
    assert scene.session.error is None
    assert scene.data.assigned == {0: 101}
    scene.session._log.close(0)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (KafkaError._AUTO_OFFSET_RESET, "Partition log truncation detected at offset 5000", "has lost records"),
        (KafkaError._BAD_COMPRESSION, "Decompression failed", "Decompression failed"),
        (KafkaError._BAD_MSG, "bad checksum", "bad checksum"),
    ],
)
def test_what_cannot_be_read_ends_the_consumer_with_the_reason(scene: Scene, code: int, text: str, said: str) -> None:
    """The client would report it for ever, or pass over it."""
    told = KafkaError(code, text)
    scene.fetcher._trouble(SimpleNamespace(error=lambda: told, topic=lambda: "t", partition=lambda: 0))
    assert isinstance(scene.session.error, BrokerError)
    assert said in str(scene.session.error)
    assert "t[0]" in str(scene.session.error)
