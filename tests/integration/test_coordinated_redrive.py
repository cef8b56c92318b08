"""Dead letters that go back to their topic, and those that are discarded, on a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
from confluent_kafka import Consumer, Producer

from harvester.bounds import read_bounds
from harvester.coordination import dead_letters
from harvester.coordination.dead_letters import DeadLetter, DeadLetterTopic, DeadLetterWriter, ensure_dead_letter_topic
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError, BrokerUnavailable
from tests.conftest import MakeTopic
from tests.support.client_threads import OF_CLIENTS
from tests.support.consuming import Published, by_key, read_topic
from tests.support.coordinated import settings
from tests.support.handled import Handled, Start, fill_keys, start
from tests.support.kafka_proxy import END_TXN, PRODUCE, KafkaProxy
from tests.support.proxy import Proxy
from tests.support.refusing import NOT_ENOUGH_REPLICAS, RefusingProxy
from tests.support.wait import eventually

__all__ = ["settings", "start"]

CONSUMERS = 8
EACH = 6  # records of a key
BAD = (1, 3, 4)  # those that are given up, of the first keys
FAILING = 3  # keys
IN_ONE = 4  # letters in a transaction: those of a key are in several
PARTITIONS = 4  # of the topic that `settings` names

PROGRAM = """
import json
import sys
from confluent_kafka import Producer
from harvester.coordination import dead_letters

name, options, commits, dead_letters._REDRIVEN = json.loads(sys.argv[1])

class Blocked(Producer):
    def commit_transaction(self, *args):
        global commits
        if not commits:
            self.flush()
            print("produced", flush=True)
            sys.stdin.read()
        commits -= 1
        super().commit_transaction(*args)

dead_letters.Producer = Blocked
topic = dead_letters.DeadLetterTopic(name, options)
topic.redrive(topic.read())
"""

CLOSES = """
import sys
from harvester.coordination import dead_letters
from harvester.errors import BrokerUnavailable

dead_letters._WRITING["delivery.timeout.ms"] = 500
letter = dead_letters.DeadLetter(
    group="g", topic="t", partition=0, offset=1, key=None, value=b"v", headers=[], error="e", attempts=1, client="c",
    timestamp_ms=None, failed_at_ms=0,
)
topic = dead_letters.DeadLetterTopic("g.dead-letters", {"bootstrap.servers": sys.argv[1]})
try:
    topic.discard([letter])
except BrokerUnavailable:
    print(of_clients())
