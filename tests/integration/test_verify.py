"""Verification on real servers: forged histories are found out, honest ones pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from harvester.errors import BrokerError, BrokerUnavailable
from harvester.verify.check import VerifyReport, verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from harvester.verify.reader import Isolation, read
from tests.support.forging import TABLE, Row, fill, produce_in, publish, take, transactional
from tests.support.inbox import stamped

pytestmark = pytest.mark.servers


def judged(
    servers: Any, database: str, isolation: Isolation = "read_committed", timeout_s: float = 20.0
) -> VerifyReport:
    options = {"bootstrap.servers": servers.bootstrap}
    return verify(database, TABLE, options, isolation=isolation, timeout_s=timeout_s)


def counts(report: VerifyReport) -> dict[str, object]:
    names = ("delivered", "lost", "duplicates", "order_violations", "quarantined", "unexpected", "pending", "scattered")
    return {name: value for name, value in report.details().items() if name in names and value}


def of_one_key(rows: list[Row]) -> list[int]:
    """Indexes of the rows of the first row's key."""
    return [index for index, row in enumerate(rows) if row.key == rows[0].key]


def test_an_honest_relay_passes(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)
    publish(servers.bootstrap, take(database))

    report = judged(servers, database)

    assert counts(report) == {"delivered": 40}
    assert report.verdict.holds
    assert report.verdict.final
    assert report.timing.p50_ms is not None
    assert report.timing.p99_ms is not None
    assert report.timing.p99_ms >= report.timing.p50_ms > 0
    assert report.topics == (topic,)
    assert report.examples == ()


def test_a_lost_record_is_named(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)
    rows = take(database)
    lost = rows.pop(of_one_key(rows)[1])
    publish(servers.bootstrap, rows)

    report = judged(servers, database)

    assert counts(report) == {"delivered": 39, "lost": 1}
    assert report.examples == (f"{lost.key.decode()} #2: lost",)


def test_swapped_and_repeated_records_are_named_with_their_positions(servers: Any, database: str, topic: str) -> None:
    fill(database, topic, keys=1)
    rows = take(database)
    rows[3], rows[4] = rows[4], rows[3]
    rows += [rows[-1], rows[0]]
    publish(servers.bootstrap, rows)

    report = judged(servers, database)

    assert counts(report) == {"delivered": 40, "duplicates": 2, "order_violations": 2}
    assert [example.split(" at ")[0] for example in report.examples] == [
        "k-000000 #4: delivered after a successor (#5)",
        "k-000000 #1: repeated after a successor (#40)",
        "k-000000 #40: repeated",
    ]
    assert report.examples[0].endswith("@4")
    assert report.examples[1].endswith("@41")
    assert topic in report.examples[1]


def test_what_waits_in_the_outbox_is_pending(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)

    report = judged(servers, database)

    assert counts(report) == {"pending": 40}
    assert report.verdict.holds
    assert not report.verdict.final


def test_a_quarantined_record_is_not_lost(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)
    rows = take(database)
    poison = rows.pop(of_one_key(rows)[1])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox_quarantine (id, incarnation, kafka_topic, kafka_key, kafka_value, error, attempts)"
            " VALUES (%s, gen_random_uuid(), %s, %s, %s, 'too large', 1)",
            (poison.id, poison.topic, poison.key.decode(), poison.value.decode()),
        )
    publish(servers.bootstrap, rows)

    assert counts(judged(servers, database)) == {"delivered": 39, "quarantined": 1}


def test_records_that_were_never_committed_are_unexpected(servers: Any, database: str, topic: str) -> None:
    fill(database, topic, keys=1)
    rows = take(database)
    rolled_back = dataclasses.replace(rows[5], value=rows[5].value.replace(b":c:", b":r:"))
    too_high = dataclasses.replace(rows[5], value=b"41" + rows[5].value[1:])
    stranger = dataclasses.replace(rows[5], value=b"hello")
    publish(servers.bootstrap, [*rows, rolled_back, too_high, stranger])

    report = judged(servers, database)

    assert counts(report) == {"delivered": 40, "unexpected": 3}
    assert not report.verdict.holds
    assert [example.split(" at ")[0].split("@")[-1] for example in report.examples] == [
        "k-000000 #41: never committed",
        "40: rolled back by the pump",
        "42: not from the pump",
    ]


