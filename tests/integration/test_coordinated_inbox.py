"""Claims and the inbox together, on real servers: each effect once, whoever comes back from the dead."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.dead_letters import DeadLetterTopic
from harvester.coordination.events import Claimed, Event, EventHandler, GivenUp, Lost, Released
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import InboxError, InboxFenced
from harvester.idempotence import Inbox
from tests.support.coordinated import fill, settings
from tests.support.handled import fill_keys
from tests.support.inbox import Pool
from tests.support.wait import eventually

__all__ = ["settings"]


def following(inbox: Inbox) -> EventHandler:
    def follow(event: Event) -> None:
        match event:
            case Claimed(topic, partition, generation):
                inbox.open(topic, partition, generation)
            case Released(topic, partition) | Lost(topic, partition):
                inbox.close(topic, partition)

    return follow


def is_open(inbox: Inbox, topic: str, partition: int) -> bool:
    try:
        inbox.seen(topic, partition)
    except InboxError:
        return False
    return True


def held_all(consumer: CoordinatedConsumer, inbox: Inbox) -> Any:
    """A record, once all four partitions are held and open in the inbox; nothing is committed."""
    records: list[Any] = []

    def polled() -> bool:
        record = consumer.poll(0.01)
        if record is not None:
            records.append(record)
        claims = consumer.claims()
        return bool(records) and len(claims) == 4 and all(is_open(inbox, *place) for place in claims)

    eventually(polled, what="all claims, and a record")
    return records[0]


def test_a_new_coordination_topic_does_not_fence_those_who_use_it(
    settings: ConsumerSettings, empty_database: str
) -> None:
    fill(settings, 40)
    with (
        psycopg.connect(empty_database, autocommit=True) as one,
        psycopg.connect(empty_database, autocommit=True) as two,
    ):
        old, new = Inbox(one, settings.group), Inbox(two, settings.group)
        old.create_table()
        for _ in range(3):  # offsets of claims rise
            with CoordinatedConsumer(settings, on_event=following(old)) as first:
                in_hand = held_all(first, old)
                before = first.claims()
        anew = replace(settings, coordination_topic=f"{settings.coordination_topic}-new")
        with CoordinatedConsumer(anew, on_event=following(new)) as second:
            held_all(second, new)
            assert all(token > before[place] for place, token in second.claims().items())
        place = in_hand.topic(), in_hand.partition()
        with pytest.raises(InboxFenced):
            old.open(*place, generation=before[place])


def test_the_generation_of_a_claim_fences_whoever_held_it_before(
    settings: ConsumerSettings, empty_database: str
) -> None:
    # A claim that is lost to a busy machine would bring records again.
    settings = replace(settings, heartbeat_interval_s=4.0)
    fill(settings, 40)
    seen: list[int] = []
    with (
        psycopg.connect(empty_database, autocommit=True) as one,
        psycopg.connect(empty_database, autocommit=True) as two,
    ):
        old, new = Inbox(one, settings.group), Inbox(two, settings.group)
        old.create_table()
        first = CoordinatedConsumer(settings, on_event=following(old))
        in_hand = eventually(lambda: first.poll(0.1), what="a record")
        with (
            first._session.lock,  # it cannot run, as if frozen
            CoordinatedConsumer(settings, on_event=following(new)) as second,
        ):

            def all_seen() -> bool:
                record = second.poll(0.05)
                if record is not None:
                    with new.record(record) as effect:
                        assert effect.is_new
                    second.commit(record)
                    seen.append(int(record.value()))
                return len(seen) == 40

            eventually(all_seen, what="all records")
        with pytest.raises(InboxFenced), old.record(in_hand):
            pass
        first.close(release=False)
    assert sorted(seen) == list(range(40))


def test_an_outage_of_the_database_gives_up_no_record(settings: ConsumerSettings, empty_database: str) -> None:
    """Neither while records are handled, nor while the application takes note of one that is given up."""
    name = conninfo_to_dict(empty_database)["dbname"]

    def let_in(allowed: bool) -> None:
        with psycopg.connect(empty_database, dbname="postgres", autocommit=True) as db:
            db.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}")
            db.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", (name,))

    fill_keys(settings, 1, 10, partition=0)
    settings = replace(settings, on_error="dead-letter", attempts=2, order="partition", backoff_s=0.01)
    pool = Pool(empty_database)
    inbox = Inbox(pool, settings.group)
    inbox.create_table()
    keep, tries, notes = following(inbox), Counter[int](), list[int]()

    def told(event: Event) -> None:
        keep(event)
        if isinstance(event, GivenUp):
            if not notes:
                let_in(False)
            notes.append(event.record.offset())
            if len(notes) == 4:
                let_in(True)
            with inbox.record(event.record):
                pass

    def handle(record: Any) -> None:
        offset = record.offset()
        tries[offset] += 1
        if offset == 3 and tries[offset] == 1:
            let_in(False)
        if offset == 3 and tries[offset] == 5:
            let_in(True)
        with inbox.record(record) as effect:
            assert effect.is_new
            if offset == 6:
                raise ValueError("a record that cannot be taken")
        if offset == 9:
            consumer.stop()

    consumer = CoordinatedConsumer(settings, on_event=told)
    try:
        consumer.run(handle)
    finally:
        let_in(True)
        pool.session.close()
    assert tries == {0: 1, 1: 1, 2: 1, 3: 5, 4: 1, 5: 1, 6: 2, 7: 1, 8: 1, 9: 1}
    assert notes == [6] * 4
    (letter,) = DeadLetterTopic(settings.dead_letters, settings.kafka).read()
    assert letter.offset == 6


def test_without_a_pool_an_outage_ends_the_consumer(settings: ConsumerSettings, empty_database: str) -> None:
    fill_keys(settings, 1, 10, partition=0)
    with psycopg.connect(empty_database, autocommit=True) as db:
        inbox = Inbox(db, settings.group)
        inbox.create_table()

        def handle(record: Any) -> None:
            if record.offset() == 3:
                with psycopg.connect(empty_database, autocommit=True) as other:
                    other.execute("SELECT pg_terminate_backend(%s, 10000)", (db.info.backend_pid,))
            with inbox.record(record):
                pass

        changed = replace(settings, on_error="dead-letter", attempts=2, order="partition", backoff_s=0.01)
        consumer = CoordinatedConsumer(changed, on_event=following(inbox))
        with pytest.raises(InboxError, match="the inbox's connection is lost"):
            consumer.run(handle)
        assert consumer.statistics().given_up == 0
