"""How the supervisor serves the pipes of its shards; the machine behind it has tests of its own."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from harvester.events import Event, LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay.core.frames import Settled, Trouble, encode
from harvester.relay.core.leadership import HandOver
from harvester.relay.ipc import Channel
from harvester.relay.shard_pool import RestartBudget, ShardProcess
from harvester.relay.supervisor import Supervisor
from tests.support.relay_driver import SETTINGS

FULL = 1 << 20
LEADER = UUID("bb6064d8-d733-4ab1-92a0-15374598ff2a")


class Silent:
    """Whatever is asked of it, it does nothing."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    silent: Any = Silent()
    shared: Any = SimpleNamespace(shared=[0] * 3, close=lambda: None)
    specs: Any = [None] * SETTINGS.shards
    made = Supervisor(
        SETTINGS, specs, shared, silent, host=silent, recorder=silent, announcer=silent,
        log_of=lambda _: logging.getLogger("test"), budget=RestartBudget(5, 60.0), hand_over=HandOver(6.0, 300.0),
    )  # fmt: skip
    yield made
    made._waker.close()
    made._poller.close()


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (LeaderAcquired(LEADER, 7), "leads under term 7 as bb6064d8"),
        (LeaderRefreshed(LEADER, 7, "shard 3 died"), "shard 3 died: marks again as bb6064d8"),
        (LeaderFenced("no heartbeat came back for 5.0 s"), "no heartbeat came back for 5.0 s: fenced"),
    ],
)
def test_the_cause_of_an_event_comes_first(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, event: Event, shown: str
) -> None:
    """A terminal of 80 columns cuts off what is at the end; ids are short there, and whole in the log."""
    notes: list[str] = []
    recorder: Any = SimpleNamespace(note=notes.append)
    monkeypatch.setattr(supervisor, "_recorder", recorder)
    supervisor._announce(event)
    assert notes == [shown]


def test_a_leader_that_cannot_lead_says_why_it_steps_down(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[tuple[str, float]] = []
    group: Any = SimpleNamespace(step_down=lambda reason, wait_s: reasons.append((reason, wait_s)))
    marker: Any = SimpleNamespace(
        is_working=lambda _: True, unreachable_s=lambda _: 7.0, hindrance="the term could not be taken"
    )
    monkeypatch.setattr(supervisor, "_group", group)
    monkeypatch.setattr(supervisor, "pool", Silent())
    monkeypatch.setattr(supervisor.pool, "slots", [], raising=False)
    monkeypatch.setattr(supervisor, "marker", marker, raising=False)
    supervisor.machine.acquire(0.0)
    monkeypatch.setattr(supervisor, "_perform", lambda _: None)
    monkeypatch.setattr("harvester.relay.supervisor.turn", lambda *_, **__: None)
    supervisor._tick(0.0)
    assert reasons == [("the term could not be taken for 7 s", 6.0)]


def test_a_shard_is_heard_while_something_waits_for_room_in_its_pipe(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P16: it may be waiting for room in its own pipe before it reads ours, and so for ever."""
    heard: list[int] = []
    monkeypatch.setattr(supervisor, "_on_frame", lambda index, frame, now: heard.append(index))
    (theirs, ours), (answers, says) = os.pipe(), os.pipe()
    sentinel, never = os.pipe()
    process: Any = SimpleNamespace(pid=1, sentinel=sentinel, kill=lambda: None)
    channel = Channel(answers, ours)
    supervisor.pool.slots[0].process = ShardProcess(process, channel)
    for fd in (answers, sentinel):
        supervisor._poller.register(fd, select.EPOLLIN)
        supervisor.pool._by_fd[fd] = 0
    while not channel.outbound:
        supervisor.pool.send(0, Trouble("x" * FULL))
    assert supervisor.pool.slots[0].watched_for_room
    os.write(says, encode(Settled([1])))
    for fd, _ in supervisor._poller.poll(1.0):
        supervisor._serve(fd, time.monotonic())
    assert heard == [0]
    for fd in (theirs, ours, answers, says, sentinel, never):
        os.close(fd)
