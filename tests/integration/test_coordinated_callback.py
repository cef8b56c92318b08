"""A handler that is given the records of a coordinated consumer, on a real broker; and what is counted meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Claimed, Event, Released
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import INTERVAL_S, Join, fill, held, join, settings
from tests.support.wait import eventually

__all__ = ["join", "settings"]


class HandlerError(Exception):
    """Of the application."""


def test_a_record_is_committed_when_its_handler_returns_and_not_when_it_raises(
    settings: ConsumerSettings, join: Join
) -> None:
    fill(settings, 200)
    seen: list[int] = []
    events: list[Event] = []

    def handle(record: Any) -> None:
        if len(seen) == 50:
            raise HandlerError
        seen.append(int(record.value()))

    consumer = CoordinatedConsumer(settings, on_event=events.append)
    with pytest.raises(HandlerError):
        consumer.run(handle)
    assert consumer.poll(0) is None
    claimed = {event.generation for event in events if isinstance(event, Claimed)}
    assert claimed == {event.generation for event in events if isinstance(event, Released)}
    two = join()
    eventually(lambda: held(two) == [4], what="a hand-over")
    eventually(lambda: len(two.seen) == 150, what="the rest")
    assert sorted(seen + two.seen) == list(range(200))


def test_a_handler_at_most_once_is_never_given_again_what_it_failed_on(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 200)
    seen: list[int] = []

    def handle(record: Any) -> None:
        seen.append(int(record.value()))
        if len(seen) == 50:
            raise HandlerError

    with pytest.raises(HandlerError):
        CoordinatedConsumer(replace(settings, at_most_once=True)).run(handle)
    two = join(at_most_once=True)
    eventually(lambda: held(two) == [4], what="a hand-over")
    fill(settings, 40, first=200)
    eventually(lambda: set(range(200, 240)) <= set(two.seen), what="what is new")
    assert len(set(seen + two.seen)) == len(seen + two.seen)


def test_a_stop_ends_the_run_after_the_record_in_hand(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 200)
    consumer = CoordinatedConsumer(settings)
    seen: list[int] = []

    def handle(record: Any) -> None:
        seen.append(int(record.value()))
        if len(seen) == 50:
            stopper = threading.Thread(target=consumer.stop)
            stopper.start()
            stopper.join()

    consumer.run(handle)
    assert len(seen) == 50
    assert consumer.statistics().records == 50
    two = join()
    eventually(lambda: len(two.seen) == 150, what="the rest")
    assert sorted(seen + two.seen) == list(range(200))


def test_what_is_counted(settings: ConsumerSettings, join: Join) -> None:
    fill(settings, 400)
    one = join(at_most_once=True, heartbeat_interval_s=2 * INTERVAL_S)  # a busy machine takes none of the claims away
    eventually(lambda: len(one.seen) == 400, what="all records")
    first = one.consumer.statistics()
    assert first.records == 400
    assert first.claims_won == 4
    assert first.written["ClaimingPartition"] == 4 + first.claims_missed
    assert 400 / settings.batch_records <= first.batches <= first.written["ClaimingMessages"]
    eventually(
        lambda: one.consumer.statistics().written["Heartbeat"] >= first.written["Heartbeat"] + 2 * 4,
        what="two heartbeats an interval for each partition",
    )
    one.stop(release=True)
    last = one.consumer.statistics()
    assert (last.releases, last.losses, last.written["ReleasingPartition"]) == (4, 0, 4)
    assert last.written_bytes > 100 * sum(last.written.values())


def test_a_process_that_is_taken_for_dead_counts_losses(settings: ConsumerSettings, join: Join) -> None:
    one = join(client_id="same")
    eventually(lambda: held(one) == [4], what="all claims")
    session = one.consumer._session
    with session.lock:  # it cannot run, as if frozen
        two = join(client_id="other")
        eventually(lambda: held(two) == [4], what="a take-over")
    eventually(lambda: one.consumer.statistics().losses == 4, what="the losses")
    assert held(one, two)[0] <= 2
