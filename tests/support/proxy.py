"""A TCP proxy that can be cut and healed, and whose port refuses connections until it is opened.

In front of Kafka it also changes the broker's address in every answer to its own: a client would otherwise learn the
real one and go around the proxy. An address travels as the host's text followed by the port as an int32, in all
versions of all answers that have one, so it can be replaced in place.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16


class Proxy:
    """Connections to `port` go to `target` ("host:port") while it is open. Closed at first."""

    def __init__(self, target: str, *, kafka: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        # Bound and never listening: it keeps the port for us and makes the kernel refuse connections.
        self._reservation = self._bound(0)
        self.port: int = self._reservation.getsockname()[1]
        self._rewrite: Callable[[bytes], bytes] | None = None
        if kafka:
            real, ours = (f"{_HOST}".encode() + struct.pack(">i", number) for number in (int(port), self.port))
            self._rewrite = lambda frame: frame.replace(real, ours)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._links: set[socket.socket] = set()

    @property
    def address(self) -> str:
        """What clients are given."""
        return f"{_HOST}:{self.port}"

    def open(self) -> None:
        """Let connections through."""
        with self._lock:
            self._listener = self._bound(self.port)
            self._listener.listen(128)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        with self._lock:
            listener, self._listener = self._listener, None
            links, self._links = self._links, set()
        if listener is not None:
            _break(listener)
        for link in links:
            _break(link)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._reservation.close()

    def _bound(self, port: int) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((_HOST, port))
        return bound

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
            with self._lock:
                if self._listener is not listener:
                    near.close()
                    far.close()
                    return
                self._links |= {near, far}
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self._rewrite), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, rewrite: Callable[[bytes], bytes] | None) -> None:
        try:
            if rewrite is None:
                while data := source.recv(_CHUNK_BYTES):
                    sink.sendall(data)
            else:
                while frame := _frame(source):
                    sink.sendall(rewrite(frame))
        except OSError:
            pass
        finally:
            with self._lock:
                self._links -= {source, sink}
            _break(source)
            _break(sink)


def _frame(source: socket.socket) -> bytes:
    """One answer of a broker, its length in front; empty at the end."""
    head = _exactly(source, 4)
    return head + _exactly(source, struct.unpack(">i", head)[0]) if head else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        data = source.recv(min(size, _CHUNK_BYTES))
        if not data:
            return b""
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _break(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
