"""A proxy in front of Kafka that knows requests from each other: it holds, delays, drops or answers those of one API.

    with KafkaProxy(servers.bootstrap) as proxy:
        caught = proxy.catch(END_TXN, then="fin")  # keep the next EndTxn, close the client's connection
        caught.wait()                              # it is here
        ...                                        # the client has sent it again on another connection
        caught.deliver()                           # the old bytes reach the broker now, from nowhere

A rule applies to the next `times` requests that it fits, those of `where` included. What becomes of the client's
connection is `then`:

- `"fin"` and `"rst"` end it, in good order or not; the broker's side stays open, as a network that is slow to tell;
- `"silence"` keeps it, and nothing passes any more until `deliver` lets it go on where it stopped.

`on="answer"` lets the request pass, and applies the rule to the broker's answer: it is swallowed.
Addresses in answers become the proxy's own, as `tests.support.proxy` does it; `beside` names the other proxies of a
cluster, so that each broker is reached through its own.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from .link import libc_connect_unspec, read_frame, without_brokers
from .wait import eventually

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_COMMIT = 0, 1, 2, 3, 8
FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT = 10, 11, 12
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN = 22, 24, 26

Then = Literal["fin", "rst", "silence"]
On = Literal["request", "answer"]

_HOST = "127.0.0.1"
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came, its length in front; `body` is what follows the client id of the header."""

    api: int
    version: int
    correlation: int
    client: str
    frame: bytes

    @staticmethod
    def read(frame: bytes) -> Request:
        """All versions of the header begin like this."""
        api, version, correlation, length = struct.unpack_from(">hhih", frame, 4)
        client = frame[14 : 14 + max(0, length)].decode(errors="replace")
        return Request(api, version, correlation, client, frame)

    @property
    def body(self) -> bytes:
        return self.frame[14 + max(0, len(self.client.encode())) :]


Where = Callable[[Request], bool]


def commits(request: Request) -> bool:
    """Of an EndTxn: whether it asks for a commit. Its last field, before the tags of a flexible version."""
    return bool(request.frame[-1] if request.version < 3 else request.frame[-2])


@dataclass(eq=False)
class Caught:
    """A rule, and what it has caught."""

    api: int
    times: int
    then: Then
    on: On
    where: Where
    requests: list[Request] = field(default_factory=list)
    _links: list[_Link] = field(default_factory=list)
    _target: tuple[str, int] = (_HOST, 0)

    def wait(self, count: int = 1, timeout_s: float = _WAIT_S) -> None:
        """Until so many are caught."""
        eventually(lambda: len(self.requests) >= count, timeout_s, f"{count} requests of API {self.api}")

    def deliver(self) -> list[bytes]:
        """The held requests reach the broker now, each on a connection of its own; the broker's answers.

        With `then="silence"` the old connections go on instead, and nothing is returned.
        """
        if self.then == "silence":
            for link in self._links:
                link.go_on.set()
            return []
        return [_ask(self._target, request.frame) for request in self.requests]


