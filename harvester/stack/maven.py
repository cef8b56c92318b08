"""Fetches jars from a Maven repository, by their coordinates and digests.

Versions are resolved beforehand: a *lock*, created by `scripts/jars` with Maven itself, lists every jar with its
SHA-256. So everywhere the same files are fetched, without descriptors and over several connections at once. A line of a
lock is `SHA-256  group:artifact:version`; `#` begins a comment.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harvester.errors import StackError

REPOSITORY = "HARVESTER_MAVEN"
"""The environment variable that names a mirror of Maven Central."""
CENTRAL = "https://repo1.maven.org/maven2"
_CONNECTIONS = 8
_ATTEMPTS = 4
_TIMEOUT_S = 30.0
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar, and its required SHA-256, in hex."""

    group: str
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name in the repository, and in the target directory."""
        return f"{self.name}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Its path below the root of a repository."""
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.file}"


def parse_lock(text: str) -> tuple[Artifact, ...]:
    """The jars of a lock, in order. Raises ValueError for an invalid line, or for two jars with the same file name."""
    found: dict[str, Artifact] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        digest, coordinates = line.split()
        group, name, version = coordinates.split(":")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"{coordinates} has no SHA-256")
        artifact = Artifact(group, name, version, digest)
        if artifact.file in found:
            raise ValueError(f"{artifact.file} is listed twice")
        found[artifact.file] = artifact
    return tuple(found.values())


def fetch(
    artifacts: Iterable[Artifact],
    into: Path,
    *,
    what: str,
    hint: str,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch jars into a directory; StackError if one cannot be fetched, or does not match its digest.

    A request that fails is repeated a few times, unless the file does not exist.
    """
    repository = (os.environ.get(REPOSITORY) or CENTRAL).rstrip("/")
    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="maven") as pool:
        waiting = [pool.submit(_fetch, artifact, repository, into, pause) for artifact in artifacts]
        try:
            for each in waiting:
                each.result()
        except (OSError, ValueError) as error:
            pool.shutdown(cancel_futures=True)
            raise StackError(f"fetching {what}: {error}", hint=hint) from error


def _fetch(artifact: Artifact, repository: str, into: Path, pause: Callable[[float], None]) -> None:
    address = f"{repository}/{artifact.path}"
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            digest = _download(address, into / artifact.file)
        except urllib.error.HTTPError as error:
            error.close()
            if attempt == _ATTEMPTS or error.code in (401, 403, 404, 410):
                raise OSError(f"{address}: {error.code} {error.reason}") from error
        except (OSError, EOFError) as error:
            if attempt == _ATTEMPTS:
                raise OSError(f"{address}: {getattr(error, 'reason', error)}") from error
        else:
            if digest != artifact.sha256:
                raise ValueError(f"{address} is not the expected file: its SHA-256 is {digest}")
            return
        pause(0.5 * 2**attempt)


def _download(address: str, target: Path) -> str:
    """Returns the SHA-256 of what was written."""
    seen = hashlib.sha256()
    length = 0
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer, target.open("wb") as file:  # noqa: S310
        while piece := answer.read(_PIECE_BYTES):
            seen.update(piece)
            file.write(piece)
            length += len(piece)
        expected = answer.headers.get("Content-Length")
    if expected is not None and length != int(expected):
        raise EOFError(f"the connection broke after {length} of {expected} bytes")
    return seen.hexdigest()
