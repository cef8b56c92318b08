"""Whom a client believes: directories into which nobody else can have put a socket, processes that may answer there.

Any user of the machine can make `/tmp/harvester-0` before root does and listen in it. What is said to such a socket,
and by it, must not count: root would be told that a harvester has stopped that runs on.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_OTHERS_WRITE = 0o022
_PEER = struct.Struct("3i")  # pid, uid, gid


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel took them down when it connected, or listened."""
    pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def about(folder: Path, uid: int) -> os.stat_result:
    """What is there. A link is followed only where root or this user has made it: systemd does so for services.

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
    """Whether a process of this user is a harvester of ours: it runs as we do, as root, or, for root, as the user whose
    directory its socket is in. A harvester of anybody else would not obey us either."""
    return peer_uid in (0, own_uid) or (own_uid == 0 and peer_uid == folder_uid)