"""


class Taken(Handled):
    """Remembers which records a handler has taken, also where it was given one of them again."""

    def __init__(self) -> None:
        super().__init__(is_bad)
        self.places: set[tuple[str, int, int]] = set()

    def __call__(self, record: Any) -> None:
        super().__call__(record)
        self.places.add((record.value().decode(), record.partition(), record.offset()))

    def times(self) -> Counter[str]:
        """In how many places each of the bad values stood."""
        return Counter(value for value, _, _ in tuple(self.places) if is_bad(value))


def is_bad(value: str) -> bool:
    key, _, number = value.partition("-")
    return key.isdecimal() and int(key) < FAILING and int(number) in BAD


def bad(key: int) -> list[str]:
    """Its values that are given up, in its order."""
    return [value for value in values(key) if is_bad(value)]


def values(key: int) -> list[str]:
    return [f"{key}-{number}" for number in range(EACH)]


def first_of_key(found: Iterable[str], key: int) -> list[str]:
    """The bad values of a key, each where it came first."""
    return list(dict.fromkeys(value for value in found if value in bad(key)))


def texts(letters: Iterable[DeadLetter]) -> list[str]:
    return [(letter.value or b"").decode() for letter in letters]


def records(settings: ConsumerSettings) -> list[Published]:
    """All that the topic has for consumers that see committed records only."""
    return read_topic(str(settings.kafka["bootstrap.servers"]), settings.topics[0])


def log(keys: int, back: Iterable[DeadLetter] = ()) -> dict[str | None, list[str | None]]:
    """The topic's content: each key's own values, and behind them those that have come back."""
    again = texts(back)
    return {str(key): [*values(key), *(value for value in bad(key) if value in again)] for key in range(keys)}


def end(settings: ConsumerSettings, topic: str, isolation: str) -> int:
    """Of all partitions together."""
    client = Consumer({**settings.kafka, "group.id": "test-reader", "isolation.level": isolation})
    try:
        partitions = client.list_topics(topic, timeout=30).topics[topic].partitions
        return sum(read_bounds(client, topic, partition, 30)[1] for partition in partitions)
    finally:
        client.close()


def hidden(settings: ConsumerSettings, topic: str) -> int:
    """Records of transactions that are still open."""
    return end(settings, topic, "read_uncommitted") - end(settings, topic, "read_committed")


def give_up(settings: ConsumerSettings, start: Start) -> tuple[Taken, DeadLetterTopic, list[DeadLetter]]:
    """A consumer that has given up some records, and would take them now; and those."""
    taken = Taken()
    start(taken, on_error="dead-letter", attempts=1)
    fill_keys(settings, FAILING, EACH)
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    eventually(lambda: len(topic.read()) == FAILING * len(BAD), what="the dead letters")
    eventually(lambda: len(set(taken.values)) == FAILING * (EACH - len(BAD)), what="the others")
    taken.fails = lambda _: False
    return taken, topic, topic.read()


def wait_for_the_end(settings: ConsumerSettings, taken: Taken) -> None:
    """Until it has taken all that stands in the topic now."""
    producer = Producer(dict(settings.kafka))
    for partition in range(PARTITIONS):
        producer.produce(settings.topics[0], key=b"end", value=f"end-{partition}".encode(), partition=partition)
    producer.flush(30)
    eventually(lambda: {f"end-{partition}" for partition in range(PARTITIONS)} <= set(taken.values), what="the ends")


def write(settings: ConsumerSettings, count: int = 6) -> tuple[DeadLetterTopic, list[DeadLetter]]:
    """A dead-letter topic in which so many letters stand."""
    ensure_dead_letter_topic(settings.dead_letters, settings.kafka)
    letters = [
        DeadLetter(
            group=settings.group, topic=settings.topics[0], partition=1, offset=number, key=b"k",
            value=str(number).encode(), headers=[], error="ValueError: no", attempts=1, client="c", timestamp_ms=None,
            failed_at_ms=0,
        )
        for number in range(count)
    ]  # fmt: skip
    writer = DeadLetterWriter(settings.dead_letters, settings.kafka)
    for letter in letters:
        writer.send(letter)
    writer.close()
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    return topic, topic.read()


def through(settings: ConsumerSettings, address: str, **options: Any) -> DeadLetterTopic:
    """The dead-letter topic as it is seen from there."""
    return DeadLetterTopic(settings.dead_letters, {**settings.kafka, "bootstrap.servers": address, **options})


@contextmanager
def blocked(settings: ConsumerSettings, commits: int) -> Iterator[subprocess.Popen[str]]:
    """A process that redrives all, and has produced the next transaction after so many commits; its own waits."""
    given = json.dumps([settings.dead_letters, dict(settings.kafka), commits, IN_ONE])
    command = [sys.executable, "-c", PROGRAM, given]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "produced\n", process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times a third of what they are."""
    delivery_ms = dead_letters._DELIVERY_MS // 3
    monkeypatch.setattr(dead_letters, "_TIMEOUT_S", dead_letters._TIMEOUT_S / 3)
    monkeypatch.setattr(dead_letters, "_DELIVERY_MS", delivery_ms)
    monkeypatch.setitem(dead_letters._WRITING, "delivery.timeout.ms", delivery_ms)


# -- back to the topic


