"""The proxy does to a connection what its methods say: the other tests of links rest on that."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.link import read_frame
from tests.support.proxy import Proxy
from tests.support.wait import eventually


@pytest.fixture
def echo() -> Iterator[Proxy]:
    """A proxy in front of a server that sends everything back; what begins with a digit, so many times."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(link: socket.socket) -> None:
            with link:
                try:
                    while data := link.recv(1000):
                        link.sendall(data * int(data[:1] if data[:1].isdigit() else b"1"))
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(link,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with Proxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy:
            proxy.open()
            yield proxy
        server.shutdown(socket.SHUT_RDWR)


def connect(proxy: Proxy) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", proxy.port))
    link.settimeout(10)
    return link


def ask(link: socket.socket, text: bytes, answer: bytes | None = None) -> None:
    link.sendall(text)
    got = b""
    while len(got) < len(answer or text):
        more = link.recv(1000)
        assert more, f"ended after {got!r}"
        got += more
    assert got == (answer or text)


def silent(link: socket.socket, for_s: float = 0.2) -> bool:
    link.settimeout(for_s)
    try:
        return link.recv(1) == b"" and False
    except TimeoutError:
        return True
    finally:
        link.settimeout(10)


def test_it_passes_everything_on_and_refuses_when_cut(echo: Proxy) -> None:
    with connect(echo) as link:
        ask(link, b"hello")
        echo.cut()
        assert link.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(echo)
    echo.open()
    with connect(echo) as link:
        ask(link, b"again")


def test_a_delay_is_added_in_its_direction(echo: Proxy) -> None:
    with connect(echo) as link:
        ask(link, b"quick")
        echo.delay(down_s=0.3)
        began = time.monotonic()
        ask(link, b"slow")
        assert time.monotonic() - began >= 0.3
        # What comes meanwhile is delayed as much, not one after the other.
        began = time.monotonic()
        for _ in range(20):
            link.sendall(b"x")
        ask(link, b"y", b"x" * 20 + b"y")
        assert 0.3 <= time.monotonic() - began < 3


def test_throttled_bytes_trickle(echo: Proxy) -> None:
    with connect(echo) as link:
        echo.throttle(1000)
        began = time.monotonic()
        ask(link, b"9" * 50, b"9" * 450)
        assert time.monotonic() - began >= 0.3


def test_frozen_bytes_arrive_after_the_thaw(echo: Proxy) -> None:
    with connect(echo) as link:
        ask(link, b"before")
        echo.freeze(up=False)
        link.sendall(b"later")
        assert silent(link)
        echo.thaw()
        ask(link, b"!", b"later!")


def test_a_deaf_link_stays_deaf_and_a_new_one_hears(echo: Proxy) -> None:
    with connect(echo) as old, connect(echo) as quiet:
        ask(old, b"before")
        echo.deafen()
        old.sendall(b"lost")
        with connect(echo) as young:  # accepted all the same
            young.sendall(b"lost too")
            assert silent(young)
        echo.hear()
        old.sendall(b"lost for ever")
        assert silent(old)
        ask(quiet, b"has lost nothing")
        with connect(echo) as young:
            ask(young, b"hello")


def test_a_reset_reaches_both_ends(echo: Proxy) -> None:
    with connect(echo) as link, connect(echo) as other:
        ask(link, b"before")
        ask(other, b"before")
        eventually(lambda: echo.links == 2, what="both links")
        assert echo.reset(random.Random(1), 0.5) == 1
        eventually(lambda: echo.links == 1, what="one link")
        ended = 0
        for each in (link, other):
            try:
                ask(each, b"still there")
            except ConnectionResetError:
                ended += 1
        assert ended == 1


def test_an_answer_is_broken_after_so_many_bytes_and_short_ones_pass(echo: Proxy) -> None:
    trap = echo.break_answer(after_bytes=300)
    with connect(echo) as link:
        for _ in range(50):
            ask(link, b"short answers never add up")
        link.sendall(b"9" * 100)
        got = b""
        with pytest.raises(ConnectionResetError):  # noqa: PT012
            while more := link.recv(1000):
                got += more
        assert len(got) <= 300
        assert trap.sprung == 1
    with connect(echo) as link:
        ask(link, b"9" * 100, b"9" * 900)  # only once


# -- requests of one kind, in front of Kafka


def request(api: int, text: bytes) -> bytes:
    return struct.pack(">ih", 2 + len(text), api) + text


@pytest.fixture
def broker() -> Iterator[tuple[Proxy, list[bytes]]]:
    """A proxy in front of a server that writes down what it is asked, and answers with the same frame."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(link: socket.socket) -> None:
            with link, contextlib.suppress(OSError):
                while frame := read_frame(link):
                    heard.append(frame)
                    link.sendall(frame)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with Proxy(f"127.0.0.1:{server.getsockname()[1]}", kafka=True) as proxy:
            proxy.open()
            yield proxy, heard
        server.shutdown(socket.SHUT_RDWR)


def test_requests_of_one_kind_and_what_is_behind_them_are_held_back(broker: tuple[Proxy, list[bytes]]) -> None:
    proxy, heard = broker
    one, other = connect(proxy), connect(proxy)
    proxy.keep(8)
    one.sendall(request(3, b"before") + request(8, b"kept") + request(3, b"behind"))
    eventually(lambda: proxy.kept == 1)
    eventually(lambda: heard == [request(3, b"before")])
    ask(other, request(3, b"elsewhere"))
    eventually(lambda: heard == [request(3, b"before"), request(3, b"elsewhere")])
    proxy.deliver()
    eventually(lambda: heard[2:] == [request(8, b"kept"), request(3, b"behind")])


def test_what_a_dead_process_left_behind_is_lost_where_that_is_wanted(broker: tuple[Proxy, list[bytes]]) -> None:
    proxy, heard = broker
    proxy.keep(26, loses_dead=True)
    host, port = proxy.address.split(":")
    script = (
        "import socket, sys; link = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        " link.sendall(bytes.fromhex(sys.argv[3])); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", script, host, port, request(26, b"dead").hex()]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        connect(proxy).sendall(request(26, b"living"))
        eventually(lambda: proxy.kept == 2)
        process.kill()
    proxy.deliver()
    eventually(lambda: proxy.links == 1)
    assert heard == [request(26, b"living")]


@pytest.mark.parametrize("by_proxy", [True, False], ids=["the network", "the client"])
@pytest.mark.parametrize("reset", [True, False], ids=["RST", "FIN"])
def test_what_was_held_back_arrives_after_its_connection_has_ended(
    broker: tuple[Proxy, list[bytes]], by_proxy: bool, reset: bool
) -> None:
    proxy, heard = broker
    link = connect(proxy)
    proxy.keep(26)
    link.sendall(request(26, b"kept") + request(3, b"behind"))
    eventually(lambda: proxy.kept == 1)
    if by_proxy:
        proxy.abandon(reset=reset)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
    else:
        if reset:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    anew = request(26 if by_proxy else 3, b"anew")
    ask(connect(proxy), anew)
    assert heard == [anew]
    proxy.deliver()
    eventually(lambda: heard[1:2] == [request(26, b"kept")])
    eventually(lambda: proxy.links == 0)


def test_what_ends_within_a_request_is_none() -> None:
    """Its head alone ended the thread of that connection by an error, which pytest showed in another test."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(request(3, b"before") + struct.pack(">i", 100) + b"half")
        near.shutdown(socket.SHUT_WR)
        assert read_frame(far) == request(3, b"before")
        assert read_frame(far) == b""
