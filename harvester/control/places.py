"""Where control sockets are: directories in the order of preference, and a file name for each harvester.

A Unix socket's path has 107 bytes at the most (unix(7)), so names are cut where they are long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

LONGEST_PATH_BYTES = 107
SUFFIX = ".sock"
SYSTEM = Path("/run/harvester")
_LONGEST_STEM = 48
_DIGEST = 8


def choices(environ: Mapping[str, str], uid: int, temp: str, system: Path = SYSTEM) -> list[Path]:
    """The directories in which a harvester of this user may put its socket, the best first.

    What systemd made for the service is the only one there; otherwise the user's runtime directory, the system's for
    root, and one of the user's own under the temporary directory.
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
    """Where to look for harvesters: this user's places, and those of services; within a service only its own."""
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