def test_letters_of_several_keys_go_back_in_the_order_in_which_they_failed(
    settings: ConsumerSettings, start: Start, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "_REDRIVEN", IN_ONE)
    settings = replace(settings, topics=(make_topic(CONSUMERS),))
    policy: dict[str, Any] = {"on_error": "dead-letter", "attempts": 2, "backoff_s": 0.01}
    taken, keys = Taken(), 2 * FAILING
    runners = [start(taken, topics=settings.topics, **policy) for _ in range(CONSUMERS)]
    eventually(lambda: all(len(runner.consumer.claims()) == 1 for runner in runners), 90, "a partition for each")
    fill_keys(settings, keys, EACH)
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    eventually(lambda: len(topic.read()) == FAILING * len(BAD), what="the dead letters")
    eventually(lambda: len(set(taken.values)) == keys * EACH - FAILING * len(BAD), what="all others")
    letters, failed = topic.read(), list(taken.tries)
    assert len({letter.partition for letter in letters}) > 1
    assert by_key(records(settings)) == log(keys)

    taken.fails = lambda _: False
    assert topic.redrive(reversed(letters)) == letters
    assert topic.read() == []
    eventually(lambda: len(set(taken.values)) == keys * EACH, what="all records")
    for key in range(FAILING):
        assert first_of_key(taken.values, key) == first_of_key(failed, key) == bad(key)
    found = records(settings)
    assert by_key(found) == log(keys, letters)
    assert len({(record.key, record.partition) for record in found}) == keys  # each came back to its own
    assert topic.read() == []


@pytest.mark.parametrize("commits", [0, 1])
def test_of_a_transaction_whose_process_is_killed_nothing_is_seen_and_the_next_redrive_puts_all_back_once(
    settings: ConsumerSettings, start: Start, commits: int
) -> None:
    taken, topic, letters = give_up(settings, start)
    gone, left = letters[: commits * IN_ONE], letters[commits * IN_ONE :]
    with blocked(settings, commits) as process:
        assert hidden(settings, settings.topics[0]) == IN_ONE
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    assert by_key(records(settings)) == log(FAILING, gone)
    assert topic.read() == left

    assert topic.redrive(letters) == left
    assert by_key(records(settings)) == log(FAILING, letters)
    assert topic.read() == []
    wait_for_the_end(settings, taken)
    assert taken.times() == Counter(texts(letters))


def test_of_two_that_redrive_at_the_same_time_the_later_one_puts_back_all(
    settings: ConsumerSettings, start: Start
) -> None:
    taken, topic, letters = give_up(settings, start)
    with blocked(settings, 0) as process:
        assert topic.redrive(letters) == letters
        _, said = process.communicate(timeout=60)  # ends what it reads, so that it goes on
        assert process.returncode == 1
        assert "harvester.errors.BrokerError" in said
    assert by_key(records(settings)) == log(FAILING, letters)
    assert topic.read() == []
    wait_for_the_end(settings, taken)
    assert taken.times() == Counter(texts(letters))


@pytest.mark.parametrize(("lost", "left"), [("request", 6), ("answer", 0)])
def test_a_redrive_that_is_not_told_its_outcome_says_so_and_may_be_repeated(
    settings: ConsumerSettings, hasty: None, lost: Literal["request", "answer"], left: int
) -> None:
    topic, letters = write(settings)
    with KafkaProxy(str(settings.kafka["bootstrap.servers"])) as proxy:
        caught = proxy.catch(END_TXN, then="silence", on=lost)
        with pytest.raises(BrokerUnavailable, match="Timed out"):
            through(settings, proxy.address).redrive(letters)
        assert caught.requests
    assert len(topic.redrive(letters)) == left
    assert topic.read() == []
    assert [record.value for record in records(settings)] == [letter.value for letter in letters]


def test_a_redrive_that_does_not_arrive_leaves_no_transaction_open(settings: ConsumerSettings, hasty: None) -> None:
    """Readers of both topics would wait for the end of its time."""
    topic, letters = write(settings)
    with KafkaProxy(str(settings.kafka["bootstrap.servers"])) as proxy:
        caught = proxy.catch(PRODUCE, then="silence", on="answer")
        with pytest.raises(BrokerUnavailable, match=r"cannot be used: \d+ message"):
            through(settings, proxy.address).redrive(letters)
        assert caught.requests
        eventually(lambda: hidden(settings, topic.name) == hidden(settings, settings.topics[0]) == 0, 10, "its end")
    assert topic.read() == letters
    assert records(settings) == []


