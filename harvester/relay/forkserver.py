"""Starts shards and the elector as forks of a server that has imported everything and opened no connection.

Every supervisor has its own server, a fresh interpreter that inherits nothing from the host's main module, descriptors
and threads. It imports what a shard needs, freezes it for the garbage collector, and from then on only forks: shards
share the imported pages and start in milliseconds (ADR 22).

- *No thread and no client before a fork.* A lock that another thread holds would stay locked forever in a fork, and a
  connection would be shared. Importing confluent_kafka and psycopg starts neither. If something else has (an agent that
  the environment loads into every interpreter), the server starts fresh interpreters instead of forking.
- *As if the supervisor had started it.* Environment, import path, working directory, standard output and error are sent
  with every request, since all of them may have changed since the server started. They travel in an in-memory file that
  only the shard reads: the server never sees it, and its pages do not change.
- *Deaths.* The supervisor holds a pidfd of each process, made by the server before it could reap the process; so the
  supervisor kills exactly this process and knows that it is dead (P15), whatever happens to the server. Only the exit
  code comes from the server. A server that dies is replaced at the next start; its processes do not need it.
- *The supervisor's death.* All processes watch its pidfd. The server ends at once; shards finish what is on the wire;
  the elector (`elector`), which holds the place in the Kafka group, leaves after them.
- *Signals* to the whole process group or cgroup are blocked before the server exists, and ignored by the server and its
  processes; so is SIGABRT, which systemd's watchdog sends to all of them by default when the supervisor hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import multiprocess

from harvester.errors import ShardError
from harvester.relay.ipc import WORDS, Shared

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_MESSAGE = struct.Struct("=cqq")  # from the server: what, pid, exit code or errno
_UP, _STARTED, _FAILED, _ENDED = b"u", b"s", b"f", b"e"
_ANSWER_S = 2.0  # a server that does not fork within this time is replaced
_FDS = 7
_HINT = "standard error shows why; the kernel log lists processes that the kernel killed"
_LOSSES = 3  # consecutive servers lost without having started anything

# Runs a function of this module in a fresh interpreter with this one's import path.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from harvester.relay import forkserver; forkserver.{call}"


class Process:
    """A process started by the server, as the supervisor sees it."""

    def __init__(self, server: _Server, pid: int, sentinel: int, read_fd: int, write_fd: int) -> None:
        """`read_fd` and `write_fd`: the supervisor's ends of the pipes; the caller closes them."""
        self._server = server
        self.pid = pid
        self.sentinel = sentinel  # readable when the process has ended
        self.read_fd, self.write_fd = read_fd, write_fd

    def kill(self) -> None:
        """SIGKILL, unless it has already been reaped."""
        if self.sentinel >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def reap(self) -> int | None:
        """SIGKILL, and wait until it is dead (P15). Returns the exit code, None if the server could not tell."""
        self.kill()
        _wait(self.sentinel, None)
        os.close(self.sentinel)
        self.sentinel = -1
        return self._server.exit_code(self.pid)


