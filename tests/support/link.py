"""One connection through the proxy: two directions, each of which may be slow, stopped or deaf.

What happens to bytes is asked of `Conduct` when they come, so one object changes all links of a proxy at once.

In front of Kafka requests of one kind may be held back (`Keeping`), and with them all that the client says behind them
on the same connection. The client may go away meanwhile: what it said arrives all the same, as in a network that
retransmits.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 1 << 16
Asked = tuple[int, ...]  # of a request to Kafka: which API, and its version


@dataclass
class Conduct:
    """How one direction of a proxy treats bytes: delayed, throttled, held back (`flowing` cleared), swallowed."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    deaf: bool = False
    flowing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.flowing.set()


class Keeping:
    """Holds back Kafka requests of one kind, by its API key, until `released`; of those that come after `full` none.

    `loses_dead`: the requests of a process that has ended meanwhile are lost with it.
    """

    def __init__(self, api: int, *, loses_dead: bool = False) -> None:
        self.api, self.loses_dead = api, loses_dead
        self.full = False
        self.released = threading.Event()
        self.links: set[Link] = set()  # that hold something back

    def concerns(self, request: bytes) -> bool:
        """Whether this is such a request, its length in front."""
        return not (self.full or self.released.is_set()) and struct.unpack_from(">h", request, 4) == (self.api,)


@dataclass
class Trap:
    """Breaks `times` links within an answer: once `after_bytes` of it have passed. `sprung` counts."""

    after_bytes: int
    times: int = 1
    sprung: int = 0

    def allows(self, bytes_of_answer: int) -> bool:
        """Whether this much of an answer may pass."""
        return self.sprung >= self.times or bytes_of_answer < self.after_bytes


class Link:
    """A client's connection and ours to the server. `closed` is called once, when either side has ended."""

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        up: Conduct,
        down: Conduct,
        trap: Callable[[], Trap | None],
        keeping: Callable[[], Keeping | None],
        rewrite: Callable[[Asked, bytes], bytes] | None,
        closed: Callable[[Link], None],
    ) -> None:
        self._near, self._far = near, far
        self._trap, self._keeping, self._rewrite, self._closed = trap, keeping, rewrite, closed
        self._keeps = self._kept = False  # something of the client's is held back now; has ever been
        self._left = False  # the client was cut off from what is held back
        self._answered = 0  # bytes of answer since the client last said anything
        self._said = b""  # what was read of the client last
        self._has_answer = False  # that is held back
        self._asked: deque[Asked] = deque()  # and not answered; a broker answers in order
        self._ended = threading.Event()
        self._lock = threading.Lock()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, conduct, answers in ((near, far, up, False), (far, near, down, True)):
            held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, conduct, held, answers), daemon=True).start()
            threading.Thread(target=self._write, args=(sink, conduct, held, answers), daemon=True).start()

    def end(self, *, reset: bool = False) -> None:
        """Break it; with `reset` both sides see RST, as if the peer had forgotten the connection."""
        with self._lock:
            if self._ended.is_set():
                return
            self._left = self._keeps
            if not self._left:
                self._ended.set()
        _close(self._near, reset=reset)
        if not self._left:
            _close(self._far, reset=reset)
            self._closed(self)

    def holds(self, text: bytes) -> bool:
        """Whether the client has said this; with the way up frozen since before, it has not gone on."""
        unread = b""
        with contextlib.suppress(OSError):
            unread = self._near.recv(_CHUNK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return text in self._said or text in unread

    def holds_answer(self) -> bool:
        """True if an answer has arrived and is held back; the way down must be frozen."""
        unread = b""
        with contextlib.suppress(OSError):
            unread = self._far.recv(_CHUNK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return self._has_answer or bool(unread)

    def _read(
        self, source: socket.socket, conduct: Conduct, held: queue.SimpleQueue[tuple[float, bytes]], answers: bool
    ) -> None:
        swallowed = False
        try:
            while not self._ended.is_set():
                self._hold(conduct)
                data = read_frame(source) if self._rewrite else source.recv(_CHUNK_BYTES)
                if not data:
                    break
                # A stream with a hole is none: a link that has swallowed something stays deaf.
                swallowed = swallowed or conduct.deaf
                if swallowed:
                    continue
                if not answers:
                    self._answered, self._said = 0, data
                    if self._rewrite:
                        self._asked.append(struct.unpack_from(">hh", data, 4))
                elif self._rewrite:
                    data = self._rewrite(self._asked.popleft(), data)
                held.put((time.monotonic() + conduct.delay_s, data))
        except OSError:
            pass
        held.put((time.monotonic() + conduct.delay_s, b""))

    def _write(
        self, sink: socket.socket, conduct: Conduct, held: queue.SimpleQueue[tuple[float, bytes]], answers: bool
    ) -> None:
        try:
            while True:
                due, data = held.get()
                self._ended.wait(max(0.0, due - time.monotonic()))
                self._has_answer |= answers and bool(data) and not conduct.flowing.is_set()
                self._hold(conduct)
                self._has_answer &= not answers
                if not data:
                    break
                if answers and self._springs(sink, data):
                    self.end(reset=True)
                    return
                if not answers and self._rewrite:
                    self._keep(data)
                if answers and self._left:
                    continue  # nobody is there to be answered
                if conduct.bytes_per_s is None:
                    sink.sendall(data)
                else:
                    self._trickle(sink, data, conduct.bytes_per_s)
        except OSError:
            pass
        if not answers and self._kept:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)  # the server answers what has come, and hangs up
            return
        self.end()

    def _keep(self, request: bytes) -> None:
        keeping = self._keeping()
        if keeping is None or not keeping.concerns(request):
            return
        with self._lock:
            self._keeps = self._kept = True
        owner = _owner(self._near) if keeping.loses_dead else None
        keeping.links.add(self)
        keeping.released.wait()
        if owner is not None and not owner.exists():
            raise ConnectionAbortedError("the process that sent it has ended")
        with self._lock:
            self._keeps = False

    def _springs(self, sink: socket.socket, data: bytes) -> bool:
        trap = self._trap()
        before, self._answered = self._answered, self._answered + len(data)
        if trap is None or trap.allows(self._answered):
            return False
        sink.sendall(data[: max(0, trap.after_bytes - before)])
        trap.sprung += 1
        return True

    def _trickle(self, sink: socket.socket, data: bytes, bytes_per_s: float) -> None:
        step = max(1, int(bytes_per_s / 50))
        for start in range(0, len(data), step):
            part = data[start : start + step]
            sink.sendall(part)
            if self._ended.wait(len(part) / bytes_per_s):
                return

    def _hold(self, conduct: Conduct) -> None:
        while not conduct.flowing.wait(0.2) and not self._ended.is_set():
            pass


def _owner(near: socket.socket) -> Path | None:
    """The process at the other end of a connection within this machine, as its directory in /proc."""

    def hexed(address: tuple[str, int]) -> str:
        return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"

    ends = [hexed(near.getpeername()), hexed(near.getsockname())]
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    wanted = {f"socket:[{line[9]}]" for line in lines if line[1:3] == ends}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) in wanted for file in (process / "fd").iterdir()):
                return process
    return None


