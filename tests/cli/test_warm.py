"""Forks of a warm process are like processes of their own (tests/support/warm.py): none is seen by the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from harvester.stack.processes import children_of, identify
from tests.support import warm

WAIT_S = 30.0


@contextmanager
def running(
    program: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, session: bool = False
) -> Iterator[tuple[warm.Forked, BinaryIO]]:
    """A fork that runs this, and its outputs; killed at the end."""
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as output:
        try:
            process = warm._warm("server").fork([program], {1: writes, 2: writes}, env or {}, cwd, session)
        finally:
            os.close(writes)
        try:
            yield process, output
        finally:
            process.kill()
            process.wait(WAIT_S)


def run(program: str, **given: Any) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    with running(program, **given) as (process, output):
        return process.wait(WAIT_S), output.read().decode()


def ask(expression: str, **given: Any) -> Any:
    """The value of an expression in a fork."""
    code, printed = run(f"import json, os, signal, sys, time\nprint(json.dumps({expression}))", **given)
    assert code == 0, printed
    return json.loads(printed)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print('done')", (0, "done\n")),
        ("import sys\nprint('out'); print('err', file=sys.stderr); sys.exit(3)", (3, "out\nerr\n")),
        ("raise SystemExit('no')", (1, "no\n")),
        ("import atexit\natexit.register(print, 'at exit')", (0, "at exit\n")),
        ("import os\nos._exit(7)", (7, "")),
        ("import os\nos.kill(os.getpid(), 9)", (-signal.SIGKILL, "")),
    ],
)
def test_it_has_outputs_and_an_exit_code_of_its_own(program: str, outcome: tuple[int, str]) -> None:
    assert run(program) == outcome
    assert run("print('next')") == (0, "next\n")


def test_its_environment_is_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    given = {"GIVEN": "ä", "TZ": "Asia/Tokyo"}
    assert ask("dict(os.environ)", env=given) == given
    assert ask("time.localtime(0).tm_hour", env=given) == 9
    assert run("import os\nos.environ['LEFT'] = '1'\nos.putenv('LEFT', '1')")[0] == 0
    assert ask("[dict(os.environ), time.localtime(0).tm_hour]", env={"TZ": "UTC"}) == [{"TZ": "UTC"}, 0]


def test_it_works_where_it_was_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("os.getcwd()", cwd=tmp_path) == str(tmp_path)
    assert run("import os\nos.chdir('/')", cwd=tmp_path)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert ask("os.getcwd()") == str(tmp_path)


def test_whoever_asks_first_may_have_blocked_signals() -> None:
    """As a harvester does while it starts its fork server: what is forked later for others must not inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        made = warm._Warm("server")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as output:
        process = made.fork(["import signal\nprint(len(signal.pthread_sigmask(0, [])))"], {1: writes, 2: writes}, {})
        os.close(writes)
        assert output.read() == b"0\n"
    assert process.wait(WAIT_S) == 0


def test_its_signals_are_its_own() -> None:
    # Not pause(): a SIGINT that comes just before it is seen only after the next signal.
    loop = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with running(loop) as (process, output):
            assert output.readline() == b"ready\n"
            process.send_signal(number)
            assert process.wait(WAIT_S) == -number
    ignoring = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.alarm(600)\n{loop}"
    with running(ignoring) as (process, output):
        assert output.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        assert process.poll() is None
        # Beside it, and after it: as Python begins.
        assert ask("[signal.getsignal(signal.SIGTERM), len(signal.pthread_sigmask(0, [])), signal.alarm(0)]") == [
            0,
            0,
            0,
        ]
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
        process.kill()  # what has ended is left alone


def test_it_may_have_a_session_of_its_own() -> None:
    assert ask("os.getsid(0) == os.getpid()", session=True)
    assert ask("os.getsid(0)") == os.getsid(0)


def test_it_has_no_descriptor_but_those_it_was_given() -> None:
    program = "import os\nos.listdir(57)\nos.write(1, '\\n'.join(os.listdir('/proc/self/fd')).encode())"
    given = os.open("/", os.O_RDONLY)
    with tempfile.TemporaryFile() as out:
        process = warm._warm("server").fork([program], {1: out.fileno(), 57: given}, {})
        os.close(given)
        assert process.wait(WAIT_S) == 0
        descriptors = set(os.pread(out.fileno(), 999, 0).decode().split())
    assert len(descriptors - {"0", "1", "2", "57"}) == 1, descriptors  # by which they were listed


@pytest.mark.parametrize(
    "crash",
    [
        "import os\nos.abort()",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "raise RuntimeError('crash')",
        "import os\nos.closerange(0, 1000)",
        "import os, sys\nos.spoiled = True\nsys.path.clear()\nsys.modules.clear()\nraise MemoryError",
    ],
)
def test_a_crash_leaves_the_next_untouched(crash: str) -> None:
    state = "[os.getppid(), sys.path, len(sys.modules), hasattr(os, 'spoiled')]"
    before = ask(state)
    run(crash)
    assert ask(state) == before


def test_many_at_once_are_not_mixed_up() -> None:
    def one(number: int) -> tuple[int, str]:
        return run(f"import sys\nprint({number})\nsys.exit({number})")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [(number, f"{number}\n") for number in range(40)]


def test_the_warm_process_ends_with_the_one_that_made_it() -> None:
    made = warm._Warm("server")
    made._socket.close()
    assert made._process.wait(WAIT_S) == 0


@pytest.mark.parametrize("args", [["--version"], ["no-such-command"], ["config", "show", "--config", "missing.toml"]])
def test_a_command_says_what_it_says_in_an_interpreter_of_its_own(args: list[str], tmp_path: Path) -> None:
    env = os.environ | {"COLUMNS": "100"}
    there = subprocess.run(
        [sys.executable, "-m", "harvester_cli", *args],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    here = warm.run_command(args, env, tmp_path, "", WAIT_S)
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)
    assert here.stdout + here.stderr


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    assert warm.run_command(["--version"], os.environ, tmp_path, "", WAIT_S).returncode == 0
    warm_process = identify(warm._warm("command")._process.pid)
    assert warm_process is not None
    before = children_of(warm_process)
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run_command(["--version"], os.environ, tmp_path, "", 0.0)
    assert children_of(warm_process) == before
