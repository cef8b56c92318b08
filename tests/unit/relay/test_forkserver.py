"""The server that forks shards: alone in its process, true to its supervisor's surroundings, and gone with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harvester.errors import ShardError
from harvester.relay.forkserver import Forkserver, Process
from harvester.relay.ipc import set_in_flight
from tests.support.forked import fails, report, wait_for_supervisor
from tests.support.harvesting import alive, forkservers_of
from tests.support.wait import eventually

VARIABLE = "HARVESTER_TEST_FORKED"


@pytest.fixture
def server() -> Iterator[Forkserver]:
    made = Forkserver()
    eventually(made.is_up, 30.0, "the server")
    try:
        yield made
    finally:
        made.close()


def pid_of_server() -> int:
    (pid,) = forkservers_of(os.getpid())
    return pid


def start(server: Forkserver, target: Any = wait_for_supervisor, spec: Any = VARIABLE) -> Process:
    process = server.start(target, spec, "forked")
    assert process is not None
    return process


def end(process: Process) -> int | None:
    code = process.reap()
    os.close(process.read_fd)
    os.close(process.write_fd)
    return code


def reported(server: Forkserver) -> dict[str, Any]:
    process = start(server, report)
    said: dict[str, Any] = json.loads(os.read(process.read_fd, 1 << 16))
    eventually(lambda: not alive(process.pid), what="its end")
    assert end(process) == 7
    return said


def signals(pid: int, kind: str) -> set[int]:
    text = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in text.splitlines() if line.startswith(f"{kind}:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_no_thread_and_no_connection_exists_before_a_fork(server: Forkserver) -> None:
    pid = pid_of_server()
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 1  # to its supervisor
    said = reported(server)
    assert said["clients"] == ["confluent_kafka", "psycopg"]
    assert (said["threads"], said["sockets"]) == (1, 0)
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1


def test_a_process_has_the_surroundings_that_its_supervisor_has_now(
    server: Forkserver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reported(server)["variable"] is None
    monkeypatch.setenv(VARIABLE, "later")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    set_in_flight(server.shared, 5, 10)
    said = reported(server)
    assert said["variable"] == "later"
    assert said["directory"] == str(tmp_path)
    assert said["path"][0] == str(tmp_path)
    assert said["shared"][:3] == [0, 5, 10]
    assert said["name"] == "forked"
    monkeypatch.delenv(VARIABLE)
    assert reported(server)["variable"] is None


def test_nothing_of_the_host_is_inherited(server: Forkserver, tmp_path: Path) -> None:
    with (tmp_path / "host's").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        other = Forkserver()
        eventually(other.is_up, 30.0, "another server")
        said = [reported(server), reported(other)]
        other.close()
    assert str(tmp_path / "host's") not in said[0]["files"] + said[1]["files"]
    assert said[0]["main"] is said[1]["main"] is None


def test_random_numbers_of_two_processes_differ(server: Forkserver) -> None:
    assert reported(server)["random"] != reported(server)["random"]


def test_signals_for_everyone_end_neither_the_server_nor_its_processes(server: Forkserver) -> None:
    everyone = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    process = start(server)
    for pid in (pid_of_server(), process.pid):
        assert everyone | {signal.SIGABRT} <= signals(pid, "SigIgn")  # the watchdog means the supervisor
        assert not everyone & signals(pid, "SigBlk")
        for number in everyone:
            os.kill(pid, number)
    assert reported(server)["threads"] == 1
    assert alive(process.pid)
    assert end(process) == -signal.SIGKILL


def test_an_error_is_told_and_ends_the_process(server: Forkserver, capfd: pytest.CaptureFixture[str]) -> None:
    process = start(server, fails)
    eventually(lambda: not alive(process.pid), what="its end")
    assert end(process) == 1
    assert "RuntimeError: as it is told" in capfd.readouterr().err


def test_processes_outlive_a_server_that_is_killed_and_are_killed_all_the_same(server: Forkserver) -> None:
    process, first = start(server), pid_of_server()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not alive(first), what="the server's end")
    assert alive(process.pid)
    assert server.start(wait_for_supervisor, None, "forked") is None
    eventually(server.is_up, 30.0, "the next server")
    assert reported(server)["threads"] == 1
    assert pid_of_server() != first
    assert end(process) is None  # nobody knows its exit code
    assert not alive(process.pid)


def test_server_and_processes_end_when_their_supervisor_is_killed() -> None:
    program = "from tests.support.forked import supervise; supervise()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            shard, fork = map(int, supervisor.stdout.readline().split())
            family = [shard, *forkservers_of(supervisor.pid)]
            assert len(family) == 2
        finally:
            supervisor.kill()
    try:
        eventually(lambda: not any(map(alive, family)), what="the end of both")
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_server_that_is_closed_ends(server: Forkserver) -> None:
    pid = pid_of_server()
    server.close()
    assert not alive(pid)
    assert forkservers_of(os.getpid()) == []


def _at_the_start_of_interpreters(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def test_a_server_with_a_thread_does_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that the environment loads into every interpreter: a fork would lack its thread and keep its locks."""
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    _at_the_start_of_interpreters(code, tmp_path, monkeypatch)
    server = Forkserver()
    try:
        eventually(server.is_up, 30.0, "the server")
        said = reported(server)
        assert "become(" in said["command"]
        assert said["threads"] == 2  # the agent's runs in it
        process = start(server)
        assert signal.SIGTERM in signals(process.pid, "SigIgn")
        assert end(process) == -signal.SIGKILL
    finally:
        server.close()


def test_a_server_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _at_the_start_of_interpreters("import os\nos._exit(5)\n", tmp_path, monkeypatch)
    server = Forkserver()
    with pytest.raises(ShardError, match="exit code 5"):
        eventually(server.is_up, 30.0, "never")
    server.close()


def test_servers_that_die_again_and_again_are_an_error(server: Forkserver) -> None:
    for _ in range(2):
        os.kill(pid_of_server(), signal.SIGKILL)
        assert server.start(report, None, "forked") is None
        eventually(server.is_up, 30.0, "the next server")
    os.kill(pid_of_server(), signal.SIGKILL)
    with pytest.raises(ShardError, match="died repeatedly"):
        server.start(report, None, "forked")
