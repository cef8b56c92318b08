"""Lanes whose connections to the real broker break, fall silent, or are slow (P23, P40, P46)."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from harvester.delivery.lane import Lane, Lanes, LaneSettings, TransactionOutcome, earliest_resend_s
from harvester.delivery.progress import EncodedProgress, Progress, encode
from tests.conftest import MakeTopic
from tests.support.consuming import read_topic
from tests.support.kafka_proxy import END_TXN, PRODUCE, KafkaProxy, Request, Then, commits
from tests.support.lanes import opened
from tests.support.servers import Servers

pytest_plugins = ["tests.support.lane_scene"]

INCARNATION = uuid4()
BROKEN: list[Then] = ["fin", "rst"]
SMALL = 1_000  # bytes that a topic takes
FENCED = {47, 90}  # INVALID_PRODUCER_EPOCH, PRODUCER_FENCED


def named(term: int, *ids: int) -> EncodedProgress:
    return encode(Progress(term, INCARNATION, ids))


@pytest.fixture
def proxy(servers: Servers) -> Iterator[KafkaProxy]:
    with KafkaProxy(servers.bootstrap) as proxy:
        yield proxy


@pytest.fixture
def far(lane_settings: LaneSettings, proxy: KafkaProxy) -> Lanes:
    """The lanes, behind the proxy."""
    away = {"bootstrap.servers": proxy.address}
    settings = replace(
        lane_settings, options={**lane_settings.options, **away}, producer={**lane_settings.producer, **away}
    )
    return Lanes(settings, Producer)


def error_in(answer: bytes) -> int:
    """Of an EndTxn answer, as a client of version 0 or 1 gets it: length, correlation, throttle time, error."""
    code: int = struct.unpack_from(">h", answer, 12)[0]
    return code


@pytest.mark.parametrize("then", BROKEN)
def test_a_commit_that_the_client_sent_twice_is_unclear_though_it_succeeded(
    far: Lanes, lanes: Lanes, proxy: KafkaProxy, topic: str, servers: Servers, then: Then
) -> None:
    """P40: the first one comes into the next transaction, of a producer that the coordinator fences it from."""
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    first = proxy.catch(END_TXN, then=then, where=commits)
    assert lane.commit(named(1, 1)) is TransactionOutcome.UNCLEAR
    lane.close()
    heir = opened(lanes)
    assert lanes.progress(0, 5.0) == Progress(1, INCARNATION, (1,))
    assert heir.begin() is TransactionOutcome.DONE
    heir.produce(topic, b"2", b"key")
    assert heir.flush(5.0)
    (answer,) = first.deliver()
    assert error_in(answer) in FENCED
    assert heir.commit(named(1, 1, 2)) is TransactionOutcome.DONE
    assert [record.value for record in read_topic(servers.bootstrap, topic)] == [b"1", b"2"]


@pytest.mark.parametrize("then", BROKEN)
def test_an_abort_that_the_client_sent_twice_is_unclear_though_it_succeeded(
    far: Lanes, proxy: KafkaProxy, topic: str, then: Then
) -> None:
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    assert lane.flush(5.0)
    proxy.catch(END_TXN, then=then)
    assert lane.abort() is TransactionOutcome.UNCLEAR


def test_a_commit_that_nobody_answers_is_unclear(far: Lanes, lanes: Lanes, proxy: KafkaProxy, topic: str) -> None:
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    proxy.catch(END_TXN, then="silence")
    assert lane.commit(named(1, 1)) is TransactionOutcome.UNCLEAR
    lane.close()
    opened(lanes)
    assert lanes.progress(0, 5.0) is None


@pytest.mark.parametrize("then", BROKEN)
def test_an_answer_that_got_lost_is_unclear_though_the_commit_counts(
    far: Lanes, lanes: Lanes, proxy: KafkaProxy, topic: str, then: Then
) -> None:
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    proxy.catch(END_TXN, then=then, on="answer")
    assert lane.commit(named(1, 1)) is TransactionOutcome.UNCLEAR
    lane.close()
    opened(lanes)
    assert lanes.progress(0, 5.0) == Progress(1, INCARNATION, (1,))


@pytest.mark.parametrize("then", BROKEN)
def test_records_whose_connection_broke_make_an_abort_unclear_and_no_commit(
    far: Lanes, proxy: KafkaProxy, topic: str, then: Then
) -> None:
    """All of a commit's records are acknowledged; of an abort's some may still be in the network."""
    lane = opened(far)
    for outcome in (TransactionOutcome.DONE, TransactionOutcome.UNCLEAR):
        assert lane.begin() is TransactionOutcome.DONE
        proxy.catch(PRODUCE, then=then, on="answer")
        for partition in (0, 1):  # the second one has the coordinator's connection made anew as well
            lane.produce(topic, b"1", b"key", partition)
            assert lane.flush(5.0)
        ended = lane.commit(named(1, 1)) if outcome is TransactionOutcome.DONE else lane.abort()
        assert ended is outcome, lane.error


def test_commits_of_a_broker_that_is_slow_are_clear(
    far: Lanes, lane_settings: LaneSettings, proxy: KafkaProxy, topic: str
) -> None:
    """They take longer than the client waits before it sends a request again; the client says that it did not."""
    lane = opened(far)
    slow_s = 3 * earliest_resend_s(lane_settings.producer)
    proxy.delay(slow_s)
    for number in range(1, 4):
        assert lane.begin() is TransactionOutcome.DONE
        lane.produce(topic, b"%d" % number, b"key")
        began = time.monotonic()
        assert lane.commit(named(1, number)) is TransactionOutcome.DONE, lane.error
        assert time.monotonic() - began > slow_s
    assert proxy.seen[END_TXN] == 3


def test_a_commit_that_the_broker_puts_off_is_clear(far: Lanes, proxy: KafkaProxy, topic: str) -> None:
    """It was sent twice, and each of the two was answered on its connection."""
    lane = opened(far)
    answers = [struct.pack(">ih", 0, 51)]  # CONCURRENT_TRANSACTIONS
    proxy.answer(END_TXN, lambda _: answers.pop() if answers else None)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    assert lane.commit(named(1, 1)) is TransactionOutcome.DONE
    assert proxy.seen[END_TXN] == 2


def test_progress_is_sent_when_all_other_records_are_acknowledged(
    far: Lanes, lane_settings: LaneSettings, proxy: KafkaProxy, topic: str
) -> None:
    """P46: else a commit from elsewhere would make it readable without them."""
    lane = opened(far)
    progress = named(1, 7)
    acknowledged = threading.Event()
    early: list[Request] = []

    def notes(request: Request) -> bool:
        if progress.value in request.frame and not acknowledged.is_set():
            early.append(request)
        return False

    proxy.catch(PRODUCE, where=notes)
    answer = proxy.catch(PRODUCE, then="silence", on="answer", where=lambda request: topic.encode() in request.frame)
    assert lane.begin() is TransactionOutcome.DONE
    assert lane.note(named(1)) is TransactionOutcome.DONE
    lane.produce(topic, b"7", b"key")
    outcomes: list[TransactionOutcome] = []
    committing = threading.Thread(target=lambda: outcomes.append(lane.commit(progress)))
    committing.start()
    answer.wait()
    committing.join(0.5)
    assert committing.is_alive()
    acknowledged.set()
    answer.deliver()
    committing.join(10)
    assert (outcomes, early) == ([TransactionOutcome.DONE], [])
    assert far.progress(0, 5.0) == Progress(1, INCARNATION, (7,))


def ended_astray(far: Lanes, lanes: Lanes, proxy: KafkaProxy, topic: str) -> Progress | None:
    """The commit of one transaction arrives again in the next one, of which the broker has refused a record.

    What progress is readable then.
    """
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    commit = proxy.catch(END_TXN, then="fin", where=commits)
    assert lane.commit(named(1, 1)) is TransactionOutcome.UNCLEAR  # the harvester would open the lane anew (P40)
    assert lane.begin() is TransactionOutcome.DONE
    assert lane.note(named(1, 1)) is TransactionOutcome.DONE
    lane.produce(topic, bytes(2 * SMALL), b"key")
    lane.conclude(named(1, 1, 2))
    (answer,) = commit.deliver()
    assert error_in(answer) == 0
    opened(lanes)
    return lanes.progress(0, 5.0)


@pytest.mark.parametrize("waits", [True, False], ids=["", "progress does not wait"])
def test_a_stray_commit_makes_no_progress_readable_that_names_what_is_not_there(
    far: Lanes,
    lanes: Lanes,
    proxy: KafkaProxy,
    make_topic: MakeTopic,
    servers: Servers,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P46. Where progress does not wait for the answers to its records, it names one that nobody will ever read."""
    if not waits:
        monkeypatch.setattr(Lane, "_conclude", lambda lane, *given: (lane._note(*given), lane._arrive()))
    topic = make_topic(config={"max.message.bytes": str(SMALL)})
    progress = ended_astray(far, lanes, proxy, topic)
    assert [record.value for record in read_topic(servers.bootstrap, topic)] == [b"1"]
    assert progress == Progress(1, INCARNATION, (1,) if waits else (1, 2))


def test_the_lines_that_prove_a_commit_clear_are_the_clients_own(far: Lanes, proxy: KafkaProxy, topic: str) -> None:
    """Were they worded otherwise in another version, every slow commit would count as unclear: this test says so."""
    lane = opened(far)
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"1", b"key")
    assert lane.commit(named(1, 1)) is TransactionOutcome.DONE
    assert lane._witness.answers == ["NO_ERROR"]
    assert lane.begin() is TransactionOutcome.DONE
    lane.produce(topic, b"2", b"key")
    proxy.catch(END_TXN)
    assert lane.commit(named(1, 2)) is TransactionOutcome.UNCLEAR
    assert lane._witness.answers == ["_TRANSPORT", "NO_ERROR"]
