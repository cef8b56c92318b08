"""`harvester start` as a service: the notify socket, the watchdog, SIGHUP with and without a terminal."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import COMMAND, RunningCli, cli_environment
from tests.support.harvesting import Scene, causal, log_lines, messages, shards_of, wait_leads
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

# Gives the process the terminal that is its standard input, with SIGHUP as the first argument says.
_ON_A_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Manager:
    """A service manager's end of the notify socket."""

    def __init__(self, listening: socket.socket, address: Path) -> None:
        self._socket = listening
        self.env = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "3000000"}

    def next(self) -> dict[str, str]:
        """The next datagram's lines."""
        text = self._socket.recv(65_536).decode()
        return dict(line.split("=", 1) for line in text.splitlines())

    def next_with(self, name: str, value: str = "") -> dict[str, str]:
        """The next one that says this; what comes before it is passed over."""
        while True:
            said = self.next()
            if said.get(name, "").startswith(value) and name in said:
                return said


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(address))
        listening.settimeout(90)
        yield Manager(listening, address)


def start(scene: Scene, env: Mapping[str, str] | None = None, **given: Any) -> RunningCli:
    """In a session of its own: as a service, without a terminal."""
    return RunningCli("start", "-f", str(scene.config_file(**given)), env=env, session=True)


def test_a_life_as_its_manager_sees_it(scene: Scene, manager: Manager) -> None:
    with start(scene, manager.env) as running:
        ready = manager.next()
        while "READY" not in ready:  # until then it asks for time
            assert ready.keys() == {"EXTEND_TIMEOUT_USEC", "STATUS"}
            ready = manager.next()
        assert ready["MAINPID"] == str(running.pid)
        assert ready["STATUS"] in ("standby", "leading")
        assert manager.next_with("WATCHDOG_USEC") == {"WATCHDOG_USEC": "34000000"}  # 12 H and 10 s
        manager.next_with("WATCHDOG", "1")
        wait_leads(running)
        manager.next_with("STATUS", "leading term=")
        manager.next_with("WATCHDOG", "1")

        before_us = time.monotonic_ns() // 1000
        running.process.send_signal(signal.SIGHUP)
        reloading = manager.next_with("RELOADING", "1")
        assert before_us <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert manager.next_with("READY", "1")["STATUS"] == "reload: 0 applied, 0 need a restart, 0 failed"

        running.process.send_signal(signal.SIGTERM)
        assert manager.next_with("STOPPING", "1")["STATUS"] == "finishing what is on the wire"
        assert running.wait() == 0


def test_the_watchdog_hears_nothing_while_the_mark_loop_stands_still(scene: Scene, manager: Manager) -> None:
    with start(scene, {**scene.plan.env, **manager.env}) as running:
        with scene.plan.blocked("marker.mark") as reached:
            reached()
            # Other threads go on: they say so, every two seconds. One turn before the halt may still be reported.
            said: list[dict[str, str]] = []
            manager.next_with("STATUS", "leading")
            while sum("STATUS" in one for one in said) < 3:
                said.append(manager.next())
            assert sum("WATCHDOG" in one for one in said) <= 1, said
            assert not any("WATCHDOG" in one for one in said[2:]), said
        manager.next_with("WATCHDOG", "1")
        assert running.stop() == 0


def test_a_reload_applies_what_it_can_and_names_the_rest(scene: Scene, manager: Manager) -> None:
    secret, other = "first-secret-1234", "other-secret-5678"
    with start(scene, manager.env, data_source=f"{scene.dsn} password={secret}") as running:
        wait_leads(running)
        scene.add(*((key, "1") for key in "abcdef"))
        scene.wait_left()
        assert len(shards_of(running.pid)) == 2
        scene.config_file(
            data_source=f"{scene.dsn} password={other}",
            shards=3,
            logging={"level": "debug"},
            mark_backoff="20ms",
            producer_kafka_config={"compression.type": "lz4"},
        )
        running.process.send_signal(signal.SIGHUP)
        assert manager.next_with("STATUS", "reload: ")["STATUS"] == "reload: 3 applied, 2 need a restart, 0 failed"
        eventually(lambda: len(shards_of(running.pid)) == 3, what="a third shard")
        scene.add(*((key, "2") for key in "abcdef"))
        scene.wait_left()
        running.process.send_signal(signal.SIGHUP)  # the same again: what was applied does not differ any more
        assert manager.next_with("STATUS", "reload: ")["STATUS"] == "reload: 0 applied, 2 need a restart, 0 failed"
        assert running.stop() == 0
        said = [text.partition("reload: ")[2] for text in messages(running) if "reload: " in text]
        assert sorted(said[:5]) == [
            "applied to new connections: data_source: a secret in it",
            "applied: limits.shards: 2 -> 3",
            "applied: logging.level: 'info' -> 'debug'",
            "needs a restart: limits.mark_backoff: '10ms' -> '20ms'",
            "needs a restart: producer_kafka_config.compression.type: (not given) -> 'lz4'",
        ]
        assert any(line["level"] == "debug" for line in log_lines(running))
        assert secret not in running.output
        assert other not in running.output
    assert scene.published() == causal("abcdef", 2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("this is = no toml = at all", "is not valid TOML"),
        ('leader_group_id = "x"\n[limits]\nheartbeat_timeout = "soon"\nshards = 0\n', "2 configuration problems"),
        ('[producer_kafka_config]\n"no.such.option" = "1"\n', "no.such.option"),
    ],
)
def test_a_broken_file_changes_nothing(broken: str, said: str, scene: Scene) -> None:
    with start(scene) as running:
        wait_leads(running)
        file = scene.directory / "test.toml"
        file.write_text(broken)
        running.process.send_signal(signal.SIGHUP)
        running.wait_for_line("reload: nothing was changed")
        scene.add(("a", "1"))
        scene.wait_left()
        file.unlink()
        running.process.send_signal(signal.SIGHUP)
        running.wait_for_line("reload: nothing was changed: .*cannot be read")
        assert len(shards_of(running.pid)) == 2
        assert running.stop() == 0
        assert any(said in text for text in messages(running)), messages(running)
        assert "Traceback" not in running.output


@contextmanager
def on_a_terminal(scene: Scene, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and the other end of its terminal, whose closing is the hang-up."""
    other_end, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL, how, *COMMAND, "start", "-f", str(scene.config_file())],
        env=cli_environment(),
        stdin=terminal,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        yield process, other_end
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_terminal_that_hangs_up_stops_it(scene: Scene) -> None:
    with on_a_terminal(scene, "plain") as (process, other_end):
        scene.add(("a", "1"))
        scene.wait_left(timeout_s=60)
        os.close(other_end)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert '"stopped"' in log
        assert "reload" not in log


def test_nohup_is_respected(scene: Scene) -> None:
    with on_a_terminal(scene, "nohup") as (process, other_end):
        scene.add(("a", "1"))
        scene.wait_left(timeout_s=60)
        os.close(other_end)
        scene.add(("a", "2"))
        scene.wait_left()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert "reload" not in log