class Forkserver:
    """The server of one supervisor, and the memory shared with all shards. Thread-safe."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._memory = os.memfd_create("harvester")
        weakref.finalize(self, os.close, self._memory)
        os.ftruncate(self._memory, 8 * WORDS)
        self.shared = _map(self._memory)
        self._server: _Server | None = None
        self._lost = 0
        self._lock = threading.RLock()  # guards the server and its replies

    def is_up(self) -> bool:
        """Whether it can start processes now; starts the server if there is none. Never blocks.

        Raises ShardError if the server ended before it was up.
        """
        with self._lock:
            if self._server is None:
                self._server = _Server(self._lock)
            return self._server.is_up()

    def start(self, target: Callable[..., int], spec: Any, name: str) -> Process | None:
        """Start a process that runs `target(spec, read_fd, write_fd, shared, supervisor_fd, memory)` and exits with its
        result.

        `supervisor_fd` becomes readable when the supervisor dies; `memory` is the descriptor of the shared memory.
        Returns None if the server has just died: call `is_up` again. Raises ShardError if the system allows no more
        processes, or if servers die repeatedly.
        """
        with self._lock:
            if self._server is None:  # another thread found it dead
                return None
            process = self._server.start((name, target, spec), self._memory)
            if process is not None:
                self._lost = 0
                return process
            self.close()
            self._lost += 1
            if self._lost >= _LOSSES:
                raise ShardError("the process that starts shards died repeatedly", hint=_HINT)
            return None

    def close(self) -> None:
        """End the server; processes it has started keep running."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _Server:
    """One server process, as the supervisor sees it. `lock` is held around everything but `exit_code`."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._up = False
        self._codes: dict[int, int] = {}  # exit codes of ended processes
        supervisor_fd = os.pidfd_open(os.getpid())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the server ignores them
        try:
            self._process = subprocess.Popen(
                _command(f"serve({theirs.fileno()}, {supervisor_fd})"),
                pass_fds=(theirs.fileno(), supervisor_fd),
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(supervisor_fd)

    def is_up(self) -> bool:
        while not self._up and _wait(self._control.fileno(), 0):
            if self._hear() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ANSWER_S)  # for its own exit code rather than that of a kill
                self.close()
                raise ShardError(
                    f"the process that starts shards ended with exit code {self._process.returncode}",
                    hint=_HINT,
                )
        return self._up

    def start(self, what: tuple[str, Callable[..., int], Any], memory: int) -> Process | None:
        """None if the server is dead or does not answer."""
        inbound, write_fd = _pipe()
        read_fd, outbound = _pipe()
        theirs = [inbound, outbound, memory, *_surroundings(what)]
        try:
            socket.send_fds(self._control, [b"f"], theirs)
            answer = self._hear_of((_STARTED, _FAILED), None)
        except OSError:
            answer = None
        finally:
            for fd in (inbound, outbound, *theirs[3:]):
                os.close(fd)
        if answer is None:
            os.close(read_fd)  # a process it may have started in the meantime ends because of this
            os.close(write_fd)
            return None
        kind, pid, code, fds = answer
        if kind == _FAILED:
            os.close(read_fd)
            os.close(write_fd)
            raise ShardError(f"the process {what[0]} cannot be started: {os.strerror(code)}")
        (sentinel,) = fds
        self._codes.pop(pid, None)
        return Process(self, pid, sentinel, read_fd, write_fd)

    def exit_code(self, pid: int) -> int | None:
        with self._lock:
            if pid not in self._codes:
                self._hear_of((_ENDED,), pid)
            return self._codes.pop(pid, None)

    def close(self) -> None:
        self._control.close()
        self._process.kill()  # it holds no state
        self._process.wait()

    def _hear_of(self, kinds: tuple[bytes, ...], pid: int | None) -> tuple[bytes, int, int, list[int]] | None:
        """Wait for a message of these kinds about this process, or about any. None if the server sends none."""
        while self._control.fileno() >= 0 and _wait(self._control.fileno(), _ANSWER_S):
            heard = self._hear()
            if heard is None:
                return None
            if heard[0] in kinds and pid in (None, heard[1]):
                return heard
        return None

    def _hear(self) -> tuple[bytes, int, int, list[int]] | None:
        """The next message; None if the server is dead."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
        if not data:
            return None
        kind, pid, code = _MESSAGE.unpack(data)
        self._up = True
        if kind == _ENDED:
            self._codes[pid] = code
        return kind, pid, code, fds


def _pipe() -> tuple[int, int]:
    """Two descriptors of the caller's: to read and to write."""
    reader, writer = multiprocess.Pipe(duplex=False)
    with reader, writer:
        return os.dup(reader.fileno()), os.dup(writer.fileno())


def _surroundings(what: tuple[str, Callable[..., int], Any]) -> list[int]:
    """New descriptors: the process's instructions, the working directory, standard output and error."""
    told = os.memfd_create("harvester-shard")
    with open(told, "wb", closefd=False) as file:
        pickle.dump((dict(os.environb), _import_path()), file)
        pickle.dump(what, file)
    os.lseek(told, 0, os.SEEK_SET)
    fds = [told, os.open(".", os.O_PATH | os.O_DIRECTORY)]
    for standard in (1, 2):
        try:
            fds.append(os.dup(standard))
        except OSError:  # a daemon may have closed it
            fds.append(os.open(os.devnull, os.O_WRONLY))
    return fds


