"""A proxy in front of one broker that reads Produce requests and lets one of them be refused, and the next one not.

    with RefusingProxy(bootstrap) as proxy:
        refusal = proxy.refuse(topic, NOT_ENOUGH_REPLICAS)
        ...                                # the first record
        refusal.caught.wait()              # its request is here, and the broker has not seen it
        ...                                # a record of another key, the same partition
        refusal.overtaken.wait()           # its request follows: now the first is refused, then this one let through

The refusal reaches the client before the answer to the second request, as from a broker whose in-sync replicas come
back between the two. `watch` leaves the refusal to the broker: the first request goes through, its answer waits, and so
does the second request, until the test calls `refusal.go.set()`. With `cut` the connection breaks when the broker
answers the second request, so that this answer is lost.

It understands Produce requests of versions 3 to 12 for one partition, which is how librdkafka
makes them. Everything else passes; the broker's address is replaced in its answers, as `tests.support.proxy` does it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from types import TracebackType

from .link import read_frame

NOT_LEADER_OR_FOLLOWER = 6
NOT_ENOUGH_REPLICAS = 19
_PRODUCE = 0
_FLEXIBLE = 9  # from this version of Produce on


@dataclass
class Refusal:
    """What becomes of the first two Produce requests of `topic` for one partition. `error` None: the broker's own."""

    topic: str
    error: int | None
    cut: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    caught: threading.Event = field(default_factory=threading.Event)
    overtaken: threading.Event = field(default_factory=threading.Event)
    held: Produce | None = None
    answered: int | None = None  # the error in the broker's own answer
    second: int | None = None  # correlation id of the request after it


@dataclass(frozen=True)
class Produce:
    """What a Produce request says of itself."""

    version: int
    correlation: int
    topic: str
    partition: int

    def error_of(self, answer: bytes) -> int:
        """The error for the partition in the broker's answer."""
        name = self.topic.encode()
        place = answer.index(name) + len(name) + (1 if self.version >= _FLEXIBLE else 4) + 4
        found: tuple[int] = struct.unpack_from(">h", answer, place)
        return found[0]

    def refused(self, error: int) -> bytes:
        """The broker's answer: this error, and nothing was appended."""
        name = self.topic.encode()
        nowhere = struct.pack(">ihqq", self.partition, error, -1, -1) + (
            struct.pack(">q", -1) if self.version >= 5 else b""
        )
        if self.version >= _FLEXIBLE:
            # Lengths are varints of one more; each structure ends with its (no) tags.
            partition = nowhere + b"\x01\x00\x00"  # no record errors, no message
            body = b"\x00\x02" + _varint(len(name) + 1) + name + b"\x02" + partition + b"\x00" + bytes(4) + b"\x00"
        else:
            errors = struct.pack(">ih", 0, -1) if self.version >= 8 else b""
            head = struct.pack(">ih", 1, len(name)) + name + struct.pack(">i", 1)
            body = head + nowhere + errors + bytes(4)
        answer = struct.pack(">i", self.correlation) + body
        return struct.pack(">i", len(answer)) + answer


class RefusingProxy:
    """See the module's docstring. Connections to `address` go to `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target_port = int(port)
        self._target = (host, self.target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._real, self._ours = (host.encode() + struct.pack(">i", number) for number in (self.target_port, self.port))
        self._lock = threading.Lock()
        self._refusals: list[Refusal] = []
        self._watched: list[Refusal] = []
        self._cutting: list[Refusal] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """What clients are given."""
        return f"127.0.0.1:{self.port}"

    def refuse(self, topic: str, error: int, *, cut: bool = False) -> Refusal:
        """Refuse the next Produce request of this topic."""
        return self._expect(Refusal(topic, error, cut))

    def watch(self, topic: str) -> Refusal:
        """Hold back the broker's answer to the next Produce request of this topic, and the request after it."""
        return self._expect(Refusal(topic, None))

    def _expect(self, refusal: Refusal) -> Refusal:
        with self._lock:
            self._refusals.append(refusal)
        return refusal

    def __enter__(self) -> RefusingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for refusal in self._watched:
            refusal.go.set()
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                writing = threading.Lock()  # answers are the broker's and ours
                threading.Thread(target=self._requests, args=(near, far, writing), daemon=True).start()
                threading.Thread(target=self._answers, args=(near, far, writing), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, writing: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while frame := read_frame(near):
                if not self._intercepted(frame, near, writing):
                    far.sendall(frame)
        far.close()

    def _answers(self, near: socket.socket, far: socket.socket, writing: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while frame := read_frame(far):
                self._hold(frame)
                if self._is_cut(frame):
                    break
                with writing:
                    near.sendall(frame.replace(self._real, self._ours))
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _intercepted(self, frame: bytes, near: socket.socket, writing: threading.Lock) -> bool:
        """Whether the broker does not get this request."""
        request = produce(frame)
        if request is None:
            return False
        with self._lock:
            refusal = next((found for found in self._refusals if found.topic == request.topic), None)
            if refusal is None:
                return False
            if refusal.held is None:
                refusal.held = request
                refusal.caught.set()
                if refusal.error is None:
                    self._watched.append(refusal)
                return refusal.error is not None
            if refusal.held.partition != request.partition:
                return False
            self._refusals.remove(refusal)
            refusal.second = request.correlation
            if refusal.cut:
                self._cutting.append(refusal)
        if refusal.error is not None:
            with writing:
                near.sendall(refusal.held.refused(refusal.error))
        refusal.overtaken.set()
        if refusal.error is None:
            refusal.go.wait()
        return False

    def _is_cut(self, answer: bytes) -> bool:
        """Whether this answer, and with it the connection, is lost."""
        (correlation,) = struct.unpack_from(">i", answer, 4)
        cut = [refusal for refusal in self._cutting if refusal.second == correlation]
        for refusal in cut:
            self._cutting.remove(refusal)
        return bool(cut)

    def _hold(self, answer: bytes) -> None:
        """Wait with the broker's answer to a request that is watched, and note what it says."""
        (correlation,) = struct.unpack_from(">i", answer, 4)
        for refusal in self._watched:
            if refusal.held is not None and refusal.held.correlation == correlation and not refusal.go.is_set():
                refusal.answered = refusal.held.error_of(answer)
                refusal.go.wait()


def produce(frame: bytes) -> Produce | None:
    """The Produce request in this frame; None for any other request."""
    kind, version, correlation, size = struct.unpack_from(">hhih", frame, 4)
    if kind != _PRODUCE:
        return None
    assert 3 <= version <= 12, f"Produce version {version}"
    at = 14 + max(size, 0)  # behind the client's id
    if version < _FLEXIBLE:
        (size,) = struct.unpack_from(">h", frame, at)  # transactional id
        at += 2 + max(size, 0) + 6 + 4  # acks, timeout, number of topics
        (size,) = struct.unpack_from(">h", frame, at)
        at += 2
        topic = frame[at : at + size]
        (partition,) = struct.unpack_from(">i", frame, at + size + 4)
    else:
        at += 1  # no tags
        size, at = _read_varint(frame, at)  # transactional id
        at += max(size - 1, 0) + 6 + 1  # acks, timeout, number of topics
        size, at = _read_varint(frame, at)
        topic = frame[at : at + size - 1]
        (partition,) = struct.unpack_from(">i", frame, at + size - 1 + 1)
    return Produce(version, correlation, topic.decode(), partition)


def _varint(number: int) -> bytes:
    made = b""
    while number > 0x7F:
        made, number = made + bytes([number & 0x7F | 0x80]), number >> 7
    return made + bytes([number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return number, at
