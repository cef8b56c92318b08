"""The notify protocol over real datagram sockets, as a service manager holds them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.telemetry.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The manager's socket and what NOTIFY_SOCKET says about it."""
    path = str(tmp_path / "n.sock")
    name = f"@harvester-test-{os.getpid()}-{id(request)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path if request.param == "path" else "\0" + name[1:])
        receiver.settimeout(30)
        yield receiver, path if request.param == "path" else name


def test_what_a_life_looks_like_to_the_manager(manager: tuple[socket.socket, str]) -> None:
    receiver, address = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    assert notifier.ready("standby")
    assert receiver.recv(4096) == f"READY=1\nMAINPID={os.getpid()}\nSTATUS=standby".encode()
    assert notifier.status("leading: 1,523 records/s\nbacklog 12 ✓")
    assert receiver.recv(4096).decode() == "STATUS=leading: 1,523 records/s backlog 12 ✓"
    assert notifier.watchdog()
    assert receiver.recv(4096) == b"WATCHDOG=1"
    assert notifier.reloading()
    lines = receiver.recv(4096).decode().splitlines()
    assert lines[0] == "RELOADING=1"
    assert 0 < int(lines[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    assert notifier.stopping("draining")
    assert receiver.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_without_a_manager_nothing_happens() -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}):
        notifier = Notifier.from_environment(environ)
        assert not notifier.ready()
        assert not notifier.status("x")
        assert not notifier.watchdog()
        assert not notifier.stopping()


@pytest.mark.parametrize("address", ["/nonexistent/n.sock", "@nobody-listens-here", "x" * 300, "vsock:2:1234", "@"])
def test_a_manager_that_is_not_there_is_no_error(address: str) -> None:
    assert not Notifier(address).ready()


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    path = str(tmp_path / "n.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        notifier = Notifier(path)
        sent = 0
        while notifier.status("x"):
            sent += 1
            assert sent < 100_000, "a full queue was never refused"


def test_the_environment_of_the_process_is_the_default(
    manager: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, address = manager
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert Notifier.from_environment().watchdog()
    assert receiver.recv(4096) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert Notifier.from_environment(environ).watchdog_s == watchdog_s


def test_a_watchdog_that_is_too_short_is_widened_once(tmp_path: Path) -> None:
    path = str(tmp_path / "n.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(30)
        notifier = Notifier(path, watchdog_s=30.0)
        assert notifier.widen_watchdog(70.5)
        assert receiver.recv(4096) == b"WATCHDOG_USEC=70500000"
        assert notifier.watchdog_s == 70.5
        assert not notifier.widen_watchdog(70.0)
        assert not Notifier(path).widen_watchdog(70.0)  # no watchdog is wanted
