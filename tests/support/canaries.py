"""Secrets that are recognised wherever they turn up, and everything that can be captured of a running command."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

DATABASE, KAFKA, KEY = "Canary-of-the-database-7f3a", "Canary-of-the-broker-91cc", "Canary-of-the-key-5d20"
CANARIES = (DATABASE, KAFKA, KEY)


def leaks(text: str | bytes, secrets: Iterable[str] = CANARIES) -> list[str]:
    """Where a secret stands in a text, plain or in one of the usual encodings: a piece of what is around it."""
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    found = []
    for secret in secrets:
        plain = secret.encode()
        for form in (plain, base64.b64encode(plain).rstrip(b"="), plain.hex().encode(), plain.replace(b"-", b"%2D")):
            at = data.find(form)
            if at >= 0:
                found.append(data[max(0, at - 120) : at + 120].decode(errors="replace"))
    return found


def process_list() -> bytes:
    """The arguments of every process of this machine."""
    return b"\n".join(_read(entry / "cmdline") for entry in Path("/proc").iterdir() if entry.name.isdigit())


def environment(pid: int) -> bytes:
    """What a process was started with."""
    return _read(Path(f"/proc/{pid}/environ"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