def test_a_key_in_two_partitions_is_found(servers: Any, database: str, topic: str) -> None:
    fill(database, topic, keys=1)
    rows = take(database)
    publish(servers.bootstrap, [dataclasses.replace(row, partition=index // 20) for index, row in enumerate(rows)])

    report = judged(servers, database)

    assert report.verdict.scattered == 1
    assert not report.verdict.holds


def test_markers_and_aborted_records_leave_holes_that_harm_nothing(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)
    rows = take(database)
    producer = transactional(servers.bootstrap, topic)
    producer.begin_transaction()
    produce_in(producer, rows[:20])
    producer.commit_transaction(30)
    producer.begin_transaction()
    produce_in(producer, rows[20:30])
    producer.abort_transaction(30)
    producer.begin_transaction()
    produce_in(producer, rows[20:])
    producer.commit_transaction(30)
    # The log now ends with a marker in every partition that was touched; some end with aborted records and one.
    producer.begin_transaction()
    produce_in(producer, rows[:4])
    producer.abort_transaction(30)

    committed, everything = judged(servers, database), judged(servers, database, "read_uncommitted")

    assert counts(committed) == {"delivered": 40}
    assert everything.verdict.delivered == 40
    assert everything.verdict.duplicates == 14


def test_an_open_transaction_is_told_apart_from_silence(servers: Any, database: str, topic: str) -> None:
    fill(database, topic)
    rows = take(database)
    producer = transactional(servers.bootstrap, topic)
    producer.begin_transaction()
    produce_in(producer, rows)
    try:
        with pytest.raises(BrokerError, match="an open transaction hides what follows") as caught:
            judged(servers, database, timeout_s=3.0)
        assert "read_uncommitted" in (caught.value.hint or "")
        assert counts(judged(servers, database, "read_uncommitted")) == {"delivered": 40}
    finally:
        producer.commit_transaction(30)
    assert counts(judged(servers, database)) == {"delivered": 40}


def test_a_topic_that_does_not_exist_has_delivered_nothing(servers: Any, database: str, topic: str) -> None:
    fill(database, f"{topic}.absent")
    take(database)

    assert counts(judged(servers, database)) == {"lost": 40}


def test_kafka_that_cannot_be_reached_is_told(database: str, topic: str) -> None:
    fill(database, topic)

    with pytest.raises(BrokerUnavailable, match="did not return the ends of its topics") as caught:
        verify(database, TABLE, {"bootstrap.servers": "127.0.0.1:1"}, timeout_s=0.5)

    assert "bootstrap.servers" in (caught.value.hint or "")


def test_what_is_committed_and_delivered_while_verify_runs_is_no_surprise(
    servers: Any, database: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the truth and the ends of the topics, others go on committing and delivering."""
    fill(database, topic)
    publish(servers.bootstrap, take(database))

    def late_read(*args: Any, **options: Any) -> Any:
        pump(database, TABLE, Load(records=20, topics=(topic,), keys=4, value_bytes=60), append=True)
        publish(servers.bootstrap, take(database))
        return read(*args, **options)

    monkeypatch.setattr("harvester.verify.check.read", late_read)

    assert counts(judged(servers, database)) == {"delivered": 40}


def test_headers_tell_what_is_missing_without_the_database(servers: Any, database: str, topic: str) -> None:
    fill(database, topic, records=20)
    producer = Producer({"bootstrap.servers": servers.bootstrap, "linger.ms": 5})
    for number, row in enumerate(take(database), 1):
        headers: list[tuple[str, str | bytes | None]] = [("harvester", stamped(row.id, sequence=number))]
        for _ in range({5: 0, 9: 2}.get(number, 1)):
            producer.produce(row.topic, row.value, row.key, headers=headers)
    assert producer.flush(30) == 0

    report = judged(servers, database)

    assert counts(report) == {"delivered": 19, "lost": 1, "duplicates": 1}
    assert (report.sequenced.records, report.sequenced.repeats, report.sequenced.open) == (20, 1, 1)
    assert "number 5 under way or lost" in report.sequenced.examples[0]
    options = {"bootstrap.servers": servers.bootstrap}
    assert verify(database, TABLE, options, header="").sequenced.records == 0
