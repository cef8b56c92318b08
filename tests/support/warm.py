"""Forks of processes that have imported what they run: imports are nearly all that a short command costs.

Everything else is as in a process of its own: arguments, environment, working directory, descriptors, exit code. For
two programs: the command line, and the server that a supervisor forks its shards from.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from harvester.relay import forkserver

_MESSAGE_BYTES = 1 << 18
_IMPORTED = {
    "command": (
        "confluent_kafka.admin",
        "psycopg",
        "harvester.harvester",
        "harvester.doctor",
        "harvester.config.model",
    ),
    "server": ("harvester.relay.shard", "harvester.relay.forkserver"),
}


class _Warm:
    """The process that is forked; it ends with the one that made it."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno()), kind],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
            )

    def fork(self, args: Sequence[str], env: Mapping[str, str], cwd: Path, fds: Mapping[int, int]) -> int:
        """The pid; `fds` are descriptors of ours by what they become."""
        request = json.dumps([list(args), dict(env), str(cwd), list(fds)]).encode()
        self.socket.settimeout(None)
        socket.send_fds(self.socket, [request], list(fds.values()))
        return int(self.socket.recv(99))


_warm = cache(_Warm)


def run_command(
    args: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdin: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`harvester ARGS`, as `subprocess.run` would, with both outputs as text."""
    warm = _warm("command")
    with warm.lock, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        pid = warm.fork(args, env, cwd or Path.cwd(), dict(enumerate(file.fileno() for file in (given, out, err))))
        warm.socket.settimeout(timeout_s)
        try:
            code = int(warm.socket.recv(99))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            warm.socket.settimeout(None)
            warm.socket.recv(99)
            raise subprocess.TimeoutExpired(list(args), timeout_s) from None
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(list(args), code, *printed)


@contextmanager
def warm_forkservers() -> Iterator[None]:
    """Supervisors of this process get their fork servers as forks."""
    made = SimpleNamespace(
        Popen=_Server,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
        _args_from_interpreter_flags=subprocess._args_from_interpreter_flags,  # type: ignore[attr-defined]
    )
    with mock.patch.object(forkserver, "subprocess", made):
        yield


class _Server:
    """What a supervisor needs of `subprocess.Popen`."""

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], **_stdin: Any) -> None:
        warm = _warm("server")
        with warm.lock:
            pid = warm.fork(command[-1:], os.environ, Path.cwd(), {fd: fd for fd in (1, 2, *pass_fds)})
            self._pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)

    def __del__(self) -> None:
        os.close(self._pidfd)


# -- in that process, and its forks


def _main() -> None:
    control, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    modules = list(_IMPORTED[kind])
    if kind == "command":
        import harvester_cli.main

        modules += [each.name for each in pkgutil.walk_packages(harvester_cli.__path__, "harvester_cli.")]
    for name in modules:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    args = _await_a_fork(control, waits=kind == "command")
    if kind == "server":
        exec(args[0], {"__name__": "__main__"})
        return
    # What `python -m harvester_cli` has, and prints in its usage.
    sys.argv = [str(Path(harvester_cli.__path__[0]) / "__main__.py"), *args]
    sys.path[0] = str(Path.cwd())
    sys.modules["__main__"].__package__ = "harvester_cli"
    harvester_cli.main.main()


def _await_a_fork(control: socket.socket, *, waits: bool) -> list[str]:
    """Returns in the forks only; the process itself tells the exit code of each if it `waits`."""
    if not waits:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else reaps them
    while True:
        request, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 9)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())
        if waits:
            control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    args, environment, directory, wanted = json.loads(request)
    control.close()
    away = [os.dup2(fd, 500 + number, inheritable=False) for number, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, wanted_fd in zip(away, wanted, strict=True):
        os.dup2(fd, wanted_fd)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)
    return list(args)


if __name__ == "__main__":
    _main()
