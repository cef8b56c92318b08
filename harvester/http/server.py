"""Serves HTTP over TCP and over Unix sockets; clients can only hold up each other.

`Router` maps a request to a response. `HttpServer` accepts connections on one thread and serves each on a thread of its
own. It limits their number, how long a client may be idle or take to read, and optionally how long a connection may
last; clients beyond the limit are turned away at once. `WebServer` listens on `http.listen`; `harvester.control.server`
has the server for the control socket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

Trouble = Callable[[str | None], None]

MAX_BODY_BYTES = 1 << 14
_TRY_AGAIN_S = 5.0
_LOOK_S = 0.25
_ENDS_WITHIN_S = 2.0
_LATER = "try again later"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `path` without its query, `peer` as the log names the client."""

    method: str
    path: str
    body: bytes = b""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """A response. An iterator as body is sent piece by piece, and its end closes the connection."""

    code: int
    content_type: str
    body: bytes | Iterator[bytes]
    may_idle: bool = False  # the client waits on this connection until the server ends

    @classmethod
    def text(cls, code: int, text: str) -> Response:
        """Plain text."""
        return cls(code, "text/plain; charset=utf-8", text.encode())

    @classmethod
    def json(cls, code: int, value: object, *, may_idle: bool = False) -> Response:
        """Plain values as one line of JSON."""
        return cls(code, "application/json", json_line(value), may_idle)

    @classmethod
    def problem(cls, code: int, error: str, hint: str | None = None) -> Response:
        """An error and a hint, as JSON."""
        return cls.json(code, {"error": error, "hint": hint})


def json_line(value: object) -> bytes:
    """One line of ASCII JSON: lone surrogates are escaped, too."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


Route = Callable[[Request], Response]


class Router:
    """Answers requests by method and path. Called by several threads at once."""

    def __init__(self, routes: Mapping[tuple[str, str], Route]) -> None:
        self._routes = routes

    def answer(self, request: Request) -> Response:
        """The route's response; 405 for another method, 404 with the existing paths."""
        route = self._routes.get((request.method, request.path))
        if route is not None:
            return route(request)
        methods = sorted(method for method, path in self._routes if path == request.path)
        if methods:
            return Response.problem(405, f"{request.path} only accepts {' or '.join(methods)}")
        return Response.text(404, "".join(f"{path}\n" for path in self.paths()))

    def paths(self) -> list[str]:
        """The existing paths, without those of files that a page loads."""
        return list(dict.fromkeys(path for _, path in self._routes if "." not in path))