class KafkaProxy:
    """Connections to `address` go to the broker at `target`. Open from the beginning."""

    def __init__(self, target: str, beside: Sequence[KafkaProxy] = (), names: int = 1) -> None:
        """`names`: under how many addresses of this machine it can be reached."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._names = names
        self._listeners = [socket.create_server((_HOST, 0), backlog=128)]
        self.port: int = self._listeners[0].getsockname()[1]
        for number in range(2, names + 1):
            self._listeners.append(socket.create_server((f"127.0.0.{number}", self.port), backlog=128))
        self._aliases = {self._bytes(self._target[1]): self._bytes(self.port)}
        for other in beside:
            self._aliases.update(other._aliases)
            other._aliases.update(self._aliases)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._rules: list[Caught] = []
        self._delays: dict[int | None, float] = {}
        self._answers: dict[int, Callable[[Request], bytes | None]] = {}
        self._changes: dict[int, Callable[[bytes], bytes]] = {}
        self.seen: dict[int, int] = {}  # requests of each API so far
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    @property
    def address(self) -> str:
        """What clients are given: a list, if it has several names."""
        return ",".join(f"127.0.0.{number}:{self.port}" for number in range(1, self._names + 1))

    def catch(
        self,
        api: int,
        *,
        times: int = 1,
        then: Then = "fin",
        on: On = "request",
        where: Where = lambda _: True,
    ) -> Caught:
        """Hold the next requests of this API, or swallow their answers, and do to the client's connection as said."""
        caught = Caught(api, times, then, on, where, _target=self._target)
        with self._lock:
            self._rules.append(caught)
        return caught

    def delay(self, seconds: float, api: int | None = None) -> None:
        """From now on answers, of this API or of all, arrive that much later; pipelined, as over a long way."""
        self._delays[api] = seconds

    def answer(self, api: int, make: Callable[[Request], bytes | None] | None) -> None:
        """Answer in the broker's place: `make` returns the body behind the header, or None to let the request pass.

        `make=None` ends that. Only APIs and versions whose answers have no tags in the header.
        """
        if make is None:
            self._answers.pop(api, None)
        else:
            self._answers[api] = make

    def change(self, api: int, how: Callable[[bytes], bytes] | None) -> None:
        """The broker's answers to this API become what `how` makes of them, length in front; None ends that."""
        if how is None:
            self._changes.pop(api, None)
        else:
            self._changes[api] = how

    def name_no_broker(self, seconds: float, over: Callable[[], object] = lambda: True) -> None:
        """Cut, and answer that there is no broker, for so long and until it is `over`, or for three times as long.

        In 20 s some 20 of 24 consumers had dropped their last one, if the proxy had ten names. A few never do.
        """
        nameless, began = Brokerless(), time.monotonic()
        self.change(METADATA, nameless)
        self.cut()
        longest = began + 3 * seconds
        eventually(
            lambda: time.monotonic() > longest or (time.monotonic() > began + seconds and over()),
            3 * seconds + 30,
            "the end of the time without brokers",
        )
        self.change(METADATA, None)
        assert nameless.told

    def cut(self, *, reset: bool = False) -> None:
        """End every connection, the broker's side too; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.end_near(reset=reset)
            link.end_far()

    def heal(self) -> None:
        """No rule, delay or answer any more; what is held stays so."""
        with self._lock:
            self._rules.clear()
        self._delays.clear()
        self._answers.clear()
        self._changes.clear()

    def __enter__(self) -> KafkaProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    # -- for links

    def rule_for(self, request: Request, on: On) -> Caught | None:
        """The rule that catches it, used up by one; the caller notes what it has caught."""
        with self._lock:
            for rule in self._rules:
                if rule.api == request.api and rule.on == on and rule.where(request):
                    rule.times -= 1
                    if not rule.times:
                        self._rules.remove(rule)
                    return rule
        return None

    def made_answer(self, request: Request) -> bytes | None:
        make = self._answers.get(request.api)
        body = make(request) if make is not None else None
        if body is None:
            return None
        return struct.pack(">ii", 4 + len(body), request.correlation) + body

    def changed(self, api: int, frame: bytes) -> bytes:
        how = self._changes.get(api)
        return frame if how is None else how(frame)

    def delay_of(self, api: int) -> float:
        return self._delays.get(api, self._delays.get(None, 0.0))

    def renamed(self, frame: bytes) -> bytes:
        for real, ours in list(self._aliases.items()):
            frame = frame.replace(real, ours)
        return frame

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def count(self, request: Request) -> None:
        with self._lock:
            self.seen[request.api] = self.seen.get(request.api, 0) + 1

    @staticmethod
    def _bytes(port: int) -> bytes:
        return _HOST.encode() + struct.pack(">i", port)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            link = _Link(self, near, far)
            with self._lock:
                self._links.add(link)
            link.start()


class _Link:
    """A client's connection and ours to the broker."""

    def __init__(self, proxy: KafkaProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy, self._near, self._far = proxy, near, far
        self._open: dict[int, Request] = {}  # sent on, not answered
        self.go_on = threading.Event()  # of a link that fell silent
        self._due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for work in (self._requests, self._responses, self._deliver):
            threading.Thread(target=work, daemon=True).start()

    def end_near(self, *, reset: bool = False) -> None:
        with contextlib.suppress(OSError):
            if reset:
                self._near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                libc_connect_unspec(self._near)  # RST at once, also while another thread is blocked in recv on it
            else:
                self._near.shutdown(socket.SHUT_RDWR)
        self._near.close()
        self._due.put((0.0, b""))

    def end_far(self) -> None:
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        self._far.close()
        self.go_on.set()
        self._proxy.forget(self)

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            while frame := read_frame(self._near):
                request = Request.read(frame)
                self._proxy.count(request)
                rule = self._proxy.rule_for(request, "request")
                if rule is not None and not self._caught(rule, request):
                    return  # the broker's side stays open: it has not heard of anything
                made = self._proxy.made_answer(request)
                if made is not None:
                    self._due.put((time.monotonic() + self._proxy.delay_of(request.api), made))
                    continue
                self._open[request.correlation] = request
                self._far.sendall(frame)
        self.end_far()

    def _responses(self) -> None:
        with contextlib.suppress(OSError):
            while frame := read_frame(self._far):
                request = self._open.pop(struct.unpack_from(">i", frame, 4)[0], None)
                rule = self._proxy.rule_for(request, "answer") if request is not None else None
                if rule is not None and request is not None and not self._caught(rule, request):
                    break
                delay_s = self._proxy.delay_of(request.api) if request is not None else 0.0
                frame = self._proxy.changed(request.api, frame) if request is not None else frame
                self._due.put((time.monotonic() + delay_s, self._proxy.renamed(frame)))
        self.end_near()

    def _caught(self, rule: Caught, request: Request) -> bool:
        """True: it may go on its way, later than it should have."""
        if rule.then != "silence":
            self.end_near(reset=rule.then == "rst")
        rule._links.append(self)
        rule.requests.append(request)
        if rule.then != "silence":
            return False
        self.go_on.wait()
        return True

    def _deliver(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, frame = self._due.get()
                if not frame:
                    return
                time.sleep(max(0.0, due - time.monotonic()))
                self._near.sendall(frame)


class _FirstAnswers:
    """The first `times` answers that tell of a topic are changed; `told` counts them."""

    def __init__(self, topic: str, times: int = 1) -> None:
        self._name, self._times = topic.encode(), times
        self.told = 0

    def __call__(self, frame: bytes) -> bytes:
        at = frame.find(self._name)
        if at < 0 or self.told == self._times:
            return frame
        self.told += 1
        return self._changed(frame, at + len(self._name))

    def _changed(self, frame: bytes, at: int) -> bytes:
        """The answer instead of this one, in which the topic's name ends at this place."""
        raise NotImplementedError


class Leaderless(_FirstAnswers):
    """For `change(METADATA, …)`, version 10 or later: the partition that is told first has no leader."""

    def _changed(self, frame: bytes, at: int) -> bytes:
        at += 16 + 1 + 1 + 2 + 4  # the topic's id, whether it is internal, how many partitions; an error and a number
        return frame[:at] + struct.pack(">i", -1) + frame[at + 4 :]


class Brokerless:
    """For `change(METADATA, …)`, version 9 or later: there are topics, and no brokers. `told` counts these answers."""

    def __init__(self) -> None:
        self.told = 0

    def __call__(self, frame: bytes) -> bytes:
        self.told += 1
        return without_brokers(frame)


class Misled(_FirstAnswers):
    """For `change(LIST_OFFSETS, …)`, version 6 or later: another broker leads the partition."""

    def _changed(self, frame: bytes, at: int) -> bytes:
        at += 1 + 4  # how many partitions, and the first one's number
        return frame[:at] + struct.pack(">h", 6) + frame[at + 2 :]


def _ask(target: tuple[str, int], frame: bytes) -> bytes:
    with socket.create_connection(target, timeout=_WAIT_S) as connection:
        connection.sendall(frame)
        return read_frame(connection)
