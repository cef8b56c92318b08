"""The HTTP server over real sockets: who is slow, silent, too many or from elsewhere holds up nobody."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from harvester.config import Http
from harvester.errors import ConfigurationError
from harvester.http import web_server
from harvester.http.pages import Pages
from harvester.http.server import Request, Response, Route, Router, WebServer
from tests.support.wait import eventually
from tests.unit.http.test_pages import Shown


def router(route: Route | None = None) -> Router:
    """To the pages, or to this for some paths."""
    routes = Pages(Shown()).routes()
    if route is not None:
        routes |= dict.fromkeys([("GET", "/"), ("GET", "/bad"), ("GET", "/healthz")], route)
    return Router(routes)


@contextmanager
def serving(route: Route | None = None, *, host: str = "127.0.0.1", longest_s: float = 60.0) -> Iterator[WebServer]:
    server = WebServer(host, 0, router(route), lambda _text: None, longest_s=longest_s)
    server.start()
    try:
        assert server.listening.wait(30)
        yield server
    finally:
        server.stop()
        assert not server.is_alive()


def ask(server: WebServer, path: str = "/healthz", method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    """Code, all headers as text, body."""
    assert server.address is not None
    connection = http.client.HTTPConnection(server.address, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, str(response.headers), response.read()
    finally:
        connection.close()


def connect(server: WebServer, send: bytes) -> socket.socket:
    assert server.address is not None
    host, _, port = server.address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(send)
    return client


def test_every_answer_forbids_what_the_page_does_not_need() -> None:
    with serving() as server:
        for path in ("/", "/status", "/metrics", "/nowhere"):
            _, headers, _ = ask(server, path)
            assert "default-src 'none'; script-src 'self';" in headers
            assert "X-Content-Type-Options: nosniff" in headers
            assert "Cache-Control: no-store" in headers
            assert "Access-Control-Allow-Origin" not in headers


def test_it_only_answers() -> None:
    with serving() as server:
        assert ask(server)[0] == 200
        assert ask(server, method="HEAD")[2] == b""
        assert ask(server, method="POST")[0] == 405
        for method in ("PUT", "DELETE", "PATCH"):
            assert ask(server, method=method)[0] == 501


def test_a_query_does_not_matter() -> None:
    with serving() as server:
        assert ask(server, "/healthz?x=/status")[2] == b"ok\n"


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:9464", 200),
        ("127.0.0.1", 200),
        ("[::1]:9464", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
    ],
)
def test_another_name_is_refused_where_only_this_machine_is_meant(host: str, code: int) -> None:
    with serving() as server:
        assert ask(server, Host=host)[0] == code


def test_any_name_will_do_where_everybody_may_ask() -> None:
    with serving(host="0.0.0.0") as server:
        assert ask(server, Host="db1.internal:9464")[0] == 200


def test_silent_clients_hold_up_nobody() -> None:
    """All places are taken: a request is answered all the same, and only the oldest client loses its place for it."""
    with serving() as server, ExitStack() as clients:
        oldest, *others = [
            clients.enter_context(connect(server, b"GET /healthz HT")) for _ in range(WebServer.most_clients)
        ]
        assert ask(server)[0] == 200
        assert oldest.recv(1) == b""
        for client in others:
            client.sendall(b"TP/1.0\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.0 200"


def test_a_client_that_sends_a_byte_now_and_then_is_cut() -> None:
    with serving(longest_s=0.5) as server, connect(server, b"GET /metrics HTTP/1.0\r\n") as client:

        def is_cut() -> bool:
            try:
                client.sendall(b"X")
                client.setblocking(False)
                return client.recv(1) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True
            finally:
                client.settimeout(30)

        eventually(is_cut, interval_s=0.05, what="the end of the connection")


def test_a_client_that_does_not_read_is_cut() -> None:
    size = 50_000_000
    big = Response.text(200, "x" * size)
    asked = threading.Event()

    def respond(_request: Request) -> Response:
        asked.set()
        return big

    with serving(respond, longest_s=0.5) as server, connect(server, b"GET / HTTP/1.0\r\n\r\n") as client:
        assert asked.wait(30)
        eventually(lambda: not server._clients, what="the end of the connection")
        received = 0
        try:
            while part := client.recv(1 << 20):
                received += len(part)
        except OSError:
            pass
        assert received < size


@pytest.mark.parametrize(
    "garbage", [b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET " + b"x" * 70_000, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_does_no_harm(garbage: bytes) -> None:
    with serving() as server:
        with connect(server, garbage) as client:
            client.shutdown(socket.SHUT_WR)
            try:
                while client.recv(65_536):
                    pass
            except ConnectionResetError:
                pass
        assert ask(server)[0] == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "1" * 20}, 400),
        ({"Transfer-Encoding": "chunked"}, 400),
        ({"Content-Length": "99999"}, 413),
    ],
)
def test_a_body_without_a_length_or_too_long_is_refused(headers: dict[str, str], code: int) -> None:
    with serving() as server:
        assert ask(server, method="GET", **headers)[0] == code


def test_an_error_of_a_page_is_its_own() -> None:
    def respond(request: Request) -> Response:
        if request.path == "/healthz":
            return Response.text(200, "ok")
        raise KeyError(request.path)

    with serving(respond) as server:
        assert ask(server, "/bad")[0] == 500
        assert ask(server)[0] == 200


def test_an_address_that_is_taken_is_tried_again() -> None:
    troubles: list[str | None] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = WebServer("127.0.0.1", port, router(), troubles.append)
        server.start()
        eventually(lambda: troubles, what="the trouble")
        assert server.address is None
    try:
        assert server.listening.wait(60)
        assert ask(server)[0] == 200
        assert troubles[-1] is None
        assert troubles[0] == f"cannot listen on 127.0.0.1:{port}: Address already in use; everything else continues"
    finally:
        server.stop()


def test_a_name_that_cannot_be_looked_up_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harvester.http.server._TRY_AGAIN_S", 0.01)
    troubles: list[str | None] = []
    server = WebServer("a..b", 8080, router(), troubles.append)
    server.start()
    try:
        eventually(lambda: len(troubles) > 1 or not server.is_alive(), what="another try")
        assert server.is_alive()
        assert str(troubles[0]).startswith("cannot listen on a..b:8080: ")
    finally:
        server.stop()


def test_a_server_that_cannot_listen_ends_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = WebServer("127.0.0.1", taken.getsockname()[1], router(), lambda _text: None)
        server.start()
        server.stop()
        assert not server.is_alive()


@pytest.mark.parametrize(
    "listen",
    ["127.0.0.1:9464", "[::1]:9464", "0.0.0.0:80", "db1.internal:1", "localhost:0", "off", f"{'a' * 63}.b_c.:1"],
)
def test_where_to_listen(listen: str) -> None:
    assert Http(listen=listen).listen == listen


@pytest.mark.parametrize(
    "listen",
    ["9464", ":9464", "127.0.0.1", "::1:9464", "127.0.0.1:65536", "http://127.0.0.1:1", "a b:1", "a..b:1", ".a:1",
     ".:1", "a..:1", f"{'a' * 64}:1", f"{'a.' * 127}:1"],
)  # fmt: skip
def test_nowhere_to_listen(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=r"listen: .* is not an address"):
        Http(listen=listen)


def test_without_its_library_the_configuration_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="prometheus-client") as caught:
        web_server("127.0.0.1:0", Shown(), lambda _text: None, lambda _text: None)
    assert caught.value.hint == "pip install 'outbox-harvester[http]'"
