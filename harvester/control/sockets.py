"""Decides where control sockets are, who may listen on them, and which ones a client trusts.

A harvester listens in a directory to which no other user can write, on a socket for its owner alone. The socket of a
dead process refuses connections and is replaced; that of a live process, even a stopped or stuck one, is left alone.
Checking, removing and binding happen under a lock on the directory, so that two harvesters that start at once do not
take each other's socket for a dead one's.

A client trusts only directories into which no other user can have put a socket, and processes that may answer there:
any user of the machine can create `/tmp/harvester-0` before root does, listen in it, and tell root that a harvester has
stopped that is still running.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from harvester.control.protocol import NoPlace

LONGEST_PATH_BYTES = 107  # unix(7)
SUFFIX = ".sock"
SYSTEM = Path("/run/harvester")
_LONGEST_STEM = 48
_DIGEST = 8
_BACKLOG = 64
_LOCKED_S = 5.0
_ELSEWHERE = 'set control.socket to another path, or to "off"'
_OTHERS_WRITE = 0o022
_PEER = struct.Struct("3i")  # pid, uid, gid


def choices(environ: Mapping[str, str], uid: int, temp: str, system: Path = SYSTEM) -> list[Path]:
    """The directories in which a harvester of this user may put its socket, best first.

    Within a service, only the directory that systemd created for it; otherwise the user's runtime directory, the
    system's for root, and the user's own one in the temporary directory.
    """
    given = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        return [Path(given)]
    found = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _belongs_to(Path(runtime), uid):  # not another user's, as after `sudo -E`
        found.append(Path(runtime) / "harvester")
    if uid == 0:
        found.append(system)
    return [*found, Path(temp) / f"harvester-{uid}"]


def looked_through(environ: Mapping[str, str], uid: int, temp: str, system: Path = SYSTEM) -> list[Path]:
    """Where to look for harvesters: this user's directories and those of services; within a service, only its own."""
    folders = choices(environ, uid, temp, system)
    if environ.get("RUNTIME_DIRECTORY"):
        return folders
    return list(dict.fromkeys([*folders, system, *_folders_in(system)]))


def file_name(name: str) -> str:
    """The socket's file name for a harvester with this name."""
    stem = quote(name, safe="@:+,=")
    stem = "%2E" + stem[1:] if stem.startswith(".") else stem
    if len(stem) > _LONGEST_STEM:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
        stem = f"{stem[: _LONGEST_STEM - _DIGEST - 1]}~{digest}"
    return stem + SUFFIX


def fits(path: Path | str) -> bool:
    """Whether the path is short enough for a socket."""
    return len(str(path).encode("utf-8", "surrogateescape")) <= LONGEST_PATH_BYTES


def _belongs_to(folder: Path, uid: int) -> bool:
    try:
        return folder.is_dir() and folder.stat().st_uid == uid
    except OSError:
        return False


def _folders_in(folder: Path) -> list[Path]:
    """A service with several instances has a directory for each."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as recorded by the kernel when it connected or listened."""
    pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def about(folder: Path, uid: int) -> os.stat_result:
    """The status of a directory. Follows a link only if root or this user created it, as systemd does for services.

    Raises OSError.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid in (0, uid):
        found = folder.stat()
    return found


def is_believed(folder: Path, uid: int) -> bool:
    """Whether only this user and root can have put sockets into this directory.

    Root also accepts a service's own directory if only root can have created it. Raises OSError.
    """
    found = about(folder, uid)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & _OTHERS_WRITE:
        return False
    if found.st_uid in (0, uid):
        return True
    around = folder.parent.stat()
    return uid == 0 and around.st_uid == 0 and not around.st_mode & _OTHERS_WRITE


def may_answer(peer_uid: int, own_uid: int, folder_uid: int) -> bool:
    """Whether to trust a process of this user: ours, root's or, for root, the directory owner's.

    Another user's harvester would not obey us either.
    """
    return peer_uid in (0, own_uid) or (own_uid == 0 and peer_uid == folder_uid)


@dataclass(slots=True)
class Listener:
    """A listening socket; `close` removes its file, unless another socket has taken its place."""

    path: Path
    socket: socket.socket
    _file: tuple[int, int]

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a connection
        self.socket.close()
        with contextlib.suppress(OSError), _locked(self.path.parent):
            if _identity(self.path) == self._file:
                self.path.unlink()


def is_live(path: Path) -> bool:
    """Whether a process listens on this socket. Raises OSError if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog is full
            return True
    return True


def listen_in_first(folders: Sequence[Path], name: str, uid: int) -> Listener:
    """Listen in the first usable directory, creating it if missing; raises NoPlace."""
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
    """Listen on exactly this path, creating its directory if missing. Raises NoPlace."""
    try:
        _prepare(path.parent, uid)
    except OSError as error:
        raise NoPlace(f"there is no place for the control socket {path}: {error}", hint=_ELSEWHERE) from error
    return _listen(path, sweep=False)


def _prepare(folder: Path, uid: int) -> None:
    """Make sure that the directory exists, is ours, and is not writable by others."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = about(folder, uid)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
        raise NoPlace(
            f"{folder} is not a directory of this user that only this user can write to",
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
                path.chmod(0o600)  # before anyone can connect
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
        raise NoPlace(f"{path} exists and is not a socket", hint=_ELSEWHERE)
    if is_live(path):
        raise NoPlace(
            f"another harvester listens on the control socket {path}",
            hint=f"give each harvester its own name, or {_ELSEWHERE}",
        )
    path.unlink()


def _sweep(folder: Path) -> None:
    """Remove the sockets of dead processes: by default, each had its own name."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not is_live(path):
                path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the directory's lock; raises OSError if another process does not release it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCKED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EAGAIN, f"another process holds the lock of {folder}") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
