"""The real command line, as a process.

In tests it is a fork (tests/support/warm.py), unless `env` has it find modules elsewhere. A campaign by scripts/faults
starts fresh interpreters, and so does every test that uses `COMMAND` or a terminal.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from .wait import eventually
from .warm import Forked, run_command, start_command

COMMAND = (sys.executable, "-m", "harvester_cli")
_ROOT = str(Path(__file__).parents[2])


def cli_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of this process, without what would configure a harvester by accident; wide output, no colours."""
    kept = {name: value for name, value in os.environ.items() if name not in ("HARVESTER_CONFIG", "HARVESTER_STACK")}
    return {**kept, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def _forks(env: Mapping[str, str] | None) -> bool:
    path = (env or {}).get("PYTHONPATH", _ROOT)
    return "PYTEST_VERSION" in os.environ and path.split(os.pathsep)[0] == _ROOT


def run_cli(
    *args: str,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path | None = None,
    timeout_s: float = 120.0,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `harvester ARGS` to its end; with `check`, AssertionError with its output unless it exits with 0."""
    if _forks(env):
        done = run_command(args, cli_environment(env), cwd, stdin, timeout_s)
    else:
        done = subprocess.run(
            [*COMMAND, *args],
            env=cli_environment(env),
            cwd=cwd,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if check:
        assert done.returncode == 0, (
            f"harvester {' '.join(args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


class RunningCli:
    """`harvester ARGS` in the background. As a context manager it kills what is left of it at the end.

    `stdout` and `stderr` grow as lines come; `lines` has both, in the order they were read.
    """

    def __init__(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, session: bool = False
    ) -> None:
        """`session`: in a session of its own, so that its process group is it and its children."""
        self.args = args
        self.process: subprocess.Popen[str] | Forked
        if _forks(env):
            self.process, out, err = start_command(args, cli_environment(env), cwd, session)
        else:
            self.process = subprocess.Popen(
                [*COMMAND, *args],
                env=cli_environment(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=session,
            )
            out, err = self.process.stdout, self.process.stderr  # type: ignore[assignment]
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self.lines: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(out, self.stdout), daemon=True),
            threading.Thread(target=self._read, args=(err, self.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """The first match of `pattern` in any line so far or to come; fails at once when the process has ended."""
        regex = re.compile(pattern)
        seen = 0

        def look() -> re.Match[str] | None:
            nonlocal seen
            ended = self.process.poll() is not None
            if ended:
                self._finish_reading()
            while seen < len(self.lines):
                found = regex.search(self.lines[seen])
                seen += 1
                if found:
                    return found
            assert not ended, f"{self} ended (exit code {self.process.returncode}) without {pattern!r}:\n{self.output}"
            return None

        try:
            match = eventually(look, timeout_s, f"a line like {pattern!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\noutput of {self}:\n{self.output}") from None
        assert match is not None
        return match

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, once it has ended and everything it said is read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {timeout_s:g} s:\n{self.output}") from None
        self._finish_reading()
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send the signal, then `wait`."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def __enter__(self) -> RunningCli:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._finish_reading()
        if error is not None:  # pytest shows it below the failure
            print(f"the last of {self}:", *self.lines[-150:], sep="\n")

    def __str__(self) -> str:
        return f"harvester {' '.join(self.args)}"

    def _read(self, stream: object, into: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            text = line.rstrip("\n")
            into.append(text)
            self.lines.append(text)

    def _finish_reading(self) -> None:
        # A child that inherited the pipe can hold it open; what the process itself said is there by then.
        for reader in self._readers:
            reader.join(timeout=2)


def start_cli(*args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> RunningCli:
    """`RunningCli`, to be used in a `with`."""
    return RunningCli(*args, env=env, cwd=cwd)
