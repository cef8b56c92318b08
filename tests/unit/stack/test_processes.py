"""The identity of processes: what a pid alone cannot tell."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import StackError
from harvester.stack import processes
from harvester.stack.processes import ProcessId, end, identify, is_alive, parse_stat, run, send, spawn, tail
from tests.support.wait import eventually


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until its standard input is closed."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def identity_of(child: subprocess.Popen[bytes]) -> ProcessId:
    found = identify(child.pid)
    assert found is not None
    return found


@given(
    name=st.text("() aS1", max_size=15),
    parent=st.integers(0, 2**22),
    ticks=st.integers(0, 2**63),
)
def test_the_name_of_a_program_may_hold_anything(name: str, parent: int, ticks: int) -> None:
    rest = " ".join(["0"] * 17)
    assert parse_stat(f"1234 ({name}) S {parent} {rest} {ticks} 0 0") == ("S", parent, ticks)


def test_a_process_is_itself_until_it_ends(stranger: subprocess.Popen[bytes]) -> None:
    identity = identity_of(stranger)
    assert is_alive(identity)
    stranger.kill()
    # Nobody has reaped it yet: it is a zombie, and a zombie does not run.
    eventually(lambda: not is_alive(identity), what="the process is seen to have ended")
    assert not send(identity, signal.SIGTERM)


def test_a_child_that_ends_while_it_is_looked_at_is_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that finds the pid of the one before it still taken, if only by a zombie, refuses to start."""
    process = spawn(["/bin/sleep", "60"], log=tmp_path / "log", env={}, cwd=tmp_path, run_as=None)
    read = processes._stat

    def read_late(pid: int) -> tuple[str, int, int] | None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return read(pid)

    monkeypatch.setattr(processes, "_stat", read_late)
    assert not is_alive(process)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot": "another boot"}])
def test_a_recycled_pid_is_never_signalled(stranger: subprocess.Popen[bytes], change: dict[str, object]) -> None:
    recycled = dataclasses.replace(identity_of(stranger), **change)  # type: ignore[arg-type]
    assert not is_alive(recycled)
    assert not send(recycled, signal.SIGKILL)
    end(recycled, [(signal.SIGTERM, 5.0)])
    assert is_alive(identity_of(stranger))


def test_what_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()"
    )
    process = spawn(
        [sys.executable, "-c", program], log=tmp_path / "log", env=dict(os.environ), cwd=tmp_path, run_as=None
    )
    eventually(lambda: "ready" in tail(tmp_path / "log"), what="the program is ready")
    end(process, [(signal.SIGTERM, 0.05)])
    assert not is_alive(process)


def test_a_spawned_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    sleeper = spawn(["/bin/sleep", "60"], log=tmp_path / "log", env={}, cwd=tmp_path, run_as=None)
    try:
        assert os.getsid(sleeper.pid) == sleeper.pid
    finally:
        end(sleeper, [])


def test_a_failing_command_shows_its_last_words() -> None:
    with pytest.raises(StackError, match=r"(?s)the thing failed \(exit code 3\).*last words"):
        run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], what="the thing", timeout_s=30)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="could not be started"):
        run([str(tmp_path / "missing")], what="it", timeout_s=5)
    with pytest.raises(StackError, match="cannot start"):
        spawn([str(tmp_path / "missing")], log=tmp_path / "log", env={}, cwd=tmp_path, run_as=None)


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "printed nothing" in tail(log)
    log.write_text("".join(f"line {number}\n" for number in range(10000)))
    assert tail(log, 2) == "  | line 9998\n  | line 9999"
