"""Forks of processes that have imported what they run: imports are nearly all that a short command costs.

Everything else is as in a process of its own: arguments, environment, working directory, descriptors, exit code. For
three programs: the command line, the server that a supervisor forks its shards from, and `python -m` for modules of the
tests that consume.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

from harvester.relay import forkserver

_MESSAGE_BYTES = 1 << 18
_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({socket!r})
    socket.send_fds(asked, [json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
    sys.exit(int(asked.recv(9)) % 256)
"""
_IMPORTED = {
    "command": (
        "confluent_kafka.admin",
        "psycopg",
        "harvester.harvester",
        "harvester.doctor",
        "harvester.config.model",
        "harvester.relay.shard",
    ),
    "server": ("harvester.relay.shard", "harvester.relay.forkserver"),
    "module": ("confluent_kafka.admin", "psycopg", "harvester.coordination.consumer", "tests.support.coordinated"),
}


class _Warm:
    """The process that is forked; it ends with the one that made it."""

    def __init__(self, kind: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno()), kind],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    def fork(
        self,
        args: Sequence[str],
        fds: Mapping[int, int],
        env: Mapping[str, str],
        cwd: Path | None = None,
        session: bool = False,
    ) -> Forked:
        """`fds` are descriptors of ours by what they become."""
        request = (list(args), dict(env), str(cwd or Path.cwd()), list(fds), session)
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds.values()))
            pid, (pidfd,), _, _ = socket.recv_fds(self._socket, 99, 1, socket.MSG_CMSG_CLOEXEC)
        return Forked(args, int(pid), pidfd, self._reaped)

    def _reaped(self, pid: int) -> int:
        """The exit code of a process that has ended."""
        with self._lock:
            self._socket.send(json.dumps(pid).encode())
            return int(self._socket.recv(99))


_warm = cache(_Warm)


