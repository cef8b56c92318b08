"""A listening control socket: in a directory that nobody else can write, for its owner alone, one for each path.

The socket of a process that died refuses connections and is replaced; that of a live one, stopped or stuck as it may
be, is left alone. Two harvesters that start at once do not take each other's for dead: whoever looks, removes and binds
holds a lock on the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harvester.control.errors import NoPlace
from harvester.control.peers import about
from harvester.control.places import LONGEST_PATH_BYTES, SUFFIX, fits

_BACKLOG = 64
_LOCKED_S = 5.0
_ELSEWHERE = 'set control.socket to another path, or to "off"'


@dataclass(slots=True)
class Listener:
    """A socket that listens; `close` removes its file, unless another one has taken its place."""

    path: Path
    socket: socket.socket
    _file: tuple[int, int]

    def close(self) -> None:
        """Nobody can connect from now on."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for a connection
        self.socket.close()
        with contextlib.suppress(OSError), _locked(self.path.parent):
            if _identity(self.path) == self._file:
                self.path.unlink()


def is_live(path: Path) -> bool:
    """Whether somebody listens on this socket. Raises OSError where that cannot be found out."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog is full
            return True
    return True


def listen_in_first(folders: Sequence[Path], name: str, uid: int) -> Listener:
    """Listen in the first of these directories that can be used, made where it is missing; raises NoPlace."""
    problems = []
    for folder in folders:
        try:
            _prepare(folder, uid)
        except (NoPlace, OSError) as error:
            problems.append(f"{folder}: {error}")
            continue
        return _listen(folder / name, sweep=True)
    raise NoPlace(f"there is no place for the control socket ({'; '.join(problems)})", hint=_ELSEWHERE)


def listen(path: Path, uid: int) -> Listener:
    """Listen on exactly this path; its directory is made where it is missing. Raises NoPlace."""
    try:
        _prepare(path.parent, uid)
    except OSError as error:
        raise NoPlace(f"there is no place for the control socket {path}: {error}", hint=_ELSEWHERE) from error
    return _listen(path, sweep=False)


def _prepare(folder: Path, uid: int) -> None:
    """The directory exists, is ours, and nobody else can write to it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = about(folder, uid)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
        raise NoPlace(
            f"{folder} is not a directory of this user's that nobody else can write to",
            hint=f"give it to uid {uid} with mode 0700, or {_ELSEWHERE}",
        )


def _listen(path: Path, *, sweep: bool) -> Listener:
    if not fits(path):
        raise NoPlace(f"{path} is longer than {LONGEST_PATH_BYTES} bytes, too long for a socket", hint=_ELSEWHERE)
    try:
        with _locked(path.parent):
            _make_room(path)
            if sweep:
                _sweep(path.parent)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                listening.bind(str(path))
                path.chmod(0o600)  # before anybody can connect
                listening.listen(_BACKLOG)
                return Listener(path, listening, _identity(path))
            except OSError:
                listening.close()
                raise
    except OSError as error:
        raise NoPlace(f"the control socket {path} cannot be used: {error}", hint=_ELSEWHERE) from error


def _make_room(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise NoPlace(f"{path} exists and is no socket", hint=_ELSEWHERE)
    if is_live(path):
        raise NoPlace(
            f"another harvester listens on the control socket {path}",
            hint=f"give each harvester a name of its own, or {_ELSEWHERE}",
        )
    path.unlink()


def _sweep(folder: Path) -> None:
    """Remove what other processes that died have left: by default each has had a name of its own."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not is_live(path):
                path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the directory's lock; raises OSError when it is not to be had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCKED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EAGAIN, f"somebody holds the lock of {folder}") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
