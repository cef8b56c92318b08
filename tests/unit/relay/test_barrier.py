"""The barrier's clock: what counts as waiting."""

from __future__ import annotations

from harvester.delivery.decode import Broken
from harvester.relay.core.barrier import Barrier, BarrierEntry


def entry(record_id: int, key: bytes, since: float) -> BarrierEntry:
    return BarrierEntry(record_id, key, Broken(record_id, key, ""), since)


def test_progress_of_a_key_starts_the_waiting_anew() -> None:
    barrier = Barrier()
    for record_id in (1, 2, 3):
        barrier.offer(entry(record_id, b"a", since=0.0))
    barrier.settle((1,), now=50.0)
    longest = barrier.longest_waiting()
    assert longest is not None
    assert (longest.id, longest.since) == (3, 50.0)


def test_the_longest_waiting_is_sought_over_all_keys() -> None:
    barrier = Barrier()
    for record_id, key, since in ((1, b"a", 0), (2, b"b", 0), (3, b"a", 9), (4, b"b", 7)):
        barrier.offer(entry(record_id, key, since))
    longest = barrier.longest_waiting()
    assert longest is not None
    assert longest.id == 4


def test_the_time_behind_a_held_record_does_not_count_when_it_is_sent_again() -> None:
    barrier = Barrier()
    for record_id in (1, 2, 3):
        barrier.offer(entry(record_id, b"a", since=0.0))
    barrier.hold(1)
    assert barrier.longest_waiting() is None
    barrier.release(1, now=50.0)
    longest = barrier.longest_waiting()
    assert longest is not None
    assert (longest.id, longest.since) == (2, 50.0)


def test_nobody_waits_behind_a_parked_record() -> None:
    barrier = Barrier()
    barrier.offer(entry(1, b"a", 0))
    barrier.offer(entry(2, b"a", 0))
    assert barrier.park(1) == [2]
    assert barrier.longest_waiting() is None


def test_a_parked_record_leaves_the_shard() -> None:
    barrier = Barrier()
    barrier.offer(entry(1, b"a", 0))
    barrier.park(1)
    assert (len(barrier.unsettled), barrier.queued, barrier.held) == (0, 0, 0)
    assert barrier.release(1, now=9.0) is None


def test_an_unknown_record_is_not_released() -> None:
    assert Barrier().release(5, now=9.0) is None
