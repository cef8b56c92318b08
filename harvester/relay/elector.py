"""The elector: the process that holds the place in the Kafka group, and gives it up if the supervisor dies.

Kafka notices a dead member only when its session has expired. A member that leaves is succeeded at once, but some
process must survive to do that, and only the client that joined can. So the member (`harvester.neli.member`) lives in a
process of its own, forked from the server that starts shards. `Elector` represents it in the supervisor, as a `Group`:
calls travel over a pair of pipes, in order, and so do the member's calls to its listener. Neither side waits for the
other to read.

- *The supervisor dies.* Shards finish what is on the wire and end; each holds a lock on the shared memory for as long
  as it lives, and records there whether something it sent may still be on the wire. When no shard lives and none owes
  anything, the elector leaves the group: no shard can publish alongside a successor, not even one that is being
  started.
- *A shard does not end*, or was killed with records on the wire. Then the elector leaves once nothing sent under the
  promised trust can still arrive (D + 1 s after the last moment that the supervisor was told to trust): at most as long
  as the group waits after all processes have died.
- *The supervisor hangs* (it is stopped or starved, or one of its threads hangs). The trust it was last given expires by
  itself. It is given no more once it has not turned for half a second, and if it resumes after that trust has expired,
  it is fenced first. If it has not turned for a whole session, the elector leaves and ends. A supervisor that resumes
  then starts another elector.
- *The elector dies.* The supervisor is fenced at once and starts another elector; the old place lasts until its
  session expires. The same applies if the elector hangs: the supervisor fences itself when trust has expired, and kills
  an elector that it has not heard from for a session.
- *A revoke* waits for the supervisor's reply. If the supervisor hangs or is dead, there is none: then it waits until
  nothing sent under the promised trust can be on the wire any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from uuid import UUID

from harvester.clock import clock_s
from harvester.errors import BrokerUnavailable, HarvesterError, ShardError
from harvester.neli.group import GroupListener, Identity, Missing
from harvester.neli.member import KafkaGroup, MemberSettings
from harvester.relay.forkserver import Forkserver, Process
from harvester.relay.ipc import (
    MessagePipe,
    MessageReader,
    Shared,
    Waker,
    is_owed,
    listen,
    listened_s,
    marks_live,
    take_all,
    turned_s,
)
from harvester.telemetry.logging import LOGGER

_UP_LOOK_S = 0.02
_RESTART_S = 1.0  # the group waits for the lost place in any case
_LOSSES = 5  # consecutive electors that lived for less than a session
_ANSWER_S = 15.0
_END_S = 30.0  # a leaving member takes seconds at most, plus the time that the revoke may take
_TURN_S = 0.25  # how often both sides turn; the relay's thread does ten times a second
_STILL_S = 0.5  # a supervisor that has not turned for this long may be hanging: nothing is sent to it until it turns
_SILENT_S = 1.0  # an elector that has not been heard from for this long is silent
_LOCK_LOOK_S = 0.01
_MOST_WAITING_BYTES = 1 << 20  # for an elector that does not read
_DISPENSABLE = frozenset({"turns", "state", "trust", "client_said"})
_FROZEN = "the process that holds the place in the group does not respond"
EXIT_STOOD_STILL = 4


@dataclass(frozen=True, slots=True)
class ElectorSpec:
    """Everything an elector is given when it starts. Times in seconds.

    `linger_s`: how long shards may take to finish what is on the wire; `expiry_s`: after this time, nothing produced
    while trusted is on the wire. `alone_from`: see `KafkaGroup`.
    """

    settings: MemberSettings
    identity: Identity
    linger_s: float
    expiry_s: float
    alone_from: float


class ProofVerdict(Enum):
    """What to do with a proof."""

    TELL = "tell"
    KEEP = "keep"  # do not pass it on: the supervisor does not listen
    STEP_DOWN = "step down"


class Promises:
    """What the supervisor was told to trust, and when the place may then be given up. Pure.

    Times are seconds of a clock that runs through suspend. `turned_at`: when the supervisor last turned.

    - leads: the supervisor was told that it leads, and not yet that this is over
    - orphaned_at: when the supervisor was found dead
    - forsaken: the supervisor hung for a session; the place is being given up
    """

    def __init__(self, session_s: float, linger_s: float, expiry_s: float) -> None:
        self._session_s, self._linger_s, self._expiry_s = session_s, linger_s, expiry_s
        self._until = 0.0
        self.leads = False
        self.orphaned_at: float | None = None
        self.forsaken = False

    def prove(self, until: float, now: float, turned_at: float) -> ProofVerdict:
        """Leadership is proven up to `until`.

        Trust that has expired does not come back: a supervisor that hung in the meantime is fenced, and leads under a
        new term, just as if it were the member itself.
        """
        if self.orphaned_at is not None or self.forsaken or self.stands_still(now, turned_at):
            return ProofVerdict.KEEP
        if self.leads and now >= self._until:
            return ProofVerdict.STEP_DOWN
        self._until = max(self._until, until)
        return ProofVerdict.TELL

    def stands_still(self, now: float, turned_at: float) -> bool:
        return now >= turned_at + _STILL_S

    def forsake(self, now: float, turned_at: float) -> bool:
        """Whether to give up the place because the supervisor hangs; true once."""
        if self.orphaned_at is not None or self.forsaken:
            return False
        self.forsaken = now >= turned_at + self._session_s and now >= self._clear_at
        return self.forsaken

    def orphan(self, now: float) -> None:
        """The supervisor is dead."""
        if self.orphaned_at is None:
            self.orphaned_at = now

    def is_over(self, now: float, turned_at: float) -> bool:
        """Whether nothing can be published any more, going by the clock alone."""
        if self.orphaned_at is not None:
            return now >= max(self._clear_at, self.orphaned_at + self._linger_s)
        return now >= self._clear_at and (self.forsaken or self.stands_still(now, turned_at))

    @property
    def _clear_at(self) -> float:
        """When nothing produced while trusted can be on the wire any more."""
        return self._until + self._expiry_s


class Elector:
    """The group member in a process of its own: a `Group`. Methods may be called from any thread; only `cluster` and
    `stop` wait for the process.
    """

    def __init__(self, settings: MemberSettings, linger_s: float, expiry_s: float, forkserver: Forkserver) -> None:
        """Starts nothing yet."""
        self._settings, self._linger_s, self._expiry_s = settings, linger_s, expiry_s
        self._forkserver = forkserver
        self._identity: Identity
        self._listener: GroupListener
        self._thread = threading.Thread(target=self._run, name="elector", daemon=True)
        self._ended = threading.Event()
        self._process: Process | None = None
        self._pipe: MessagePipe | None = None  # to the process; None while none runs
        self._lock = threading.Lock()  # guards the process, its pipe, and the callers that wait for a reply
        self._asking: list[Future[str | None]] = []
        self._alone_from = clock_s()  # earlier members of a dead process died before this
        self._missing: tuple[Missing | None, float] = (Missing(f"joins group {settings.group}"), 0.0)
        self._highest_term = 0
        self._login: tuple[Mapping[str, Any], Mapping[str, Any], str] | None = None
        # Used by the thread only.
        self._is_silent = False
        self._leads = False  # as reported by the process
        self._until = 0.0  # the moment up to which that is proven

    def start(self, identity: Identity, listener: GroupListener) -> None:
        self._identity, self._listener = identity, listener
        self._thread.start()

    def lead(self, leader_id: UUID, term: int) -> None:
        self._highest_term = max(self._highest_term, term)
        self._tell("lead", leader_id, term)

    def step_down(self, reason: str, rejoin_after_s: float | None = None) -> None:
        self._tell("step_down", reason, rejoin_after_s)

    @property
    def highest_term(self) -> int:
        return self._highest_term

    def missing(self) -> Missing | None:
        if self._is_silent:
            return Missing(_FROZEN)
        missing, at = self._missing
        if missing is None or missing.within_s is None:
            return missing
        return replace(missing, within_s=max(0.0, missing.within_s - (clock_s() - at)))

    def cluster(self) -> str | None:
        found: Future[str | None] = Future()
        with self._lock:
            self._asking.append(found)
        if self._tell("cluster"):
            with contextlib.suppress(TimeoutError):
                return found.result(_ANSWER_S)
        raise _unknown_cluster()

    def log_in(self, consumer_options: Mapping[str, Any], producer_options: Mapping[str, Any], user: str) -> None:
        """New connections use these options from now on."""
        self._settings = replace(self._settings, consumer_options=consumer_options, producer_options=producer_options)
        self._login = consumer_options, producer_options, user
        self._tell("log_in", *self._login)

    def stop(self) -> None:
        self._ended.set()
        self._tell("stop")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._settings.revoke_within_s + _END_S)
            if self._thread.is_alive() and self._process is not None:
                self._listener.client_said(
                    logging.WARNING, "the process that holds the place in the group hangs: killed"
                )
                self._process.kill()
                self._thread.join(_END_S)

    def _tell(self, name: str, *arguments: Any) -> bool:
        """Whether there is a process to tell. Never waits: a process that has not read for long is killed."""
        with self._lock:
            process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return False
        told = pipe.send((name, arguments))
        if pipe.waiting_bytes > _MOST_WAITING_BYTES:
            process.kill()
        return told

    # -- the thread

    def _run(self) -> None:
        lost = 0
        try:
            while not self._ended.is_set():
                process = self._begin()
                if process is None:
                    continue
                began = time.monotonic()
                try:
                    self._listen(process)
                    if not self._ended.is_set():  # at once, before its exit code is known
                        self._fence("the process that holds the place in the group has ended")
                finally:
                    code = self._bury(process)
                if self._ended.is_set():
                    return
                self._listener.client_said(
                    logging.WARNING, f"the process that holds the place in the group has ended (exit code {code})"
                )
                lost = lost + 1 if time.monotonic() - began < self._settings.session_s else 0
                if lost >= _LOSSES:
                    raise ShardError(
                        "the process that holds the place in the group died repeatedly",
                        hint="standard error shows why; the kernel log lists processes that the kernel killed",
                    )
                self._ended.wait(_RESTART_S)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nothing would fence
            self._listener.fail(error)

    def _begin(self) -> Process | None:
        """A process that joins the group; None if none can start yet, e.g. while this supervisor's relay does not
        turn.
        """
        shared = self._forkserver.shared
        if clock_s() >= turned_s(shared) + _STILL_S or not self._forkserver.is_up():
            self._ended.wait(_UP_LOOK_S)
            return None
        listen(shared)
        spec = ElectorSpec(self._settings, self._identity, self._linger_s, self._expiry_s, self._alone_from)
        process = self._forkserver.start(main, spec, "elector")
        if process is not None:
            with self._lock:
                self._process, self._pipe = process, MessagePipe(process.write_fd)
            login = self._login
            if login is not None and spec.settings is not self._settings:
                self._tell("log_in", *login)
            if self._ended.is_set():
                self._tell("stop")
        return process

    def _listen(self, process: Process) -> None:
        """Act on what the process reports until it ends."""
        reader, poller = MessageReader(process.read_fd), select.poll()
        poller.register(process.read_fd, select.POLLIN)
        silent_turns = 0  # our own turns: if this process was stopped as well, it finds the other alive
        with contextlib.suppress(EOFError, OSError):
            while True:
                listen(self._forkserver.shared)
                if poller.poll(_TURN_S * 1000):
                    messages = reader.receive()
                    silent_turns, self._is_silent = 0, False
                    for name, arguments in messages:
                        self._heard(name, arguments)
                else:
                    silent_turns += 1
                    self._look(process, silent_turns * _TURN_S)

    def _look(self, process: Process, silent_s: float) -> None:
        """Nothing was reported for `silent_s`."""
        if self._pipe is not None:
            self._pipe.flush()
        self._is_silent = silent_s >= _SILENT_S
        if self._leads and clock_s() >= self._until + _SILENT_S:  # the elector should have fenced
            self._fence(_FROZEN)
            self._tell("step_down", _FROZEN, None)  # if it resumes, it leads under new proofs
        if silent_s >= self._settings.session_s:
            self._listener.client_said(logging.WARNING, f"{_FROZEN}: killed")
            process.kill()

    def _heard(self, name: str, arguments: tuple[Any, ...]) -> None:
        listener = self._listener
        match name, arguments:
            case "state", (missing, at, highest_term):
                self._missing, self._highest_term = (missing, at), max(self._highest_term, highest_term)
            case "cluster", (found, error):
                for answer in self._take_asking():
                    if error is None:
                        answer.set_result(found)
                    else:
                        answer.set_exception(error)
            case "trust", (until,):
                self._until = until
                listener.trust(until)
            case "acquired", (highest_term,):
                self._leads, self._highest_term = True, max(self._highest_term, highest_term)
                listener.acquired()
            case "fenced", (reason,):
                self._leads = False
                listener.fenced(reason)
            case "revoking", (number, deadline):
                self._leads = False
                listener.revoking(max(0.0, deadline - clock_s()))
                listen(self._forkserver.shared)  # it may have taken long
                self._tell("revoked", number)
            case "fail" | "trouble" | "client_said", _:
                getattr(listener, name)(*arguments)

    def _fence(self, reason: str) -> None:
        if self._leads:
            self._leads = False
            self._listener.fenced(reason)

    def _bury(self, process: Process) -> int | None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        os.close(process.read_fd)
        for answer in self._take_asking():
            answer.set_exception(_unknown_cluster())
        self._missing, self._is_silent = (Missing(f"joins group {self._settings.group}"), 0.0), False
        self._alone_from = clock_s()
        self._listener.trouble(None)
        return process.reap()

    def _take_asking(self) -> list[Future[str | None]]:
        with self._lock:
            asking, self._asking = self._asking, []
        return asking


def _unknown_cluster() -> BrokerUnavailable:
    return BrokerUnavailable("the id of the Kafka cluster is unknown: the group was left")


# -- in the elector


def main(spec: ElectorSpec, inbound: int, outbound: int, shared: Shared, supervisor_fd: int, memory: int) -> int:
    """Entry point of the process; it exits at once with the returned code. Parameters as of a shard's `main`."""
    elector = ElectorProcess(spec, outbound, shared, memory)
    logger = logging.getLogger(LOGGER)
    logger.addHandler(_Forwards(elector.client_said))
    logger.propagate = False
    return elector.serve(inbound, supervisor_fd)