def _close(end: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            end.shutdown(socket.SHUT_RDWR)
    if reset:
        _wake_and_close(end)
    else:
        end.close()


def _wake_and_close(end: socket.socket) -> None:
    # close alone sends no RST while another thread is blocked in recv on the socket; connecting it to nothing does.
    with contextlib.suppress(OSError):
        libc_connect_unspec(end)
    end.close()


def libc_connect_unspec(end: socket.socket) -> None:
    """connect(2) to AF_UNSPEC: dissolves the connection at once, which for TCP with zero linger is a RST."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    address = struct.pack("=H14x", socket.AF_UNSPEC)
    libc.connect(end.fileno(), address, len(address))


def without_brokers(frame: bytes) -> bytes:
    """An answer to Metadata, version 9 or later, that names no broker; length in front.

    One says so that was fenced, by a controller that did not hear of it for a while, until it is told that it is back:
    it leaves the fenced ones out.
    """
    begin = at = 4 + 4 + 1 + 4  # length and correlation, no tags, how long to wait
    count, at = frame[at] - 1, at + 1
    for _ in range(count):
        at += 4  # the broker's id
        at += frame[at]  # its host; a length is one more than the bytes, and takes one itself
        at += 4  # its port
        at += max(1, frame[at]) + 1  # its rack, and no tags
    body = frame[4:begin] + b"\1" + frame[at:]
    return struct.pack(">i", len(body)) + body


def read_frame(source: socket.socket) -> bytes:
    """One request to a broker or answer of it, its length in front; empty at the end, and where it ends within one."""
    head = _exactly(source, 4)
    body = _exactly(source, struct.unpack(">i", head)[0]) if head else b""
    return head + body if body else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        data = source.recv(min(size, _CHUNK_BYTES))
        if not data:
            return b""
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
