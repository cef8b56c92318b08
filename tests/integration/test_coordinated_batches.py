"""Records that a coordinated consumer hands out by the list, on a real broker; and with the inbox."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka import Producer

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.events import Claimed, Event, GivenUp, Lost, Released
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import ConfigurationError, InboxError
from harvester.idempotence import Inbox
from harvester.origin import HEADER
from tests.support.coordinated import fill, settings
from tests.support.handled import Handled, Poison, Start, fill_keys, start
from tests.support.inbox import stamped
from tests.support.wait import eventually

__all__ = ["settings", "start"]

RUN = CoordinatedConsumer.run_batches
QUICK: dict[str, Any] = {"backoff_s": 0.01, "longest_backoff_s": 0.05}


def consumed(consumer: CoordinatedConsumer, wanted: int, most: int) -> list[list[Any]]:
    batches: list[list[Any]] = []

    def all_came() -> bool:
        batches.append(consumer.consume(most, 0.1))
        return sum(map(len, batches)) == wanted

    eventually(all_came, what="all records")
    return batches


@pytest.mark.parametrize(("at_most_once", "most"), [(False, 150), (False, 1500), (True, 150)])
def test_lists_of_records_are_consumed_and_committed(settings: ConsumerSettings, at_most_once: bool, most: int) -> None:
    fill(settings, 2000)
    # Nothing is committed for a while: a claim that is lost to a busy machine would bring all of its records again.
    changed = replace(settings, at_most_once=at_most_once, client_id="same", heartbeat_interval_s=5.0)
    with CoordinatedConsumer(changed) as consumer:
        batches = consumed(consumer, 2000, most)
        assert max(map(len, batches)) <= most
        assert at_most_once or max(map(len, batches)) >= 75
        assert sorted(int(record.value()) for batch in batches for record in batch) == list(range(2000))
        assert most == 150 or any(len({record.partition() for record in batch}) > 1 for batch in batches)
        assert consumer.consume(150, 0.05) == []
        with pytest.raises(ValueError, match="at least one record"):
            consumer.consume(0, 0.05)
        for batch in batches:
            consumer.commit(batch)
        assert consumer.open_records() == {}
    fill(settings, 5, first=2000)
    with CoordinatedConsumer(changed) as consumer:
        (*_, last) = [batch for batch in consumed(consumer, 5, 10) if batch]
        assert all(int(record.value()) >= 2000 for record in last)


def test_what_is_not_committed_of_a_batch_comes_again(settings: ConsumerSettings) -> None:
    fill(settings, 400)
    with CoordinatedConsumer(settings) as consumer:
        batches = consumed(consumer, 400, 100)
        left = {
            record.partition(): record.offset() for record in reversed([each for batch in batches for each in batch])
        }
        for batch in batches:
            consumer.commit([record for record in batch if record.offset() != left[record.partition()] + 10])
    with CoordinatedConsumer(settings) as consumer:
        again = [each for batch in consumed(consumer, 400 - 4 * 10, 1000) for each in batch]
    assert {record.partition(): record.offset() for record in reversed(again)} == {
        partition: first + 10 for partition, first in left.items()
    }


def test_a_poison_record_costs_the_others_of_its_batch_nothing(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, 20, 10)
    sizes: list[int] = []
    handled = Handled(lambda value: value == "3-4")

    def handle(records: list[Any]) -> None:
        sizes.append(len(records))
        for record in records:
            if handled.fails(record.value().decode()):
                raise Poison
        for record in records:
            handled(record)

    runner = start(handle, run=RUN, on_error="dead-letter", attempts=2, **QUICK)
    eventually(lambda: len(handled.values) == 199 and bool(runner.told(GivenUp)), what="all others")
    assert max(sizes) > 20
    assert len(set(handled.values)) == 199
    (letter,) = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert (letter.value, letter.attempts) == (b"3-4", 2)
    assert [handled.of_key(key) for key in range(20) if key != 3] == [
        [f"{key}-{number}" for number in range(10)] for key in range(20) if key != 3
    ]


def test_a_batch_that_fails_ends_a_consumer_that_is_to_stop(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, 20, 10)

    def fail(_: list[Any]) -> None:
        raise Poison

    assert isinstance(start(fail, run=RUN).wait(), Poison)
    handled = Handled()
    start(handled)
    eventually(lambda: len(handled.values) == 200, what="all records")


def test_at_most_once_no_record_of_a_batch_is_tried_again(settings: ConsumerSettings, start: Start) -> None:
    fill_keys(settings, 20, 10)
    tried: list[str] = []

    def handle(records: list[Any]) -> None:
        tried.extend(record.value().decode() for record in records)
        if any(record.value() == b"3-4" for record in records):
            raise Poison

    runner = start(handle, run=RUN, on_error="skip", at_most_once=True)
    eventually(lambda: len(tried) == 200, what="all records")
    assert len(set(tried)) == 200
    assert b"3-4" in [event.record.value() for event in runner.told(GivenUp)]


def test_batches_are_not_handled_by_several_workers(settings: ConsumerSettings, start: Start) -> None:
    error = start(Handled(), run=RUN, workers=2).wait()
    assert isinstance(error, ConfigurationError)
    assert [problem.path for problem in error.problems] == ["workers"]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_arrow_batches_are_consumed_and_committed_whole_and_in_parts(
    settings: ConsumerSettings, at_most_once: bool
) -> None:
    fill(settings, 400)
    changed = replace(settings, at_most_once=at_most_once)
    batches: list[Any] = []
    with CoordinatedConsumer(changed) as consumer:

        def all_came() -> bool:
            batches.append(consumer.consume_arrow(100, 0.1))
            return sum(int(batch.num_rows) for batch in batches) == 400

        eventually(all_came, what="all records")
        every = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(int(row["value"]) for row in every) == list(range(400))
        left = {(row["partition"], row["offset"]) for row in every if int(row["value"]) % 40 == 7}
        for batch in batches:
            kept = [(row["partition"], row["offset"]) not in left for row in batch.to_pylist()]
            consumer.commit(batch.filter(pa.array(kept, pa.bool_())))
        assert bool(consumer.open_records()) is not at_most_once
    first_left = {partition: min(offset for each, offset in left if each == partition) for partition, _ in left}
    behind = [row for row in every if row["offset"] >= first_left.get(row["partition"], 400)]
    with CoordinatedConsumer(changed) as consumer:
        again = consumed(consumer, 0 if at_most_once else len(behind), 1000)
        assert consumer.consume(1, 1.0) == []
    if not at_most_once:
        assert {each.value() for batch in again for each in batch} == {row["value"] for row in behind}


class Ledger:
    """An inbox, with an effect for each record but for one."""

    def __init__(
        self, connection: psycopg.Connection[Any], group: str, poison: str | None, header: str = HEADER
    ) -> None:
        self.connection, self.poison = connection, poison
        self.inbox = Inbox(connection, group, header=header)
        self.inbox.create_table()
        connection.execute("CREATE TABLE IF NOT EXISTS ledger (entry text)")

    def told(self, event: Event) -> None:
        match event:
            case Claimed(topic, partition, generation):
                self.inbox.open(topic, partition, generation)
            case Released(topic, partition) | Lost(topic, partition):
                self.inbox.close(topic, partition)
            case GivenUp(record):
                with self.inbox.record(record):
                    pass

    def handle(self, records: list[Any]) -> None:
        with self.inbox.batch(records) as batch:
            new: Any = batch.new
            for record in new:
                value = record.value().decode()
                if value == self.poison:
                    raise Poison
                batch.cursor.execute("INSERT INTO ledger (entry) VALUES (%s)", (value,))

    def entries(self) -> list[str]:
        return [entry for (entry,) in self.connection.execute("SELECT entry FROM ledger").fetchall()]


def run(settings: ConsumerSettings, ledger: Ledger, until: Any) -> BaseException | None:
    """In this thread, which has the connection."""
    with CoordinatedConsumer(settings, on_event=ledger.told) as consumer:

        def handle(records: list[Any]) -> None:
            ledger.handle(records)
            if until():
                consumer.stop()

        try:
            consumer.run_batches(handle, 50)
        except InboxError as error:
            return error
    return None


def test_with_an_inbox_a_record_that_is_given_up_has_no_effect_and_all_others_one(
    settings: ConsumerSettings, empty_database: str
) -> None:
    fill_keys(settings, 20, 10)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        ledger = Ledger(connection, settings.group, "3-4")
        changed = replace(settings, on_error="dead-letter", attempts=2, order="partition", **QUICK)
        assert run(changed, ledger, lambda: len(ledger.entries()) == 199) is None
        assert sorted(ledger.entries()) == sorted(f"{k}-{n}" for k in range(20) for n in range(10) if (k, n) != (3, 4))
    assert [each.value for each in DeadLetterTopic(settings.dead_letters, settings.kafka).read()] == [b"3-4"]


@pytest.mark.parametrize("header", [HEADER, "x-outbox"])
def test_a_record_that_is_redriven_is_new_to_the_inbox(
    settings: ConsumerSettings, empty_database: str, header: str
) -> None:
    topic = DeadLetterTopic(settings.dead_letters, settings.kafka)
    changed = replace(settings, on_error="dead-letter", attempts=1, order="partition")
    producer, ids = Producer(dict(settings.kafka)), itertools.count(1)

    def produce(*values: str) -> None:
        for value in values:
            headers: Any = [(header, stamped(next(ids)))]
            producer.produce(settings.topics[0], value=value.encode(), partition=0, headers=headers)
        producer.flush(30)

    produce("before", "poison", "after")
    with psycopg.connect(empty_database, autocommit=True) as connection:
        ledger = Ledger(connection, settings.group, "poison", header)
        assert run(changed, ledger, lambda: len(ledger.entries()) == 2) is None
        assert len(topic.redrive(topic.read())) == 1
        produce("end")
        ledger.poison = None
        assert run(changed, ledger, lambda: "end" in ledger.entries()) is None
        assert ledger.entries() == ["before", "after", "poison", "end"]


def test_an_inbox_that_is_given_records_out_of_order_ends_the_consumer_and_gives_nothing_up(
    settings: ConsumerSettings, empty_database: str
) -> None:
    fill_keys(settings, 20, 10, partition=1)
    with psycopg.connect(empty_database, autocommit=True) as connection:
        ledger = Ledger(connection, settings.group, "3-4")
        error = run(replace(settings, on_error="dead-letter", backoff_s=60.0), ledger, lambda: False)
        assert isinstance(error, InboxError)
        assert "try again" in str(error.hint)
        assert len(ledger.entries()) == 4 * 20 + 3
    assert DeadLetterTopic(settings.dead_letters, settings.kafka).read() == []
