"""The elector: the process that holds this harvester's place in Kafka's group, and gives it up if the supervisor dies.

Kafka notices a dead member only when its session has run out. A member that leaves is succeeded at once, but somebody
has to be left to do that, and only the client that joined can. So the member (`harvester.neli.member`) lives in a
process of its own, a fork of the server that starts shards. `Elector` stands for it in the supervisor, as a `Group`:
calls go over a pair of pipes, in order, and so does what the member tells its listener.

- *The supervisor dies.* Shards finish their wire and end; each holds a lock on the shared memory for as long as it
  lives. The elector leaves the group when it has all of that memory for itself, so no shard can publish beside a
  successor, not even one that is being started. If a shard does not end (it is stopped, or hangs), the elector ends
  without leaving, and the group waits for its session as if there were no elector.
- *The supervisor stands still* (stopped, or starved). What it was last told to trust ends by itself. Nothing is told to
  it any more once it has not turned for a second; and when it has not for a session, all that its shards had on the
  wire is gone, and the elector leaves. A supervisor that goes on finds trust expired and its pipe closed, and starts
  another one.
- *The elector dies.* The supervisor is fenced at once, and starts another one; its old place lasts until its session
  ends.
- *A revoke* waits for the supervisor's answer. One that stands still gives none: then it waits until nothing that was
  trusted can be on the wire any more.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from multiprocess.connection import Connection

from harvester.clock import clock_s
from harvester.errors import BrokerUnavailable, HarvesterError, ShardError
from harvester.neli.group import GroupListener, Identity, Missing
from harvester.neli.member import KafkaGroup, MemberSettings
from harvester.relay.forkserver import Forkserver, Process
from harvester.relay.ipc import Shared, marks_live, take_all, turned_s, widen

_UP_LOOK_S = 0.02
_RESTART_S = 1.0
_LOSSES = 5  # electors that were lost in a row, none of which had joined
_ANSWER_S = 15.0
_END_S = 30.0  # a member that leaves takes seconds at most, beyond what the revoke may take
_STATE_S = 0.5
_LOCK_LOOK_S = 0.01
_STILL_S = 1.0  # a supervisor turns ten times a second
EXIT_STOOD_STILL = 4


@dataclass(frozen=True, slots=True)
class ElectorSpec:
    """All that an elector is told at birth. Times in seconds.

    `linger_s`: how long shards may take to finish their wire; `expiry_s`: after that nothing that was produced while
    trusted is on the wire.
    """

    settings: MemberSettings
    identity: Identity
    linger_s: float
    expiry_s: float


class Elector:
    """The member of the group in a process of its own: a `Group`. Methods are safe from any thread."""

    def __init__(self, settings: MemberSettings, linger_s: float, expiry_s: float, forkserver: Forkserver) -> None:
        """Nothing is started yet."""
        self._settings, self._linger_s, self._expiry_s = settings, linger_s, expiry_s
        self._forkserver = forkserver
        self._identity: Identity
        self._listener: GroupListener
        self._thread = threading.Thread(target=self._run, name="elector", daemon=True)
        self._ended = threading.Event()
        self._process: Process | None = None
        self._pipe: Connection | None = None  # to the process; None while there is none
        self._lock = threading.Lock()  # around what is sent, and the pipe
        self._clusters: list[Future[str | None]] = []
        self._missing: tuple[Missing | None, float] = (Missing(f"joins group {settings.group}"), 0.0)
        self._highest_term = 0

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
        missing, at = self._missing
        if missing is None or missing.within_s is None:
            return missing
        return replace(missing, within_s=max(0.0, missing.within_s - (clock_s() - at)))

    def cluster(self) -> str | None:
        found: Future[str | None] = Future()
        self._clusters.append(found)
        if self._tell("cluster"):
            with contextlib.suppress(TimeoutError):
                return found.result(_ANSWER_S)
        raise BrokerUnavailable("the id of Kafka's cluster is not known: the group was left")

    def log_in(self, consumer_options: Mapping[str, Any], producer_options: Mapping[str, Any], user: str) -> None:
        """New connections are made with these options from now on."""
        self._settings = replace(self._settings, consumer_options=consumer_options, producer_options=producer_options)
        self._tell("log_in", consumer_options, producer_options, user)

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
        """Whether there is a process to be told."""
        with self._lock:
            if self._pipe is None:
                return False
            try:
                self._pipe.send((name, arguments))
            except OSError:
                return False
            return True

    # -- the thread

    def _run(self) -> None:
        lost = 0
        try:
            while not self._ended.is_set():
                process = self._begin()
                if process is None:
                    continue
                joined = self._listen(process)
                code = self._bury(process)
                if self._ended.is_set():
                    return
                self._listener.fenced(_reason(code))
                lost = 0 if joined else lost + 1
                if lost >= _LOSSES:
                    raise ShardError("the process that holds the place in the group died again and again")
                self._ended.wait(_RESTART_S if lost else 0.0)
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; without it nobody would fence
            self._listener.fail(error)

    def _begin(self) -> Process | None:
        """A process that joins the group; None if there is none yet."""
        if not self._forkserver.is_up():
            self._ended.wait(_UP_LOOK_S)
            return None
        spec = ElectorSpec(self._settings, self._identity, self._linger_s, self._expiry_s)
        process = self._forkserver.start(main, spec, "elector")
        if process is not None:
            widen(process.read_fd)
            with self._lock:
                self._process, self._pipe = process, Connection(process.write_fd, readable=False)
            if self._ended.is_set():
                self._tell("stop")
        return process

    def _listen(self, process: Process) -> bool:
        """Do what the process says until it ends; whether it had told anything of the group."""
        told = False
        with Connection(process.read_fd, writable=False) as pipe, contextlib.suppress(EOFError, OSError):
            while True:
                name, arguments = pipe.recv()
                told = told or name != "state"
                self._heard(name, arguments)
        return told

    def _heard(self, name: str, arguments: tuple[Any, ...]) -> None:
        listener = self._listener
        match name, arguments:
            case "state", (missing, at, highest_term):
                self._missing, self._highest_term = (missing, at), max(self._highest_term, highest_term)
            case "cluster", (found, error):
                answers, self._clusters = self._clusters, []
                for answer in answers:
                    answer.set_result(found) if error is None else answer.set_exception(error)
            case "revoking", (within_s,):
                listener.revoking(within_s)
                self._tell("revoked")
            case "acquired" | "fenced" | "trust" | "fail" | "trouble" | "client_said", _:
                getattr(listener, name)(*arguments)

    def _bury(self, process: Process) -> int | None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        self._missing = (Missing(f"joins group {self._settings.group}"), 0.0)
        return process.reap()


def _reason(code: int | None) -> str:
    if code == EXIT_STOOD_STILL:
        return "the supervisor stood still for a session"
    return f"the process that holds the place in the group has ended (exit code {code})"


# -- in the elector


def main(spec: ElectorSpec, inbound: int, outbound: int, shared: Shared, supervisor_fd: int, memory: int) -> int:
    """Entry of the process; the returned exit code ends it at once."""
    return _Place(spec, Connection(outbound, readable=False), shared, memory).serve(
        Connection(inbound, writable=False), supervisor_fd
    )


class _Place:
    """The place in the group, and its listener."""

    def __init__(self, spec: ElectorSpec, pipe: Connection, shared: Shared, memory: int) -> None:
        self._spec, self._pipe, self._shared, self._memory = spec, pipe, shared, memory
        self._group = KafkaGroup(spec.settings)
        self._lock = threading.Lock()  # around what is sent
        self._revoked = threading.Event()  # the supervisor's answer
        self._promised = 0.0  # the latest moment that the supervisor was told to trust
        self._orphaned = False
        self._told: Any = None

    def serve(self, inbound: Connection, supervisor_fd: int) -> int:
        """Until the supervisor says so, dies, or stands still."""
        self._group.start(self._spec.identity, self)
        poller = select.poll()
        poller.register(inbound.fileno(), select.POLLIN)
        poller.register(supervisor_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(_STATE_S * 1000)}
            if supervisor_fd in ready:
                return self._outlive()
            if inbound.fileno() in ready:
                try:
                    name, arguments = inbound.recv()
                except (EOFError, OSError):
                    return self._outlive()
                if name == "stop":
                    self._group.stop()
                    return 0
                self._obey(name, arguments)
            self._tell_state()
            now = clock_s()
            if now >= turned_s(self._shared) + self._spec.settings.session_s and now >= self._clear_at():
                self._orphaned = True
                self._group.stop()
                return EXIT_STOOD_STILL

    def _obey(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name:
            case "revoked":
                self._revoked.set()
            case "cluster":
                threading.Thread(target=self._tell_cluster, name="cluster", daemon=True).start()
            case "lead" | "step_down" | "log_in":
                getattr(self._group, name)(*arguments)

    def _outlive(self) -> int:
        """The supervisor is dead: leave when no shard is left."""
        self._orphaned = True
        deadline = time.monotonic() + self._spec.linger_s
        while not take_all(self._memory):
            if time.monotonic() >= deadline:
                return 0
            time.sleep(_LOCK_LOOK_S)
        self._group.stop()
        return 0

    def _clear_at(self) -> float:
        """When nothing that was produced while trusted can be on the wire any more."""
        return self._promised + self._spec.expiry_s

    # -- to the supervisor

    def _tell(self, name: str, *arguments: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send((name, arguments))

    def _tell_state(self) -> None:
        missing, term = self._group.missing(), self._group.highest_term
        if (missing, term) != self._told:
            self._told = missing, term
            self._tell("state", missing, clock_s(), term)

    def _tell_cluster(self) -> None:
        try:
            self._tell("cluster", self._group.cluster(), None)
        except HarvesterError as error:
            self._tell("cluster", None, error)

    # -- the listener

    def acquired(self) -> None:
        self._tell_state()
        self._tell("acquired")

    def fenced(self, reason: str) -> None:
        self._tell("fenced", reason)

    def trust(self, until_s: float) -> None:
        if not self._orphaned and clock_s() < turned_s(self._shared) + _STILL_S:
            self._promised = max(self._promised, until_s)
            self._tell("trust", until_s)

    def revoking(self, within_s: float) -> None:
        deadline = clock_s() + within_s
        self._revoked.clear()
        self._tell("revoking", within_s)
        while not self._revoked.wait(_LOCK_LOOK_S) and (now := clock_s()) < deadline:
            if self._orphaned and take_all(self._memory):
                return
            if now >= turned_s(self._shared) + _STILL_S and now >= self._clear_at():
                return

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, HarvesterError):
            traceback.print_exception(error)
            error = RuntimeError(repr(error))
        self._tell("fail", error)

    def trouble(self, text: str | None, level: int = logging.WARNING) -> None:
        self._tell("trouble", text, level)

    def marker_alive(self) -> bool:
        return marks_live(self._shared)

    def client_said(self, level: int, text: str) -> None:
        self._tell("client_said", level, text)
