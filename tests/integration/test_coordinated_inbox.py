"""Claims and the inbox together, on real servers: each effect once, whoever comes back from the dead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
import pytest

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Claimed, Event, EventHandler, Lost, Released
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import InboxError, InboxFenced
from harvester.idempotence import Inbox
from tests.support.coordinated import fill, settings
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