def test_a_redrive_whose_brokers_go_away_ends_and_may_be_repeated(settings: ConsumerSettings, hasty: None) -> None:
    topic, letters = write(settings)
    with Proxy(str(settings.kafka["bootstrap.servers"]), kafka=True) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.open()
        proxy.keep(PRODUCE)
        redriven = pool.submit(through(settings, proxy.address).redrive, letters)
        eventually(lambda: proxy.kept, what="a record on its way")
        proxy.cut()
        with pytest.raises(BrokerUnavailable, match="cannot be used"):
            redriven.result(60)
    assert topic.read() == letters
    assert topic.redrive(letters) == letters
    assert topic.read() == []
    assert [record.value for record in records(settings)] == [letter.value for letter in letters]


def test_a_redrive_of_which_a_record_is_only_inferred_moves_nothing(settings: ConsumerSettings) -> None:
    """The broker refuses a producer's first request on a partition, and takes the second (P45, KAFKA-15591)."""
    topic, letters = write(settings)
    with RefusingProxy(str(settings.kafka["bootstrap.servers"])) as proxy:
        refusal = proxy.refuse(settings.topics[0], NOT_ENOUGH_REPLICAS)
        with pytest.raises(BrokerUnavailable, match="accepted a later record"):
            through(settings, proxy.address, **{"batch.num.messages": 1}).redrive(letters)
        assert refusal.overtaken.is_set()
    assert topic.read() == letters
    assert records(settings) == []
    assert topic.redrive(letters) == letters
    assert [record.value for record in records(settings)] == [letter.value for letter in letters]


def test_a_record_in_the_same_place_of_a_topic_made_anew_is_another_letter(settings: ConsumerSettings) -> None:
    topic, (one,) = write(settings, 1)
    two = replace(one, value=b"another", failed_at_ms=2)
    writer = DeadLetterWriter(topic.name, settings.kafka)
    for letter in (two, replace(one, failed_at_ms=3, attempts=7), replace(two, failed_at_ms=4)):
        writer.send(letter)
    writer.close()
    assert [(letter.value, letter.failed_at_ms) for letter in topic.read()] == [(b"0", 3), (b"another", 4)]
    topic.discard([one])
    assert [letter.value for letter in topic.redrive(topic.read())] == [b"another"]
    assert topic.read() == []


# -- discarded


def test_a_discard_that_is_only_inferred_is_none(settings: ConsumerSettings) -> None:
    topic, letters = write(settings)
    with RefusingProxy(str(settings.kafka["bootstrap.servers"])) as proxy:
        refusal = proxy.refuse(topic.name, NOT_ENOUGH_REPLICAS)
        with pytest.raises(BrokerUnavailable, match="accepted a later record"):
            through(settings, proxy.address, **{"batch.num.messages": 1}).discard(letters)
        assert refusal.overtaken.is_set()
    assert topic.read() == letters[:1]


def test_what_has_no_place_to_go_back_to_is_named_and_nothing_is_moved(settings: ConsumerSettings) -> None:
    topic, letters = write(settings, 3)
    writer = DeadLetterWriter(topic.name, settings.kafka)
    writer.send(replace(letters[0], partition=PARTITIONS))
    writer.send(replace(letters[0], topic="no-such-topic"))
    with pytest.raises(
        BrokerError, match=rf"no-such-topic\[{letters[0].partition}\], {letters[0].topic}\[{PARTITIONS}\]"
    ) as raised:
        topic.redrive(topic.read())
    assert not isinstance(raised.value, BrokerUnavailable), "waiting does not help"
    assert len(topic.read()) == 5
    assert topic.redrive(letters) == letters


def test_what_is_discarded_is_gone_and_the_others_stay(settings: ConsumerSettings) -> None:
    topic, letters = write(settings)
    topic.discard(letters[1::2])
    assert topic.read() == letters[::2]
    topic.discard(letters[:2])  # one of them is settled
    assert topic.read() == letters[2::2]
    topic.discard([])
    assert topic.redrive(letters) == letters[2::2]
    assert [record.value for record in records(settings)] == [b"2", b"4"]