class Forked:
    """What is needed of `subprocess.Popen`, for a process that is a zombie from its end until somebody reaps it."""

    def __init__(self, args: Sequence[str], pid: int, pidfd: int, reap: Callable[[int], int]) -> None:
        self.args, self.pid, self._pidfd, self._reap = args, pid, pidfd, reap
        self._lock = threading.RLock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = self._reap(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        with self._lock:  # nobody else reaps it meanwhile
            if self.poll() is None:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _has_ended(self, within_s: float | None) -> bool:
        return bool(select.select([self._pidfd], [], [], within_s)[0])

    def __del__(self) -> None:
        os.close(self._pidfd)


def run_command(
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: str = "",
    timeout_s: float = 60.0,
    kind: str = "command",
) -> subprocess.CompletedProcess[str]:
    """`harvester ARGS`, as `subprocess.run` would, with both outputs as text. `kind` "module": `python -m ARGS`."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        fds = dict(enumerate(file.fileno() for file in (given, out, err)))
        process = _warm(kind).fork(args, fds, env, cwd)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(list(args), code, *printed)


def start_command(
    args: Sequence[str], env: Mapping[str, str], cwd: Path | None, session: bool
) -> tuple[Forked, TextIO, TextIO]:
    """`harvester ARGS`, and its outputs."""
    (out, writes_out), (err, writes_err) = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        process = _warm("command").fork(args, {0: nothing, 1: writes_out, 2: writes_err}, env, cwd, session)
    finally:
        for fd in (nothing, writes_out, writes_err):
            os.close(fd)
    return process, os.fdopen(out, errors="replace"), os.fdopen(err, errors="replace")


def start_aside(args: Sequence[str], errors: int, cwd: Path) -> Forked:
    """`harvester ARGS` in a session of its own, of which the descriptor gets what it says on standard error."""
    with open(os.devnull, "r+") as nothing:  # noqa: PTH123
        fds = {0: nothing.fileno(), 1: nothing.fileno(), 2: errors}
        return _warm("command").fork(args, fds, os.environ, cwd, session=True)


def start_module(args: Sequence[str], output: int) -> Forked:
    """`python -m ARGS`, which writes everything into that descriptor."""
    with open(os.devnull) as nothing:  # noqa: PTH123
        return _warm("module").fork(
            args, {0: nothing.fileno(), 1: output, 2: output}, os.environ, Path(__file__).parents[2]
        )


class PipedModule:
    """`python -m ARGS` in the root of this checkout: a `subprocess.Popen` with pipes for its input and its output."""

    def __init__(self, *args: str) -> None:
        (given, writes_given), (out, writes_out) = os.pipe(), os.pipe()
        try:
            fds = {0: given, 1: writes_out, 2: 2}
            self._process = _warm("module").fork(args, fds, os.environ, Path(__file__).parents[2])
        finally:
            os.close(given)
            os.close(writes_out)
        self.stdin, self.stdout = os.fdopen(writes_given, "w"), os.fdopen(out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def communicate(self) -> tuple[str, None]:
        """The rest of its output, and its end."""
        self.stdin.close()
        said = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self._process.wait()
        return said, None


class _OnPath(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Runs what the program on the PATH is asked for."""

    socket_type = socket.SOCK_SEQPACKET
    daemon_threads = True


class _Asked(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        message, fds, _, _ = socket.recv_fds(self.request, _MESSAGE_BYTES, 3)
        args, env, cwd = json.loads(message)
        process = _warm("command").fork(args, dict(enumerate(fds)), env, Path(cwd))
        for fd in fds:
            os.close(fd)
        self.request.send(str(process.wait()).encode())


@contextmanager
def harvester_on_path() -> Iterator[Path]:
    """A directory with a `harvester` for shells, which is a fork, too. It has no controlling terminal."""
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/tmp") as name:  # the path of a socket has to be short
        folder, program = Path(name), Path(name, "harvester")
        program.write_text(_PROGRAM.format(python=sys.executable, socket=str(folder / "socket")))
        program.chmod(0o755)
        with _OnPath(str(folder / "socket"), _Asked) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
            try:
                yield folder
            finally:
                server.shutdown()


@contextmanager
def warm_forkservers() -> Iterator[None]:
    """Supervisors of this process get their fork servers as forks."""
    with _servers_by(_server):
        yield


def _servers_by(popen: Any) -> Any:
    made = SimpleNamespace(
        Popen=popen,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
        _args_from_interpreter_flags=subprocess._args_from_interpreter_flags,  # type: ignore[attr-defined]
    )
    return mock.patch.object(forkserver, "subprocess", made)


def _server(command: list[str], *, pass_fds: tuple[int, ...], **_stdin: Any) -> Forked:
    return _warm("server").fork(command[-1:], {fd: fd for fd in (1, 2, *pass_fds)}, os.environ)


# -- in that process, and its forks


class _Spare:
    """A fork of a command that waits to become its supervisor's fork server: as a child, and from before any thread."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.program: str | None = None  # in the fork
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            request, fds, _, _ = socket.recv_fds(theirs, _MESSAGE_BYTES, 9)
            if not request:
                os._exit(0)
            self.program, wanted = json.loads(request)
            theirs.close()
            _place(fds, wanted)
        theirs.close()

    def popen(self, command: list[str], *, pass_fds: tuple[int, ...], **given: Any) -> Any:
        """`subprocess.Popen`; the first is this one."""
        if self._socket.fileno() < 0:
            return subprocess.Popen(command, pass_fds=pass_fds, **given)
        with self._socket:
            socket.send_fds(self._socket, [json.dumps([command[-1], pass_fds]).encode()], pass_fds)
        return Forked(command, self._pid, os.pidfd_open(self._pid), _reap)


def _main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a harvester that starts its fork server has some blocked
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
    args = _await_a_fork(control)
    if kind == "server":
        exec(args[0], {"__name__": "__main__"})
        return
    if kind == "module":
        sys.argv = args
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
        return
    if args[:1] == ["start"]:
        spare = _Spare()
        if spare.program is not None:
            exec(spare.program, {"__name__": "__main__"})
            return
        _servers_by(spare.popen).start()
    # What `python -m harvester_cli` has, and prints in its usage.
    sys.argv = [str(Path(harvester_cli.__path__[0]) / "__main__.py"), *args]
    sys.path[0] = str(Path.cwd())
    sys.modules["__main__"].__package__ = "harvester_cli"
    harvester_cli.main.main()


def _await_a_fork(control: socket.socket) -> list[str]:
    """Returns in the forks only."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 9)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if isinstance(request, int):
            control.send(str(_reap(request)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            break
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        for fd in (pidfd, *fds):
            os.close(fd)
    args, environment, directory, wanted, session = request
    control.close()
    for number in (signal.SIGTERM, signal.SIGHUP):  # ignored, if who began the run ignores them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _place(fds, wanted)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)
    if session:
        os.setsid()
    return list(args)


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _place(fds: Sequence[int], wanted: Sequence[int]) -> None:
    """Descriptors get these numbers."""
    away = [os.dup2(fd, 500 + number, inheritable=False) for number, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, wanted_fd in zip(away, wanted, strict=True):
        os.dup2(fd, wanted_fd)
        os.close(fd)


if __name__ == "__main__":
    _main()
