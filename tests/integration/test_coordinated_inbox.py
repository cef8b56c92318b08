"""Claims and the inbox together, on real servers: each effect once, whoever comes back from the dead."""

from __future__ import annotations

import psycopg
import pytest

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.events import Claimed, Event, EventHandler, Lost, Released
from harvester.errors import InboxFenced
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


def test_the_generation_of_a_claim_fences_whoever_held_it_before(
    settings: ConsumerSettings, empty_database: str
) -> None:
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