class HttpServer(threading.Thread):
    """Serves the clients of one listening socket. Subclasses create it and set the limits."""

    most_clients = 8
    drops_oldest = False  # to make room for one more; otherwise that one is refused
    idle_s = 10.0  # for the next request to arrive
    takes_s = 10.0  # for the client to read a response
    longest_s: float | None = 10.0  # for a whole connection
    protocol = "HTTP/1.0"

    def __init__(self, name: str, router: Router) -> None:
        super().__init__(name=name, daemon=True)
        self.router = router
        self.ended = threading.Event()
        self._clients: dict[socket.socket, tuple[threading.Thread, float]] = {}
        self._lock = threading.Lock()

    def admit(self, client: socket.socket) -> tuple[str, Response | None]:
        """How to call a client in the log, and a refusal if it is not to be served."""
        return "", None

    def refusal_of_host(self, host: str) -> Response | None:
        """The response to requests with this Host header, if they are to be refused."""
        return None

    def cannot_accept(self, error: Exception) -> None:
        """Called when a client could not be served for lack of descriptors, threads or memory."""

    def serve(self, listening: socket.socket) -> None:
        """Accept clients until `stop`."""
        look_s = None if self.longest_s is None else _LOOK_S
        while not self.ended.is_set():
            try:
                listening.settimeout(look_s)
                client, _ = listening.accept()
            except TimeoutError:
                pass
            except OSError as error:
                if not self.ended.wait(0.1):
                    self.cannot_accept(error)
            else:
                self._let_in(client)
            if self.longest_s is not None:
                self._hang_up(self.longest_s)
        self._hang_up(0.0)

    def stop(self) -> None:
        """Disconnect all clients and end all threads."""
        self.ended.set()
        self._hang_up(0.0)
        with self._lock:
            threads = [self, *(thread for thread, _ in self._clients.values())]
        deadline = time.monotonic() + _ENDS_WITHIN_S
        for thread in threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _let_in(self, client: socket.socket) -> None:
        peer, refusal = self.admit(client)
        with self._lock:
            if refusal is None and len(self._clients) >= self.most_clients and self.drops_oldest:
                self._drop_oldest()
            elif refusal is None and len(self._clients) >= self.most_clients:
                refusal = Response.problem(503, f"{self.most_clients} clients are already connected", _LATER)
            if refusal is None:
                thread = threading.Thread(
                    target=self._serve_client, args=(client, peer), name=f"{self.name}-client", daemon=True
                )
                self._clients[client] = (thread, time.monotonic())
                try:
                    thread.start()
                    return
                except RuntimeError as error:  # no thread or memory left: the next client may have more luck
                    del self._clients[client]
                    self.cannot_accept(error)
                    text = f"the harvester has no thread for one more client: {error}"
                    refusal = Response.problem(503, text, _LATER)
        client.setblocking(False)
        with client, contextlib.suppress(OSError):
            client.send(_unasked(refusal))

    def _serve_client(self, client: socket.socket, peer: str) -> None:
        try:
            _Handler(client, peer, self)  # type: ignore[arg-type]  # serves it in its constructor
        except (OSError, ValueError):  # it is gone, was too slow, or does not speak HTTP
            pass
        finally:
            with self._lock:
                self._clients.pop(client, None)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            client.close()

    def _drop_oldest(self) -> None:
        """Disconnect the client that has been connected longest; the lock is held."""
        oldest = min(self._clients, key=lambda client: self._clients[client][1])
        del self._clients[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _hang_up(self, older_s: float) -> None:
        """Shut down connections open for longer than `older_s`; their threads then see the end."""
        now = time.monotonic()
        with self._lock:
            old = [client for client, (_, since) in self._clients.items() if now - since >= older_s]
        for client in old:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer  # type: ignore[assignment]
    client_address: str  # type: ignore[assignment]
    server_version, sys_version = "harvester", ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    _may_idle = False

    def setup(self) -> None:
        self.protocol_version = self.server.protocol
        self.connection: socket.socket = self.request
        self.connection.settimeout(self.server.idle_s)
        super().setup()

    def do_GET(self) -> None:
        """Answer any request that is routed."""
        response = self._response()
        self.connection.settimeout(self.server.takes_s)
        self.send_response(response.code)
        self.send_header("Content-Type", response.content_type)
        if isinstance(response.body, bytes):
            self.send_header("Content-Length", str(len(response.body)))
        if not isinstance(response.body, bytes) or self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            for part in [response.body] if isinstance(response.body, bytes) else response.body:
                self.wfile.write(part)
        self._may_idle |= response.may_idle
        self.connection.settimeout(None if self._may_idle else self.server.idle_s)

    do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server looks for

    def _response(self) -> Response:
        length = self.headers.get("Content-Length", "0")
        if len(length) > 8 or not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return Response.problem(400, "a request's body needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            return Response.problem(413, f"a request's body is longer than {MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(length))
        refusal = self.server.refusal_of_host(self.headers.get("Host", "localhost"))
        if refusal is not None:
            return refusal
        method = "GET" if self.command == "HEAD" else self.command
        try:
            return self.server.router.answer(Request(method, self.path.partition("?")[0], body, self.client_address))
        except Exception as error:  # noqa: BLE001 - the top frame of a request; the relay is not affected
            return Response.problem(500, f"internal error: {error!r}")

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the inherited name
        """Log no requests."""


def _unasked(response: Response) -> bytes:
    """A whole response, for a client whose request has not been read."""
    assert isinstance(response.body, bytes)
    head = (
        f"HTTP/1.0 {response.code} {HTTPStatus(response.code).phrase}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + response.body


class WebServer(HttpServer):
    """Listens on a TCP address, and retries while it is taken: that is no reason to stop.

    Clients that hold connections open without a request must not keep out the probes of a service manager.
    """

    drops_oldest = True

    def __init__(
        self,
        host: str,
        port: int,
        router: Router,
        trouble: Trouble,
        say: Callable[[str], None] = lambda _text: None,
        *,
        longest_s: float = 10.0,
    ) -> None:
        """`trouble` is called with why it does not listen, and with None when it does; `say` receives log lines."""
        super().__init__("harvester-http", router)
        self._host, self._port, self.longest_s = host, port, longest_s
        self._trouble, self._say = trouble, say
        self._only_local = False
        self.address: str | None = None  # HOST:PORT while it listens
        self.listening = threading.Event()

    def run(self) -> None:
        """The thread."""
        while not self.ended.is_set():
            try:
                listening = self._listen()
            except (OSError, UnicodeError) as error:  # the latter for a host's name
                where, why = _shown(self._host, self._port), getattr(error, "strerror", None) or error
                self._trouble(f"cannot listen on {where}: {why}; everything else continues")
                self.ended.wait(_TRY_AGAIN_S)
                continue
            with listening:
                host, port = listening.getsockname()[:2]
                self.address, self._only_local = _shown(host, port), ipaddress.ip_address(host).is_loopback
                self._trouble(None)
                first, *others = self.router.paths()
                below = f" and {', '.join(path[1:] for path in others)} below it" if others else ""
                self._say(f"serving http://{self.address}{first}{below}")
                self.listening.set()
                self.serve(listening)
            self.address = None

    def refusal_of_host(self, host: str) -> Response | None:
        """A web page could resolve its own name to this machine's address, and read what is not meant for it."""
        if self._only_local and not _is_local(host):
            return Response.text(403, "this server only answers requests to localhost or to addresses\n")
        return None

    def _listen(self) -> socket.socket:
        family, _, _, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(16)
        except OSError:
            listening.close()
            raise
        return listening


def _shown(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _is_local(host: str) -> bool:
    """Whether a Host header is an address or localhost."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
