"""Real processes in the place of shards: replaced only when they are dead for certain (P15), sharing no lock (P16)."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.relay import shard_pool
from harvester.relay.forkserver import Forkserver
from harvester.relay.ipc import in_flight, set_in_flight
from harvester.relay.shard import ShardSpec
from harvester.relay.shard_pool import RestartBudget, ShardPool, ShardProcess
from tests.support.forked import asks, deaf
from tests.support.harvesting import alive
from tests.support.wait import eventually
from tests.support.warm import warm_forkservers

LATER = float("inf")
SPEC = cast(ShardSpec, SimpleNamespace(index=0))


@pytest.fixture(autouse=True, scope="module")
def _warm() -> Iterator[None]:
    """Servers are forks, which start sooner; none of these tests is about their start."""
    with warm_forkservers():
        yield


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardPool]:
    """One place, taken by a shard that is deaf."""
    monkeypatch.setattr(shard_pool, "main", deaf)
    poller = select.epoll()
    made = ShardPool([SPEC], Forkserver(), poller)
    process = started(made)
    read_fd = process.channel.read_fd
    eventually(lambda: read_fd in [fd for fd, _ in poller.poll(1.0)], what="the end of its pipe")
    try:
        yield made
    finally:
        process.process.kill()
        made.kill_all()
        poller.close()


def started(pool: ShardPool) -> ShardProcess:
    """The process in its one place, when the server can start it."""

    def found() -> ShardProcess | None:
        pool.start_due(LATER)
        return pool.slots[0].process

    process = eventually(found, 60.0, "the shard")
    assert process is not None
    return process


def exists(pid: int) -> bool:
    """Whether the process lives, or is dead and has not been waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_shard_that_closed_its_pipe_is_not_taken_for_dead(pool: ShardPool) -> None:
    process = pool.slots[0].process
    assert process is not None
    assert pool.receive(0) == []
    assert not pool.has_ended(0, process.channel.read_fd)
    pool.start_due(LATER)
    assert pool.slots[0].process is process
    assert pool.alive == [0]


def test_a_shard_that_is_being_killed_keeps_its_place_until_it_was_waited_for(pool: ShardPool) -> None:
    slot = pool.slots[0]
    first = slot.process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)  # SIGKILL is all that ends it
    pool.kill(0, asked=False)
    slot.start_at = 0.0
    pool.start_due(LATER)
    assert slot.process is first
    assert pool.bury(0) == -signal.SIGKILL
    assert not exists(first.pid)
    assert started(pool).pid != first.pid


def test_a_shard_that_lives_is_killed_when_it_is_buried(pool: ShardPool) -> None:
    process = pool.slots[0].process
    assert process is not None
    assert pool.bury(0) == -signal.SIGKILL
    assert not exists(process.pid)


def test_who_is_killed_while_it_reads_what_is_shared_hangs_nobody() -> None:
    forkserver = Forkserver()
    shared = forkserver.shared
    try:
        eventually(forkserver.is_up, 60.0, "the server")
        readers = [forkserver.start(asks, 0.02 * n, f"reader-{n}") for n in range(1, 7)]
        pids = [process.pid for process in readers if process is not None]
        eventually(lambda: not any(map(alive, pids)), 60.0, "the ends of all")
        assert {process.reap() for process in readers if process is not None} == {-signal.SIGVTALRM}
        assert len(pids) == 6
    finally:
        forkserver.close()
    owner = threading.Thread(target=set_in_flight, args=(shared, 5, 10), daemon=True)
    owner.start()
    owner.join(10)
    assert not owner.is_alive()
    assert in_flight(shared) == (5, 10)


# -- the budget


def test_a_budget_is_spent_within_its_window() -> None:
    budget = RestartBudget(2, 60)
    assert [budget.spend(0), budget.spend(10), budget.spend(20)] == [True, True, False]


def test_old_deaths_are_forgotten() -> None:
    budget = RestartBudget(2, 60)
    assert all(budget.spend(now) for now in (0, 10, 60, 70, 120))
    assert not budget.spend(120.5)


def test_no_budget_allows_no_death() -> None:
    assert not RestartBudget(0, 60).spend(0)


@given(st.integers(0, 5), st.lists(st.floats(0, 30), max_size=30))
def test_a_budget_says_no_exactly_when_the_window_holds_too_many(budget: int, waits: list[float]) -> None:
    tested, now, deaths = RestartBudget(budget, 60), 0.0, []
    for wait in waits:
        now += wait
        deaths.append(now)
        assert tested.spend(now) == (sum(now - death < 60 for death in deaths) <= budget)


def test_pauses_before_replacements_grow_to_a_bound_and_end_with_the_window() -> None:
    budget = RestartBudget(100, 60)
    pauses = []
    for _ in range(10):
        budget.spend(0)
        pauses.append(budget.pause_s())
    assert pauses[:4] == [0.0, 0.1, 0.2, 0.4]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0
    budget.spend(60)
    assert budget.pause_s() == 0.0
