"""A small HTTP server whose clients can hold up nobody but each other.

One thread accepts; each connection is served by a thread of its own, eight at most, and ended after ten seconds,
whatever it does or does not do. Who comes when all are busy is sent away. An address that is taken is no reason for a
relay to stop: it is reported as a trouble, and tried again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from harvester.http.pages import Response

Trouble = Callable[[str | None], None]
Respond = Callable[[str], Response]

MOST_CONNECTIONS = 8
LONGEST_S = 10.0
_TRY_AGAIN_S = 5.0
_LOOK_S = 0.25
_STOP_WITHIN_S = 2.0
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WebServer(threading.Thread):
    """See the module's text. `respond` is called with a path, by many threads at once."""

    def __init__(
        self,
        host: str,
        port: int,
        respond: Respond,
        trouble: Trouble,
        say: Callable[[str], None] = lambda _text: None,
        *,
        longest_s: float = LONGEST_S,
    ) -> None:
        super().__init__(name="harvester-http", daemon=True)
        self._host, self._port, self._longest_s = host, port, longest_s
        self._respond, self._trouble, self._say = respond, trouble, say
        self._ended = threading.Event()
        self._server: _Server | None = None
        self.listening = threading.Event()

    @property
    def address(self) -> str | None:
        """HOST:PORT where it listens; None while it does not."""
        server = self._server
        return _shown(server.server_address[0], server.server_port) if server is not None else None

    def stop(self) -> None:
        """End it; connections that are open are cut."""
        self._ended.set()
        if self.is_alive():
            self.join(_STOP_WITHIN_S)

    def run(self) -> None:
        """The thread."""
        while not self._ended.is_set():
            try:
                self._server = _Server(self._host, self._port, self._respond)
            except OSError as error:
                where = _shown(self._host, self._port)
                self._trouble(f"cannot listen on {where}: {error.strerror or error}; the relay goes on without")
                self._ended.wait(_TRY_AGAIN_S)
                continue
            self._trouble(None)
            self._say(f"serves http://{self.address}/ and metrics, status, healthz, readyz, leader below it")
            self.listening.set()
            with self._server as server:
                while not self._ended.is_set():
                    server.handle_request()
                    server.cut(self._longest_s)
            server.cut(0.0)
            self._server = None


class _Server(HTTPServer):
    request_queue_size = 16
    timeout = _LOOK_S  # of one wait for a connection

    def __init__(self, host: str, port: int, respond: Respond) -> None:
        self.respond = respond
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self.only_local = _is_loopback(str(address[0]))
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the machine's name that HTTPServer makes, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the accepting thread: hand it to a thread of its own, or send it away."""
        if not self._room.acquire(blocking=False):
            request.setblocking(False)
            with contextlib.suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            threading.Thread(
                target=self._serve, args=(request, client_address), name="harvester-http-client", daemon=True
            ).start()
        except RuntimeError:  # no thread to be had
            self._over(request)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except (OSError, ValueError):  # it went away, was too slow, or speaks no HTTP
            pass
        finally:
            self._over(request)

    def _over(self, request: Any) -> None:
        self._open.pop(request, None)
        self.shutdown_request(request)
        self._room.release()

    def cut(self, older_s: float) -> None:
        """End connections that have been open for so long; their threads then see the end."""
        now = time.monotonic()
        for request, since in list(self._open.items()):
            if now - since >= older_s:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = LONGEST_S
    server_version, sys_version = "harvester", ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        """The whole answer."""
        answer = self._answer()
        self._begin(answer)
        self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        """Its first part."""
        self._begin(self._answer())

    def _answer(self) -> Response:
        # A page of the web could give its own name this machine's address, and read what is meant for this machine.
        if self.server.only_local and not _is_local(self.headers.get("Host", "localhost")):
            return Response.text(403, "this address answers to localhost and to addresses only\n")
        try:
            return self.server.respond(self.path.partition("?")[0])
        except Exception as error:  # noqa: BLE001 - the top frame of a request; the relay has nothing to do with it
            return Response.text(500, f"internal error: {error!r}\n")

    def _begin(self, answer: Response) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that it has
        """Nothing: who asks is nobody's news."""


def _shown(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine by an address or as localhost."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