@pytest.mark.parametrize("trouble", ["cut", "deafen"])
def test_a_discard_whose_brokers_are_away_is_none(settings: ConsumerSettings, hasty: None, trouble: str) -> None:
    topic, letters = write(settings)
    with Proxy(str(settings.kafka["bootstrap.servers"]), kafka=True) as proxy:
        proxy.open()
        far = through(settings, proxy.address)
        assert far.read() == letters
        getattr(proxy, trouble)()
        with pytest.raises(BrokerUnavailable, match=r"cannot be used: .*timed out"):
            far.discard(letters)
    assert topic.read() == letters


def test_a_discard_of_which_a_part_is_refused_is_an_error(settings: ConsumerSettings, make_topic: MakeTopic) -> None:
    _, (one, two) = write(settings, 2)
    long, narrow = replace(one, topic="t" * 200), make_topic(1, {"max.message.bytes": "200"})
    with pytest.raises(BrokerError, match="size too large"):
        DeadLetterTopic(narrow, {**settings.kafka, "batch.num.messages": 1}).discard([one, long, two])
    arrived = read_topic(str(settings.kafka["bootstrap.servers"]), narrow)
    assert [record.key for record in arrived] == [one.encode()[0], two.encode()[0]]


def test_a_discard_that_the_client_itself_refuses_is_an_error(settings: ConsumerSettings) -> None:
    """It is full until it knows that there is no such topic, and then takes nothing more for it."""
    _, letters = write(settings)
    options = {"queue.buffering.max.messages": 1, "topic.metadata.propagation.max.ms": 100}
    with pytest.raises(BrokerError, match="Unknown topic"):
        DeadLetterTopic("nowhere", {**settings.kafka, **options}).discard(letters)


def test_no_client_is_left_of_a_discard_whose_brokers_are_away() -> None:
    """OpenSSL frees at the end of a process what a client that makes a connection still uses."""
    with Proxy("127.0.0.1:1") as closed:
        command = [sys.executable, "-c", OF_CLIENTS + CLOSES, closed.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_after_a_failure_letters_are_sent_by_another_client(
    settings: ConsumerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may never find a broker again (P48)."""
    monkeypatch.setitem(dead_letters._WRITING, "delivery.timeout.ms", 2000)
    _, (letter,) = write(settings, 1)
    with Proxy(str(settings.kafka["bootstrap.servers"]), kafka=True) as way:
        way.open()
        writer = DeadLetterWriter(settings.dead_letters, {**settings.kafka, "bootstrap.servers": way.address})
        writer.send(letter)
        former = writer._producer
        way.cut()
        with pytest.raises(BrokerUnavailable):
            writer.send(letter)
        assert writer._producer is not former
        way.open()
        writer.send(letter)
        writer.close()
        with pytest.raises(BrokerUnavailable):
            writer.send(letter)


def test_a_letter_that_is_only_inferred_to_be_written_is_not(settings: ConsumerSettings) -> None:
    """Of two threads: the broker refuses what the first sends, and takes what the second sends (P45, KAFKA-15591)."""
    topic, (one, two) = write(settings, 2)
    topic.discard([one, two])
    with RefusingProxy(str(settings.kafka["bootstrap.servers"])) as proxy, ThreadPoolExecutor(2) as pool:
        writer = DeadLetterWriter(topic.name, {**settings.kafka, "bootstrap.servers": proxy.address})
        refusal = proxy.refuse(topic.name, NOT_ENOUGH_REPLICAS)
        refused = pool.submit(writer.send, one)
        assert refusal.caught.wait(30)
        pool.submit(writer.send, two).result(60)
        with pytest.raises(BrokerUnavailable, match="accepted a later record"):
            refused.result(60)
        assert topic.read() == [two]
        writer.send(one)
        writer.close()
    assert topic.read() == [one, two]
