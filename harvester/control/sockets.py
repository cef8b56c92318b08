"""Decides where control sockets are, who may listen on them, and which a client trusts.

A harvester listens in a directory that nobody else can write to, on a socket for its owner alone. The socket of a dead
process refuses connections and is replaced; that of a live one, stopped or stuck as it may be, is left alone. Whoever
looks, removes and binds holds a lock on the directory meanwhile, so that two harvesters that start at once do not take
each other's socket for a dead one's.

A client trusts only directories that nobody else can have put a socket into, and processes that may answer there: any
user of the machine can make `/tmp/harvester-0` before root does and listen in it, and could tell root that a harvester
has stopped that runs on.
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

    Within a service only the directory that systemd made for it; otherwise the user's runtime directory, the system's
    for root, and one of the user's own under the temporary directory.
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
    """Where to look for harvesters: this user's directories and those of services; within a service only its own."""
    folders = choices(environ, uid, temp, system)
    if environ.get("RUNTIME_DIRECTORY"):
        return folders
    return list(dict.fromkeys([*folders, system, *_folders_in(system)]))


def file_name(name: str) -> str:
    """The socket's file name for a harvester of this name."""
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
    """A service of which there are several instances has a directory for each."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel recorded them when it connected or listened."""
    pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def about(folder: Path, uid: int) -> os.stat_result:
    """The status of a directory. Follows a link only if root or this user made it, as systemd does for services.

    Raises OSError.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid in (0, uid):
        found = folder.stat()
    return found


def is_believed(folder: Path, uid: int) -> bool:
    """Whether only this user and root can have put sockets into this directory.

    For root a service's own directory will do as well, where nobody but root can have made it. Raises OSError.
    """
    found = about(folder, uid)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & _OTHERS_WRITE:
        return False
    if found.st_uid in (0, uid):
        return True
    around = folder.parent.stat()
    return uid == 0 and around.st_uid == 0 and not around.st_mode & _OTHERS_WRITE


def may_answer(peer_uid: int, own_uid: int, folder_uid: int) -> bool:
    """Whether to trust a process of this user: it runs as we do, as root or, for root, as the owner of the directory.

    A harvester of anybody else would not obey us either.
    """
    return peer_uid in (0, own_uid) or (own_uid == 0 and peer_uid == folder_uid)


@dataclass(slots=True)
class Listener:
    """A socket that listens; `close` removes its file, unless another one has taken its place."""

    path: Path
    socket: socket.socket
    _file: tuple[int, int]

    def close(self) -> None:
        """Stop listening."""
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
        raise NoPlace(f"{path} exists and is not a socket", hint=_ELSEWHERE)
    if is_live(path):
        raise NoPlace(
            f"another harvester listens on the control socket {path}",
            hint=f"give each harvester a name of its own, or {_ELSEWHERE}",
        )
    path.unlink()


def _sweep(folder: Path) -> None:
    """Remove the sockets of dead processes: by default, each has had a name of its own."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not is_live(path):
                path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the directory's lock; raises OSError when another process does not release it."""
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
