"""A TCP proxy that can be cut and healed, and whose port refuses connections until it is opened.

It can also be slow, hold bytes back, swallow them, reset connections, or break one in the middle of an answer.

In front of Kafka it also changes the broker's address in every answer to its own: a client would otherwise learn the
real one and go around the proxy. An address travels as the host's text followed by the port as an int32, in all
versions of all answers that have one, so it can be replaced in place.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

from .link import Asked, Conduct, Keeping, Link, Trap, without_brokers

_HOST = "127.0.0.1"
_METADATA, _WITH_TAGS = 3, 9  # of Kafka's APIs, and the first version that is read here


class Proxy:
    """Connections to `port` go to `target` ("host:port") while it is open. Closed at first."""

    def __init__(self, target: str, *, kafka: bool = False) -> None:
        self._target = _address(target)
        # Bound and never listening: it keeps the port for us and makes the kernel refuse connections.
        self._reservation = self._bound(0)
        self.port: int = self._reservation.getsockname()[1]
        self._rewrite: Callable[[Asked, bytes], bytes] | None = None
        self._nameless = False
        if kafka:
            real, ours = (f"{_HOST}".encode() + struct.pack(">i", number) for number in (self._target[1], self.port))

            def rewrite(asked: Asked, frame: bytes) -> bytes:
                api, version = asked
                if self._nameless and api == _METADATA and version >= _WITH_TAGS:
                    frame = without_brokers(frame)
                return frame.replace(real, ours)

            self._rewrite = rewrite
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._links: set[Link] = set()
        self._up, self._down = Conduct(), Conduct()
        self._trap: Trap | None = None
        self._keeping: Keeping | None = None
        self._delivering: set[Link] = set()

    @property
    def address(self) -> str:
        """What clients are given."""
        return f"{_HOST}:{self.port}"

    @property
    def links(self) -> int:
        """How many connections there are."""
        return len(self._links)

    def retarget(self, target: str) -> None:
        """Lead the connections that come from now on somewhere else: a fail-over. Not in front of Kafka."""
        assert self._rewrite is None
        self._target = _address(target)

    def open(self) -> None:
        """Let connections through."""
        with self._lock:
            self._listener = self._bound(self.port)
            self._listener.listen(128)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self, *, reset: bool = False) -> None:
        """Break every connection and refuse new ones."""
        with self._lock:
            listener, self._listener = self._listener, None
            links = list(self._links)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for link in links:
            link.end(reset=reset)

    def reset(self, rng: random.Random, share: float = 0.5) -> int:
        """Reset (RST) so many of the connections, chosen at random; how many. New ones go on being accepted."""
        with self._lock:
            links = list(self._links)
        chosen = rng.sample(links, max(1, round(share * len(links)))) if links else []
        for link in chosen:
            link.end(reset=True)
        return len(chosen)

    def name_no_broker(self) -> None:
        """Reset every connection, and until `name_brokers` answer that there is no broker. Only in front of Kafka."""
        assert self._rewrite is not None
        self._nameless = True
        with self._lock:
            links = list(self._links)
        for link in links:
            link.end(reset=True)

    def name_brokers(self) -> None:
        """The end of `name_no_broker`."""
        self._nameless = False

    def delay(self, up_s: float = 0.0, down_s: float = 0.0) -> None:
        """From now on everything arrives that much later; up is to the server, down to the client."""
        self._up.delay_s, self._down.delay_s = up_s, down_s

    def throttle(self, bytes_per_s: float | None) -> None:
        """No connection carries more than this in either direction."""
        self._up.bytes_per_s = self._down.bytes_per_s = bytes_per_s

    def freeze(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing moves until `thaw`, and nothing is lost: a network that retransmits, later."""
        for chosen, conduct in ((up, self._up), (down, self._down)):
            if chosen:
                conduct.flowing.clear()

    def holds(self, text: bytes) -> bool:
        """Whether a client has said this since `freeze`; it will arrive after `thaw`, whatever befalls the client."""
        with self._lock:
            links = list(self._links)
        return any(link.holds(text) for link in links)

    def holds_answer(self) -> bool:
        """True if an answer has arrived and is held back; the way down must be frozen."""
        with self._lock:
            links = list(self._links)
        return any(link.holds_answer() for link in links)

    def thaw(self) -> None:
        """The end of `freeze`."""
        self._up.flowing.set()
        self._down.flowing.set()

    def keep(self, api: int, *, loses_dead: bool = False) -> None:
        """Hold back the clients' requests of this kind (a Kafka API key), and what they say behind them, until
        `deliver`. Only in front of Kafka. `loses_dead`: those of processes that have ended by then never arrive.
        """
        assert self._rewrite is not None
        self._keeping = Keeping(api, loses_dead=loses_dead)

    @property
    def kept(self) -> int:
        """On how many connections something has been held back since `keep`."""
        return len(self._keeping.links) if self._keeping is not None else 0

    def pass_on(self) -> None:
        """What is held back stays so; no further request is."""
        if self._keeping is not None:
            self._keeping.full = True

    def abandon(self, *, reset: bool = False) -> None:
        """Break the connections on which something is held back. It arrives with `deliver` all the same; what clients
        say anew is not held back.
        """
        self.pass_on()
        for link in list(self._keeping.links) if self._keeping is not None else ():
            link.end(reset=reset)

    def deliver(self) -> None:
        """The end of `keep`: what was held back arrives."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            self._delivering = keeping.links
            keeping.released.set()

    @property
    def delivered(self) -> bool:
        """Whether the broker has answered what `deliver` released. Of clients that have hung up; others go on."""
        with self._lock:
            return not self._delivering & self._links

    def deafen(self, *, up: bool = True, down: bool = True) -> None:
        """Half-open: connections are kept and accepted, and what is said on them vanishes.

        Those that have lost something stay deaf for ever, also after `hear`: the far end has forgotten them.
        """
        self._up.deaf, self._down.deaf = up, down

    def hear(self) -> None:
        """New connections, and those that lost nothing, work again."""
        self._up.deaf = self._down.deaf = False

    def break_answer(self, after_bytes: int, times: int = 1) -> Trap:
        """Reset the next connections whose server answers at such length in one piece, once so much has passed."""
        self._trap = Trap(after_bytes, times)
        return self._trap

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deliver()
        self.cut()
        self.thaw()
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
                self._links.add(
                    Link(
                        near,
                        far,
                        up=self._up,
                        down=self._down,
                        trap=lambda: self._trap,
                        keeping=lambda: self._keeping,
                        rewrite=self._rewrite,
                        closed=self._forget,
                    )
                )

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)