class _Forwards(logging.Handler):
    """Passes log records of this process, such as a failing token callback, to the supervisor's log."""

    def __init__(self, said: Callable[[int, str], None]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said(record.levelno, record.getMessage())


class ElectorProcess:
    """The group member and its listener. Called from the main thread, the group's thread, and the thread that
    leaves.
    """

    def __init__(self, spec: ElectorSpec, outbound: int, shared: Shared, memory: int) -> None:
        self._spec, self._shared, self._memory = spec, shared, memory
        self._pipe = MessagePipe(outbound)
        self._group = KafkaGroup(spec.settings, spec.alone_from)
        self._promises = Promises(spec.settings.session_s, spec.linger_s, spec.expiry_s)
        self._state_lock = threading.Lock()  # guards the state from reading it until it is sent
        self._state: Any = None  # the last one sent
        self._revokes = 0
        self._revoked = 0  # number of the last revoke that the supervisor has answered
        self._in_revoke = False
        self._troubled = False
        self._leaving = False
        # Within a leadership: whether the supervisor was given trust; whether it is yet to be told that it leads.
        self._is_trusted = self._is_to_lead = False
        self._left = Waker()
        self._code = 0

    def serve(self, inbound: int, supervisor_fd: int) -> int:
        """Runs until the supervisor asks for the end, dies, or hangs, and the group is left."""
        self._group.start(self._spec.identity, self)
        calls = MessageReader(inbound)
        poller = select.poll()
        for fd in (inbound, supervisor_fd, self._left.fd):
            poller.register(fd, select.POLLIN)
        next_turn = looked_at = clock_s()
        while True:
            ready = {fd for fd, _ in poller.poll(_TURN_S * 1000)}
            if self._left.fd in ready:
                return self._code
            if supervisor_fd in ready or (inbound in ready and not self._obey(calls)):
                for fd in (inbound, supervisor_fd):
                    poller.unregister(fd)
                self._promises.orphan(clock_s())
                self._leave(0)
            now = clock_s()
            if now >= next_turn:
                next_turn = now + _TURN_S
                self._tell_state()
                self._tell("turns")
                # If this process was stopped itself, it lets the supervisor turn first.
                if now < looked_at + _SILENT_S and self._promises.forsake(now, self._turned_at):
                    self._tell("fenced", "the supervisor did not respond for a whole session")
                    self._leave(EXIT_STOOD_STILL)
                looked_at = now

    @property
    def _turned_at(self) -> float:
        """When the supervisor last turned: its relay and the thread that receives proofs, unless a revoke blocks the
        latter.
        """
        turned_at = turned_s(self._shared)
        return turned_at if self._in_revoke else min(turned_at, listened_s(self._shared))

    def _obey(self, calls: MessageReader) -> bool:
        """Act on the supervisor's calls; false when it is gone."""
        try:
            for name, arguments in calls.receive():
                self._do(name, arguments)
        except (EOFError, OSError):
            return False
        return True

    def _do(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name:
            case "stop":
                self._leave(0)
            case "revoked":
                (self._revoked,) = arguments
            case "cluster":
                threading.Thread(target=self._tell_cluster, name="cluster", daemon=True).start()
            case "lead" | "step_down" | "log_in":
                getattr(self._group, name)(*arguments)

    # -- the end

    def _leave(self, code: int) -> None:
        """Leave the group on a separate thread, since the supervisor's replies must be received meanwhile."""
        if self._leaving:
            return
        self._leaving, self._code = True, code
        threading.Thread(target=self._run_leaving, name="leaving", daemon=True).start()

    def _run_leaving(self) -> None:
        while self._promises.orphaned_at is not None and not self._is_over():
            time.sleep(_LOCK_LOOK_S)
        self._group.stop()
        self._left.set()

    def _is_over(self) -> bool:
        """Whether nothing can be published any more."""
        if self._promises.is_over(clock_s(), self._turned_at):
            return True
        return self._promises.orphaned_at is not None and take_all(self._memory) and not is_owed(self._shared)

    # -- to the supervisor

    def _tell(self, name: str, *arguments: Any) -> bool:
        """Whether it was sent; never waits."""
        return self._pipe.send((name, arguments), dispensable=name in _DISPENSABLE)

    def _tell_state(self) -> None:
        with self._state_lock:
            state = self._group.missing(), self._group.highest_term
            if state != self._state and self._tell("state", state[0], clock_s(), state[1]):
                self._state = state

    def _tell_cluster(self) -> None:
        try:
            self._tell("cluster", self._group.cluster(), None)
        except HarvesterError as error:
            self._tell("cluster", None, error)

    # -- the listener

    def acquired(self) -> None:
        self._is_to_lead = not self._leaving
        self._tell_acquired()

    def _tell_acquired(self) -> None:
        """Report the leadership, but not before trust: a supervisor that hung at the first proof was not sent any."""
        if self._is_to_lead and self._is_trusted:
            self._is_to_lead, self._promises.leads = False, True
            self._tell_state()
            self._tell("acquired", self._group.highest_term)

    def fenced(self, reason: str) -> None:
        self._is_trusted = self._is_to_lead = self._promises.leads = False
        self._tell("fenced", reason)

    def trust(self, until_s: float) -> None:
        match self._promises.prove(until_s, clock_s(), self._turned_at):
            case ProofVerdict.TELL:
                self._tell("trust", until_s)
                self._is_trusted = True
                self._tell_acquired()
            case ProofVerdict.STEP_DOWN:
                self._group.step_down("the supervisor did not respond before its trust expired")
            case ProofVerdict.KEEP:
                pass

    def revoking(self, within_s: float) -> None:
        self._is_trusted = self._is_to_lead = self._promises.leads = False
        self._in_revoke = True
        self._revokes += 1
        deadline = clock_s() + within_s
        self._tell("revoking", self._revokes, deadline)
        while self._revoked != self._revokes and clock_s() < deadline and not self._is_over():
            time.sleep(_LOCK_LOOK_S)
        self._in_revoke = self._is_trusted = False  # a leader that leaves was told of further proofs

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, HarvesterError):
            traceback.print_exception(error)
            error = RuntimeError(repr(error))
        self._tell("fail", error)

    def trouble(self, text: str | None, level: int = logging.WARNING) -> None:
        if text is not None or self._troubled:  # every heartbeat reports that there is no trouble
            self._troubled = text is not None
            self._tell("trouble", text, level)

    def marker_alive(self) -> bool:
        return marks_live(self._shared) and not self._promises.forsaken

    def client_said(self, level: int, text: str) -> None:
        self._tell("client_said", level, text)
