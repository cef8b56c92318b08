"""The elector on both sides of its pipes, with processes and groups that do what a test wants.

What Kafka makes of it is in tests/integration/test_elector.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.clock import clock_s
from harvester.errors import BrokerUnavailable, ShardError
from harvester.neli.election import ElectionTiming
from harvester.neli.group import Identity, Missing
from harvester.neli.member import MemberSettings
from harvester.relay import elector
from harvester.relay.elector import EXIT_STOOD_STILL, Elector, ElectorProcess, ElectorSpec, Promises, ProofVerdict
from harvester.relay.forkserver import Forkserver
from harvester.relay.ipc import WORDS, MessagePipe, MessageReader, be_present, listen, listened_s, owe, turn
from tests.support.forked import dies, falls_silent, leads
from tests.support.harvesting import alive, children
from tests.support.longs import some_of
from tests.support.wait import eventually
from tests.support.warm import warm_forkservers

SETTINGS = MemberSettings(
    topic="leaders",
    group="group",
    consumer_options={},
    producer_options={},
    poll_s=0.1,
    join_wait_s=0.0,
    timing=ElectionTiming(0.1, 1.0, 3.0, 3.0, 3.0),
    revoke_within_s=30.0,
    session_s=60.0,
    foreign_live_s=60.0,
)
IDENTITY = Identity("test", "outbox", "outbox")
LONG_S = 600.0
TELL, KEEP, STEP_DOWN = ProofVerdict.TELL, ProofVerdict.KEEP, ProofVerdict.STEP_DOWN

# -- promises: a session of 6 s, 2.5 s for the wire of shards, and 3 s until it is gone


def promises() -> Promises:
    return Promises(6.0, 2.5, 3.0)


def test_a_proof_is_told_to_a_supervisor_that_turns() -> None:
    made = promises()
    assert made.prove(103.0, 100.0, 100.0) is TELL
    made.leads = True
    assert made.prove(103.3, 100.3, 100.2) is TELL
    assert made.prove(104.0, 101.0, 100.4) is KEEP
    assert made.prove(104.2, 101.2, 101.1) is TELL


def test_trust_that_ended_while_the_supervisor_stood_still_does_not_come_back() -> None:
    made = promises()
    made.prove(103.0, 100.0, 100.0)
    made.leads = True
    assert made.prove(106.0, 103.0, 100.0) is KEEP
    assert made.prove(106.1, 103.1, 103.1) is STEP_DOWN
    made.leads = False  # fenced: proofs that are new, for a term that is
    assert made.prove(106.2, 103.2, 103.2) is TELL


def test_a_supervisor_that_stands_still_is_forsaken_when_what_it_trusted_is_gone() -> None:
    made = promises()
    made.prove(103.5, 100.5, 100.4)
    assert not made.forsake(106.4, 100.4)  # a session later, and a record may be on the wire
    assert not made.is_over(106.4, 100.4)
    assert made.forsake(106.5, 100.4)
    assert not made.forsake(106.6, 100.4), "once"
    assert made.is_over(106.6, 106.6)  # though it goes on now
    assert made.prove(109.6, 106.6, 106.6) is KEEP


def test_a_standby_that_stands_still_is_forsaken_after_a_session() -> None:
    made = promises()
    assert not made.forsake(105.9, 100.0)
    assert made.forsake(106.0, 100.0)


def test_shards_of_a_dead_supervisor_have_their_time_and_no_more_than_their_wire() -> None:
    made = promises()
    made.orphan(100.0)
    made.orphan(101.0)
    assert made.orphaned_at == 100.0
    assert [made.is_over(now, 100.0) for now in (102.4, 102.5)] == [False, True]
    made = promises()
    made.prove(102.9, 99.9, 99.9)
    made.orphan(100.0)
    assert [made.is_over(now, 100.0) for now in (105.8, 106.0)] == [False, True]
    assert not made.forsake(120.0, 100.0)


LATER_S = st.sampled_from([0.0, 0.1, 0.4, 1.0, 2.6, 3.0])
EVENTS = st.lists(
    st.tuples(st.sampled_from(["proof", "leads", "fenced", "forsake"]), LATER_S, st.booleans()), max_size=8
)
MOMENTS = st.lists(LATER_S, min_size=1, max_size=4)


@settings(max_examples=some_of(2_000))
@given(EVENTS, st.booleans(), MOMENTS)
def test_nothing_is_over_before_what_was_told_has_left_the_wire(
    events: list[tuple[str, float, bool]], dies: bool, moments: list[float]
) -> None:
    made, now, turned_at, told = promises(), 100.0, 100.0, 0.0
    for name, later_s, turns in events:
        now += later_s
        turned_at = now if turns else turned_at
        match name:
            case "proof":
                had_ended = made.leads and now >= told
                if made.prove(now + 3.0, now, turned_at) is TELL:
                    assert not had_ended
                    told = now + 3.0
            case "forsake":
                if made.forsake(now, turned_at):
                    assert now >= max(turned_at + 6.0, told + 3.0)
            case _:
                made.leads = name == "leads"
    if dies:
        made.orphan(now)
    for later_s in moments:
        now += later_s
        if made.is_over(now, turned_at):
            assert now >= told + 3.0


# -- in the elector, with a group that only notes what it is told


class NotedGroup:
    """A group that leaves as slowly as its listener lets it."""

    def __init__(self, *_: object) -> None:
        self.calls: list[str] = []
        self.listener: Any = None
        self.owns = False
        self.state: tuple[Missing | None, int] = (Missing("joins"), 0)
        self.left = threading.Event()

    def start(self, _identity: Identity, listener: Any) -> None:
        self.listener = listener

    def elected(self, until_s: float) -> None:
        self.owns, self.state = True, (None, 7)
        self.listener.trust(until_s)
        self.listener.acquired()

    def revoke(self) -> None:
        self.listener.revoking(SETTINGS.revoke_within_s)
        self.owns = False

    def step_down(self, reason: str, _rejoin_after_s: float | None = None) -> None:
        self.calls.append(reason)

    def stop(self) -> None:
        if self.owns:
            self.revoke()
        self.left.set()

    def missing(self) -> Missing | None:
        return self.state[0]

    @property
    def highest_term(self) -> int:
        return self.state[1]

    def cluster(self) -> str | None:
        return "cluster"


class Stage:
    """An elector on a thread of this process. The test is its supervisor, which turns unless it is told not to."""

    def __init__(self, group: NotedGroup, session_s: float, linger_s: float, expiry_s: float) -> None:
        self.group = group
        self.shared: Any = [0] * WORDS
        self.memory = os.memfd_create("test")
        self.still = threading.Event()
        self.code: list[int] = []
        self.told: list[tuple[str, tuple[Any, ...]]] = []
        self.answers = True
        self._inbound, calls = os.pipe()
        self.says, outbound = os.pipe()
        self.supervisor_fd = os.eventfd(0)
        self.dead = False
        self.calls = MessagePipe(calls)
        self._tick()
        spec = ElectorSpec(replace(SETTINGS, session_s=session_s), IDENTITY, linger_s, expiry_s, clock_s())
        self.process = ElectorProcess(spec, outbound, self.shared, self.memory)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._turn, self._listen)]

    def __enter__(self) -> Stage:
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.group.listener is not None, what="the start")
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._threads[0].join(20)
        assert not self._threads[0].is_alive()
        self._over.set()

    def say(self, name: str, *arguments: Any) -> None:
        self.calls.send((name, arguments))

    def die(self) -> None:
        self.dead = True
        os.eventfd_write(self.supervisor_fd, 1)

    def go_on(self) -> None:
        """The end of standing still."""
        self.still.clear()
        eventually(lambda: listened_s(self.shared) > clock_s() - 0.2, what="a turn")

    def wait_told(self, name: str, count: int = 1) -> tuple[Any, ...]:
        """What the count-th message of that name said."""

        def found() -> list[tuple[Any, ...]]:
            return [arguments for kind, arguments in list(self.told) if kind == name]

        eventually(lambda: len(found()) >= count, what=f"{name} number {count}")
        return found()[count - 1]

    def wait_code(self, within_s: float = 10.0) -> int:
        eventually(lambda: self.code, within_s, "its end")
        return self.code[0]

    def _serve(self) -> None:
        self.code.append(self.process.serve(self._inbound, self.supervisor_fd))

    def _tick(self) -> None:
        turn(self.shared, marks=True)
        listen(self.shared)

    def _turn(self) -> None:
        while not self._over.wait(0.05):
            if not self.still.is_set() and not self.dead:
                self._tick()

    def _listen(self) -> None:
        reader = MessageReader(self.says)
        while not self._over.is_set():
            if self.still.is_set() or not select.select([self.says], [], [], 0.02)[0]:
                time.sleep(0.01)
                continue
            for name, arguments in reader.receive():
                self.told.append((name, arguments))
                if name == "revoking" and self.answers:
                    self.say("revoked", arguments[0])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NotedGroup:
    made = NotedGroup()
    monkeypatch.setattr(elector, "KafkaGroup", lambda *_: made)
    return made


@contextmanager
def present(memory: int) -> Iterator[int]:
    """A process that may publish; killed at the end, if not before."""
    ready, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(begin, bytes([be_present(memory)]))
        while True:
            signal.pause()
    try:
        assert os.read(ready, 1) == b"\x01"
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (ready, begin):
            os.close(fd)


def test_a_leader_that_stops_answers_its_revoke_while_the_group_is_left(group: NotedGroup) -> None:
    with Stage(group, 60.0, LONG_S, LONG_S) as stage:
        group.elected(clock_s() + 30)
        assert stage.wait_told("acquired") == (7,)
        stage.say("stop")
        assert stage.wait_code() == 0
        assert group.left.is_set()


def test_who_stands_still_when_its_leadership_begins_is_told_once_it_turns(group: NotedGroup) -> None:
    """Told to lead without trust, it would find that its term is over; and what it was never told has not ended."""
    with Stage(group, 60.0, LONG_S, LONG_S) as stage:
        stage.still.set()
        eventually(lambda: clock_s() > listened_s(stage.shared) + 0.6, what="that it stands still")
        group.elected(clock_s() + 30)
        stage.go_on()
        group.listener.trust(clock_s() + 30)
        stage.wait_told("acquired")
        assert [name for name, _ in stage.told if name in ("trust", "acquired")] == ["trust", "acquired"]
        assert group.calls == []


def test_a_proof_of_a_leader_that_leaves_counts_for_no_later_leadership(group: NotedGroup) -> None:
    """It stands still when that begins, and is told that it leads with the first proof that it can hear."""
    with Stage(group, 60.0, LONG_S, LONG_S) as stage:
        stage.answers = False
        group.elected(clock_s() + 30)
        revoke = threading.Thread(target=group.revoke, daemon=True)
        revoke.start()
        (number, _deadline) = stage.wait_told("revoking")
        group.listener.trust(clock_s() + 30)
        stage.say("revoked", number)
        revoke.join(10)
        stage.still.set()
        eventually(lambda: clock_s() > listened_s(stage.shared) + 0.6, what="that it stands still")
        group.elected(clock_s() + 30)
        stage.go_on()
        group.listener.trust(clock_s() + 30)
        stage.wait_told("acquired", 2)
        told = [name for name, _ in stage.told if name in ("trust", "acquired")]
        assert told == ["trust", "acquired", "trust", "trust", "acquired"]


def test_a_late_answer_to_one_revoke_is_none_to_the_next(group: NotedGroup) -> None:
    with Stage(group, 60.0, LONG_S, 0.0) as stage:
        stage.answers = False
        group.elected(clock_s() + 0.1)
        stage.wait_told("acquired")
        stage.still.set()
        group.revoke()  # over, since it stands still and trust has ended
        stage.go_on()
        (number, _deadline) = stage.wait_told("revoking")
        group.elected(clock_s() + LONG_S)
        revoke = threading.Thread(target=group.revoke, daemon=True)
        revoke.start()
        (next_number, _deadline) = stage.wait_told("revoking", 2)
        stage.say("revoked", number)
        revoke.join(0.5)
        assert revoke.is_alive()
        stage.say("revoked", next_number)
        revoke.join(10)
        assert not revoke.is_alive()


def test_a_dead_supervisor_s_place_is_left_when_the_last_shard_is_gone(group: NotedGroup) -> None:
    with Stage(group, 60.0, LONG_S, LONG_S) as stage, present(stage.memory) as shard:
        group.elected(clock_s() + 30)
        stage.die()
        assert not group.left.wait(0.5)
        os.kill(shard, signal.SIGKILL)
        assert stage.wait_code() == 0
        assert group.left.is_set()


def test_what_a_shard_owes_is_waited_for_though_none_lives(group: NotedGroup) -> None:
    with Stage(group, 60.0, 0.1, 1.0) as stage:
        owe(stage.shared, 3, owes=True)
        until = clock_s() + 0.5
        group.elected(until)
        stage.wait_told("acquired")
        stage.die()
        stage.wait_code()
        assert clock_s() >= until + 1.0


def test_a_shard_that_hangs_is_waited_for_no_longer_than_its_wire_may_last(group: NotedGroup) -> None:
    with Stage(group, 60.0, 0.1, 1.0) as stage, present(stage.memory):
        until = clock_s() + 0.5
        group.elected(until)
        stage.wait_told("acquired")
        stage.die()
        stage.wait_code()
        assert until + 1.0 <= clock_s() < until + 9.0
        assert group.left.is_set()


def test_a_supervisor_that_stands_still_is_told_no_proof_and_forsaken_after_a_session(group: NotedGroup) -> None:
    with Stage(group, 2.0, LONG_S, 0.1) as stage:
        group.elected(clock_s() + 0.5)
        stage.wait_told("acquired")
        stage.still.set()
        still_at = clock_s()
        eventually(lambda: clock_s() > still_at + elector._STILL_S + 0.1, what="time to notice it")
        group.listener.trust(clock_s() + 30)
        assert stage.wait_code() == EXIT_STOOD_STILL
        assert clock_s() >= still_at + 1.9
        stage.still.clear()
        assert stage.wait_told("fenced") == ("the supervisor did not respond for a whole session",)
        assert [name for name, _ in stage.told].count("trust") == 1


def test_a_listener_that_hangs_is_a_supervisor_that_stands_still(group: NotedGroup) -> None:
    """Its relay turns; nobody there hears of proofs."""
    with Stage(group, 1.0, LONG_S, 0.1) as stage:
        stage.still.set()
        over = threading.Event()

        def relay() -> None:
            while not over.wait(0.05):
                turn(stage.shared, marks=True)

        threading.Thread(target=relay, daemon=True).start()
        assert stage.wait_code() == EXIT_STOOD_STILL
        over.set()


def test_a_listener_in_a_revoke_may_take_its_time(group: NotedGroup) -> None:
    with Stage(group, 0.6, LONG_S, 0.1) as stage:
        stage.answers = False
        group.elected(clock_s() + 0.2)
        stage.wait_told("acquired")
        revoke = threading.Thread(target=group.revoke, daemon=True)
        revoke.start()
        (number, _deadline) = stage.wait_told("revoking")
        over = threading.Event()
        stage.still.set()

        def relay() -> None:
            while not over.wait(0.05):
                turn(stage.shared, marks=True)

        threading.Thread(target=relay, daemon=True).start()
        revoke.join(1.5)
        assert revoke.is_alive()
        assert not stage.code
        stage.go_on()
        stage.say("revoked", number)
        revoke.join(10)
        assert not revoke.is_alive()
        over.set()


def test_who_goes_on_after_its_trust_has_ended_is_fenced_first(group: NotedGroup) -> None:
    with Stage(group, 60.0, LONG_S, LONG_S) as stage:
        until = clock_s() + 0.1
        group.elected(until)
        stage.wait_told("acquired")
        eventually(lambda: clock_s() > until, what="the end of trust")
        group.listener.trust(clock_s() + 30)
        assert len(group.calls) == 1
        assert [name for name, _ in stage.told].count("trust") == 1
        group.listener.fenced("as it was told")
        group.elected(clock_s() + 30)
        stage.wait_told("trust", 2)


def test_a_pipe_that_nobody_reads_stops_nothing(group: NotedGroup) -> None:
    with Stage(group, 2.0, LONG_S, 0.1) as stage:
        stage.still.set()
        for _ in range(2_000):
            group.listener.client_said(logging.INFO, "x" * 2_000)
        assert stage.wait_code() == EXIT_STOOD_STILL


def test_states_are_told_in_order(group: NotedGroup) -> None:
    with Stage(group, 60.0, LONG_S, LONG_S) as stage:
        for term in range(1, 200):
            group.state = (None, term)
            stage.process._tell_state()

        def terms() -> list[int]:
            return [said[-1] for name, said in list(stage.told) if name == "state"]

        eventually(lambda: terms()[-1:] == [199], what="the last")
        assert terms() == sorted(terms())


# -- in the supervisor, with processes of which each does one thing


class Told:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append((name, *arguments))

    def marker_alive(self) -> bool:
        return True

    def names(self) -> list[str]:
        return [event[0] for event in list(self.events)]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in list(self.events) if event[0] == name]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> Iterator[None]:
    """Servers are forks, which start sooner; none of these tests is about their start."""
    with warm_forkservers():
        yield


@pytest.fixture
def forkserver() -> Iterator[Forkserver]:
    made = Forkserver()
    eventually(made.is_up, 60.0, "the server")
    over = threading.Event()

    def turn_on() -> None:
        while not over.wait(0.05):
            turn(made.shared, marks=True)

    threading.Thread(target=turn_on, daemon=True).start()
    yield made
    over.set()
    made.close()


@contextmanager
def place(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver, target: Any, session_s: float = 60.0
) -> Iterator[tuple[Elector, Told]]:
    """An elector in this process whose other half is that function."""
    monkeypatch.setattr(elector, "main", target)
    made, told = Elector(replace(SETTINGS, session_s=session_s), 1.0, 1.0, forkserver), Told()
    made.start(IDENTITY, told)
    try:
        yield made, told
    finally:
        made._ended.set()
        for pid in electors(forkserver):
            os.kill(pid, signal.SIGKILL)
        made._thread.join(20)
        assert not made._thread.is_alive()


def electors(forkserver: Forkserver) -> list[int]:
    """Nothing else is started here."""
    assert forkserver._server is not None
    return children(forkserver._server._process.pid)


def one_elector(forkserver: Forkserver) -> int:
    pids = eventually(lambda: electors(forkserver), what="the process")
    assert pids is not None
    (pid,) = pids
    return pid


def test_a_leader_whose_elector_is_killed_is_fenced_at_once(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver
) -> None:
    with place(monkeypatch, forkserver, leads) as (made, told):
        eventually(lambda: "acquired" in told.names(), what="the lead")
        assert (made.highest_term, made.missing()) == (3, None)
        first = one_elector(forkserver)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: told.names().count("acquired") == 2, what="another one")
        names = [name for name in told.names() if name in ("acquired", "fenced", "client_said")]
        assert names == ["acquired", "fenced", "client_said", "acquired"]
        assert one_elector(forkserver) != first
        assert "exit code -9" in told.of("client_said")[0][1]


def test_a_leader_whose_elector_stands_still_is_fenced_when_its_trust_has_ended(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver
) -> None:
    with place(monkeypatch, forkserver, falls_silent, session_s=3.0) as (made, told):
        eventually(lambda: "fenced" in told.names(), what="the fence")
        assert clock_s() >= told.of("trust")[0][0]
        first = one_elector(forkserver)
        assert made.missing() == Missing("the process that holds the place in the group does not respond")
        eventually(lambda: not alive(first), what="its end")
        assert "killed" in told.of("client_said")[0][1]
        eventually(lambda: told.names().count("acquired") == 2, what="another one")


def test_nobody_waits_for_an_elector_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver
) -> None:
    with place(monkeypatch, forkserver, leads) as (made, told):
        eventually(lambda: "acquired" in told.names(), what="the lead")
        first = one_elector(forkserver)
        os.kill(first, signal.SIGSTOP)
        done = threading.Event()

        def tell() -> None:
            for _ in range(20_000):
                made.step_down("x" * 100)
            made.lead(uuid4(), 4)
            done.set()

        threading.Thread(target=tell, daemon=True).start()
        assert done.wait(20)
        eventually(lambda: not alive(first), what="its end")
        eventually(lambda: "fenced" in told.names(), what="the fence")


def test_who_asks_for_the_cluster_hears_of_its_elector_s_end(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver
) -> None:
    with place(monkeypatch, forkserver, leads) as (made, told):
        with pytest.raises(BrokerUnavailable):
            Elector(SETTINGS, 1.0, 1.0, forkserver).cluster()
        eventually(lambda: "acquired" in told.names(), what="the lead")
        pid = one_elector(forkserver)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            made.cluster()
        assert time.monotonic() - began < elector._ANSWER_S / 2


def test_electors_that_die_again_and_again_are_an_error(
    monkeypatch: pytest.MonkeyPatch, forkserver: Forkserver
) -> None:
    monkeypatch.setattr(elector, "_RESTART_S", 0.01)
    with place(monkeypatch, forkserver, dies) as (_, told):
        eventually(lambda: "fail" in told.names(), what="the error")
        ((error,),) = told.of("fail")
        assert isinstance(error, ShardError)
        assert "fenced" not in told.names(), "it had never led"


def test_no_place_is_asked_for_while_the_relay_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver = Forkserver()
    try:
        eventually(forkserver.is_up, 60.0, "the server")
        with place(monkeypatch, forkserver, leads) as (_, told):
            began = time.monotonic()
            eventually(lambda: time.monotonic() > began + 0.5, what="time to start one")
            assert electors(forkserver) == []
            turn(forkserver.shared, marks=True)
            eventually(lambda: "acquired" in told.names(), what="the lead")
    finally:
        forkserver.close()
