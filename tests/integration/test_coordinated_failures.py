"""What becomes of records that a handler cannot take, on a real broker."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import Producer

from harvester.coordination.dead_letters import DeadLetterTopic, DeadLetterWriter
from harvester.coordination.events import GivenUp, Released
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerError
from harvester.serializers import Json, Values
from tests.conftest import MakeTopic
from tests.support.coordinated import settings
from tests.support.handled import Handled, Poison, Start, fill_keys, start
from tests.support.wait import eventually

__all__ = ["settings", "start"]

KEYS, EACH = 20, 10
ALL = KEYS * EACH
QUICK: dict[str, Any] = {"backoff_s": 0.01, "longest_backoff_s": 0.05}


def values(key: int) -> list[str]:
    return [f"{key}-{number}" for number in range(EACH)]


def test_a_poison_record_goes_to_the_dead_letter_topic_and_comes_back_when_it_is_redriven(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH)
    producer = Producer(dict(settings.kafka))
    headers: Any = [("trace", b"\xff\x00"), ("harvester", b"an origin"), ("trace", None)]
    producer.produce(settings.topics[0], key=b"\xff", value=b"poison", headers=headers, partition=1, timestamp=1234)
    producer.flush(30)
    handled = Handled(lambda value: value == "poison")
    runner = start(handled, on_error="dead-letter", attempts=3, **QUICK)
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    eventually(lambda: len(handled.values) == ALL and bool(runner.told(GivenUp)), what="all others, and an end of it")
    (letter,) = topic.read()
    (told,) = runner.told(GivenUp)
    assert (told.record.offset(), told.attempts, told.dead_letter) == (letter.offset, 3, True)
    assert handled.tries.count("poison") == 3
    assert (letter.key, letter.value, letter.headers) == (b"\xff", b"poison", headers)
    assert letter.error == "Poison: cannot take poison"
    assert (letter.group, letter.topic, letter.partition) == (settings.group, settings.topics[0], 1)
    assert (letter.attempts, letter.client, letter.timestamp_ms) == (3, runner.consumer.client.id, 1234)
    figures = runner.consumer.statistics()
    assert (figures.failures, figures.given_up, figures.parked) == (3, 1, 0)
    eventually(lambda: not runner.consumer.open_records(), what="that nothing is open")

    handled.fails = lambda _: False
    assert topic.redrive([letter]) == [letter]
    eventually(lambda: "poison" in handled.values, what="the record, again")
    assert topic.read() == []
    assert topic.redrive([letter]) == []  # it is settled


def test_a_redriven_record_is_new_to_an_inbox_and_otherwise_as_it_was(settings: ConsumerSettings, start: Start) -> None:
    producer = Producer(dict(settings.kafka))
    producer.produce(settings.topics[0], key=b"k", value=None, headers=[("harvester", b"o"), ("a", b"1")], partition=2)
    producer.flush(30)
    records: list[Any] = []

    def handle(record: Any) -> None:
        records.append(record)
        if len(records) == 1:
            raise Poison

    start(handle, on_error="dead-letter", attempts=1)
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    letters = eventually(lambda: records and topic.read(), what="a dead letter")
    topic.redrive(letters)
    eventually(lambda: len(records) == 2, what="the record, again")
    assert (records[1].key(), records[1].value(), records[1].partition()) == (b"k", None, 2)
    assert records[1].headers() == [("harvester-origin", b"o"), ("a", b"1")]


def test_a_key_that_fails_keeps_its_order_while_others_of_its_partition_go_on(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    mended = threading.Event()
    handled = Handled(lambda value: value == "3-4" and not mended.is_set())
    runner = start(handled, on_error="retry", **QUICK)
    eventually(lambda: len(handled.values) == ALL - EACH + 4, what="all but what waits")
    eventually(lambda: runner.consumer.statistics().parked == 1, what="a key that waits")
    assert handled.of_key(3) == values(3)[:4]
    mended.set()
    eventually(lambda: len(handled.values) == ALL, what="the rest of the key")
    assert [handled.of_key(key) for key in range(KEYS)] == [values(key) for key in range(KEYS)]


def test_with_the_order_of_partitions_a_record_that_fails_holds_its_partition(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    fill_keys(settings, 1, EACH, partition=1)
    mended = threading.Event()
    handled = Handled(lambda value: value == "3-4" and not mended.is_set())
    start(handled, on_error="retry", order="partition", **QUICK)
    before = 4 * KEYS + 3
    eventually(lambda: len(handled.values) == before + EACH and len(handled.tries) > before + EACH + 3, what="retries")
    mended.set()
    eventually(lambda: len(handled.values) == ALL + EACH, what="the rest")


def test_what_waits_for_a_retry_is_bounded(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    mended = threading.Event()
    handled = Handled(lambda value: value == "0-0" and not mended.is_set())
    runner = start(handled, on_error="retry", max_open_records=30, **QUICK)
    eventually(lambda: len(handled.tries) > 60, what="retries")
    assert [each.records for each in runner.consumer.open_records().values()] == [30]
    assert len(handled.values) == 30 - 2  # two of the first thirty are of the key
    mended.set()
    eventually(lambda: len(handled.values) == ALL, what="the rest")
    assert handled.of_key(0) == values(0)


def test_retries_go_on_at_the_next_holder(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    first = Handled(lambda value: value == "3-4")
    runner = start(first, on_error="retry", **QUICK)
    eventually(lambda: len(first.values) == ALL - EACH + 4, what="all but what waits")
    second = Handled(lambda value: value == "3-4" and second.tries.count(value) < 3)
    runner.stop()
    start(second, on_error="retry", **QUICK)
    eventually(lambda: "3-9" in second.values, what="what waited")
    assert second.of_key(3) == values(3)[4:]
    assert set(first.values) | set(second.values) == {value for key in range(KEYS) for value in values(key)}


def test_a_partition_is_released_without_waiting_for_what_is_parked(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    handled = Handled(lambda value: value.endswith("-4"))
    runner = start(handled, on_error="retry", backoff_s=3600.0, longest_backoff_s=3600.0, heartbeat_interval_s=8.0)
    eventually(lambda: len(handled.values) == 4 * KEYS, what="all but what waits")
    for partition in range(4):
        runner.consumer.release(settings.topics[0], partition)
    eventually(lambda: len(runner.told(Released)) == 4, 6, what="releases, in less than an interval")


@pytest.mark.parametrize("workers", [1, 4])
def test_a_key_that_waits_goes_on_when_its_partition_is_claimed_anew(
    settings: ConsumerSettings, start: Start, workers: int
) -> None:
    fill_keys(settings, KEYS, EACH, partition=0)
    mended = threading.Event()
    handled = Handled(lambda value: value == "3-4" and not mended.is_set())
    runner = start(handled, on_error="retry", workers=workers, backoff_s=0.01, longest_backoff_s=0.05)
    eventually(lambda: len(handled.values) == ALL - EACH + 4, what="all but what waits")
    runner.consumer.seek(settings.topics[0], 0, 3)
    mended.set()
    eventually(lambda: handled.of_key(3)[-1:] == ["3-9"], what="the rest of the key")
    assert handled.of_key(3)[:4] + handled.of_key(3)[-EACH:] == values(3)[:4] + values(3)


def test_a_record_is_skipped(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    handled = Handled(lambda value: value == "3-4")
    runner = start(handled, on_error="skip", attempts=2, **QUICK)
    eventually(lambda: len(handled.values) == ALL - 1 and bool(runner.told(GivenUp)), what="all others")
    (told,) = runner.told(GivenUp)
    assert (told.record.value(), str(told.error)) == (b"3-4", "cannot take 3-4")
    assert (told.attempts, told.dead_letter) == (2, False)
    runner.stop()
    second = Handled()
    start(second)
    fill_keys(settings, 1, 1)
    eventually(lambda: bool(second.values), what="a record that is new")
    assert second.values == ["0-0"]


def test_a_consumer_ends_after_the_last_try(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, KEYS, EACH)
    handled = Handled(lambda value: value == "3-4")
    runner = start(handled, on_error="stop", attempts=3, **QUICK)
    assert isinstance(runner.wait(), Poison)
    assert handled.tries.count("3-4") == 3
    second = Handled()
    start(second)
    eventually(lambda: len(set(handled.values) | set(second.values)) == ALL, what="the rest")
    assert "3-4" in second.values


def test_at_most_once_a_record_that_fails_is_a_dead_letter_and_never_tried_again(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH)
    handled = Handled(lambda value: value.endswith("-4"))
    start(handled, on_error="dead-letter", at_most_once=True)
    eventually(lambda: len(handled.tries) == ALL, what="all records")
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    eventually(lambda: len(topic.read()) == KEYS, what="the dead letters")
    assert len(set(handled.tries)) == ALL


def test_a_record_that_the_dead_letter_topic_does_not_take_is_not_lost(
    settings: ConsumerSettings, start: Start, make_topic: MakeTopic
) -> None:
    small = make_topic(1, {"max.message.bytes": "200"})
    producer = Producer(dict(settings.kafka))
    producer.produce(settings.topics[0], value=b"x" * 300)
    producer.flush(30)
    runner = start(Handled(lambda _: True), on_error="dead-letter", attempts=1, dead_letter_topic=small)
    error = runner.wait()
    assert isinstance(error, BrokerError)
    assert small in str(error)
    second = Handled()
    start(second)
    eventually(lambda: second.values == ["x" * 300], what="the record")


def test_records_of_a_claim_that_has_ended_are_tried_again_by_the_next_holder_alone(
    settings: ConsumerSettings, start: Start
) -> None:
    fill_keys(settings, KEYS, EACH)
    handled, other = Handled(lambda value: value.endswith("-4")), Handled()
    runner = start(handled, on_error="retry", **QUICK)
    eventually(lambda: len(handled.values) == 4 * KEYS, what="all but what waits")
    start(other)
    eventually(lambda: runner.consumer.statistics().releases == 2, what="a fair share")
    eventually(lambda: runner.consumer.statistics().parked < KEYS, what="that what is given up is forgotten")
    handled.fails = lambda _: False
    eventually(lambda: len(set(handled.values) | set(other.values)) == ALL, what="all records")
    moved = [key for key in range(KEYS) if values(key)[4] in other.values]
    assert 0 < len(moved) < KEYS
    for key in range(KEYS):
        assert handled.of_key(key) == (values(key)[:4] if key in moved else values(key))
        assert key not in moved or other.of_key(key)[-6:] == values(key)[4:]


@pytest.mark.parametrize("policy", [{"on_error": "dead-letter", "attempts": 1}, {"on_error": "retry", **QUICK}])
def test_a_record_that_fails_when_its_claim_has_ended_is_left_to_the_next_one(
    settings: ConsumerSettings, start: Start, policy: dict[str, Any]
) -> None:
    """Also where that is ours again: it begins behind the record, which somebody else has handled by then."""
    fill_keys(settings, 1, 100, partition=2)
    topic, handled = settings.topics[0], Handled()

    def handle(record: Any) -> None:
        handled(record)
        if record.offset() == 9:
            consumer = runner.consumer
            before = consumer.claims()[topic, 2]
            consumer.seek(topic, 2, 95)
            eventually(lambda: consumer.claims().get((topic, 2), before) != before, what="the next claim")
            raise ValueError("too late")

    runner = start(handle, **policy)
    eventually(lambda: "0-99" in handled.values, what="the last record")
    assert handled.values == [f"0-{number}" for number in (*range(10), *range(95, 100))]
    assert runner.told(GivenUp) == []


def test_a_claim_that_ends_while_the_letter_is_written_gives_nothing_up(
    settings: ConsumerSettings, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next holder tries the record again; whoever took note of it here would do so for another's partition."""
    fill_keys(settings, 1, 100, partition=2)
    topic, handled = settings.topics[0], Handled(lambda value: value == "0-9")
    send = DeadLetterWriter.send

    def send_late(writer: DeadLetterWriter, letter: Any) -> None:
        consumer = runner.consumer
        before = consumer.claims()[topic, 2]
        consumer.seek(topic, 2, 95)
        eventually(lambda: consumer.claims().get((topic, 2), before) != before, what="the next claim")
        send(writer, letter)

    monkeypatch.setattr(DeadLetterWriter, "send", send_late)
    runner = start(handled, on_error="dead-letter", attempts=1)
    eventually(lambda: "0-99" in handled.values, what="the last record")
    assert handled.values == [f"0-{number}" for number in (*range(9), *range(95, 100))]
    assert runner.told(GivenUp) == []


def test_a_value_that_cannot_be_read_goes_the_way_of_on_error(settings: ConsumerSettings, start: Start) -> None:
    producer = Producer(dict(settings.kafka))
    for value in (b"[1]", b"no json", None, b"[2]"):
        producer.produce(settings.topics[0], value=value, key=b"k")
    producer.flush(30)
    found: list[Any] = []
    runner = start(Values(Json()).handler(lambda value, _: found.append(value)), on_error="dead-letter", attempts=1)
    eventually(lambda: len(found) == 3 and bool(runner.told(GivenUp)), what="the others")
    assert found == [[1], None, [2]]
    (letter,) = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert letter.error.startswith(
        f"DeserializationFailed: {letter.topic}[{letter.partition}]@1: the value is not JSON"
    )