def _import_path() -> list[str]:
    """This process's import path; the harvester is always found, the working directory (`""`) never searched."""
    home = str(Path(__file__).parents[2])
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return path if home in path else [*path, home]


def _command(call: str) -> list[str]:
    flags: list[str] = cast(Any, subprocess)._args_from_interpreter_flags()
    safe = [] if "-P" in flags else ["-P"]  # until the program has set its path
    return [sys.executable, *flags, *safe, "-c", _PROGRAM.format(path=_import_path(), call=call)]


def _wait(fd: int, within_s: float | None) -> bool:
    """Whether the descriptor becomes readable within `within_s`."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if within_s is None else within_s * 1000))


def _map(memory: int) -> Shared:
    words: Any = (ctypes.c_int64 * WORDS).from_buffer(mmap.mmap(memory, 8 * WORDS))
    return cast(Shared, words)


# -- in the server


def serve(control_fd: int, supervisor_fd: int) -> NoReturn:
    """The server: forks on request until the supervisor closes its end or dies."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    signal.signal(signal.SIGABRT, signal.SIG_IGN)  # abort() still ends a process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it passes that on, and exit codes would be lost
    _name("forkserver")
    gc.disable()  # freed objects would leave holes in shared pages
    for module in ("harvester.relay.shard", "harvester.relay.elector"):  # with all that they import
        importlib.import_module(module)

    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    try:
        control.send(_MESSAGE.pack(_UP, os.getpid(), 0))
        _serve(control, supervisor_fd)
    except ConnectionError:
        pass  # the supervisor is gone
    os._exit(0)


def _serve(control: socket.socket, supervisor_fd: int) -> None:
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(supervisor_fd, select.POLLIN)
    running: dict[int, int] = {}  # pid by pidfd
    while True:
        for fd, _ in poller.poll():
            if fd in running:
                pid = running.pop(fd)
                poller.unregister(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                control.send(_MESSAGE.pack(_ENDED, pid, code))
            elif fd == supervisor_fd:
                return
            else:
                request, fds, _, _ = socket.recv_fds(control, 1, _FDS, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    return
                try:
                    pid = _begin([supervisor_fd, *fds], [control.fileno(), *running])
                except OSError as error:
                    control.send(_MESSAGE.pack(_FAILED, 0, error.errno))
                    continue
                finally:
                    for given in fds:
                        os.close(given)
                sentinel = os.pidfd_open(pid)
                running[sentinel] = pid
                poller.register(sentinel, select.POLLIN)
                socket.send_fds(control, [_MESSAGE.pack(_STARTED, pid, 0)], [sentinel])


def _begin(fds: list[int], of_server: list[int]) -> int:
    """Fork a process that has these descriptors and none of the others; returns its pid."""
    if not _is_alone():
        for fd in fds:
            os.set_inheritable(fd, True)
        command = _command(f"become({', '.join(map(str, fds))})")
        return os.posix_spawn(command[0], command, os.environb)
    pid = os.fork()
    if pid == 0:
        try:
            for fd in of_server:
                os.close(fd)
            become(*fds)
        finally:
            os._exit(1)
    return pid


def _is_alone() -> bool:
    """Whether this thread is the only one of its process; False if that cannot be determined."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


# -- in the shard


def become(
    supervisor_fd: int, inbound: int, outbound: int, memory: int, told: int, directory: int, stdout: int, stderr: int
) -> NoReturn:
    """Take over the supervisor's environment and directories, and run what was requested."""
    code = 1
    try:
        for source, standard in ((stdout, 1), (stderr, 2)):
            os.dup2(source, standard)
        os.fchdir(directory)
        with open(told, "rb") as file:
            environment, sys.path[:] = pickle.load(file)  # noqa: S301 - from the supervisor
            os.environb.clear()
            os.environb.update(environment)
            name, target, spec = pickle.load(file)  # noqa: S301 - from the supervisor
        shared = _map(memory)
        for fd in (stdout, stderr, directory):
            os.close(fd)
        _name(name)
        gc.enable()
        code = target(spec, inbound, outbound, shared, supervisor_fd, memory)
    except BaseException:  # noqa: BLE001 - the top frame of this process
        traceback.print_exc()
    os._exit(code)  # without waiting for a client: what it still holds must not be sent after we have ended


def _name(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
