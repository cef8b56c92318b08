"""Runs the files of a container image as an engine would: without one, in namespaces of its own.

The root is read-only, the program has an account without privileges, tini is process 1, and only what the page says is
mounted: a tmpfs at /run/harvester, /proc, and a few devices. The network is the machine's.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
USER = 65532
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True, slots=True)
class Image:
    """An image: where its files are, and what its configuration says (`config` of its Docker format)."""

    root: Path
    config: Mapping[str, Any]

    def command(
        self,
        arguments: Sequence[str] | None,
        mounts: Mapping[Path, str],
        environment: Mapping[str, str],
        *,
        probe: bool = False,
    ) -> list[str]:
        """`arguments` instead of the image's CMD; `probe`: without its entrypoint, as a health check is run."""
        program = [
            *([] if probe else self.config["Entrypoint"]),
            *(self.config["Cmd"] if arguments is None else arguments),
        ]
        root = shlex.quote(str(self.root))
        lines = [
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            f"mount -t tmpfs -o mode=0700,uid={USER},gid={USER} tmpfs {root}/run/harvester",
            f"mount -t proc proc {root}/proc",
            f"mount -t tmpfs -o mode=0755 tmpfs {root}/dev",
            *(f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}" for name in _DEVICES),
            f"mkdir -m 1777 {root}/dev/shm",  # noqa: S108 - of the container
            f"mount -t tmpfs -o mode=0755 tmpfs {root}/etc/harvester",
        ]
        for source, inside in mounts.items():
            at = f"{root}{shlex.quote(inside)}"
            lines += [f"touch {at}", f"mount --bind {shlex.quote(str(source))} {at}"]
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in environment.items())]
        inner = shlex.join(["env", "-i", *variables, *program])
        lines.append(f"exec chroot --userspec={self.config['User']} {root} {inner}")
        return [
            *("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--propagation", "private"),
            *("sh", "-ec", "\n".join(lines)),
        ]

    def run(
        self,
        *arguments: str,
        mounts: Mapping[Path, str] | None = None,
        environment: Mapping[str, str] | None = None,
        probe: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(arguments, mounts or {}, environment or {}, probe=probe)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def built() -> Image:
    """The image that `scripts/image` makes, made anew."""
    said = subprocess.run([ROOT / "scripts" / "image", "--root"], stdout=subprocess.PIPE, check=True).stdout
    made = json.loads(said.splitlines()[-1])
    inspected = subprocess.run(
        ["buildah", "inspect", "--type", "image", made["image"]], capture_output=True, check=True
    ).stdout
    return Image(Path(made["root"]), json.loads(inspected)["Docker"]["config"])


@dataclass(slots=True)
class Container:
    """A running program of an image."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def first(self) -> int:
        """The pid, as seen from outside, of the process that is 1 inside."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def stop(self, timeout_s: float = 60.0) -> int:
        """What an engine does: SIGTERM to process 1; its exit code."""
        os.kill(self.first, signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """What a machine that fails does: everything inside ends with process 1.

        `unshare --kill-child` would not do: the kernel forgets whom a process dies with when its account changes.
        """
        if self.process.poll() is not None:
            return  # its pid may be another process's by now
        with suppress(OSError, IndexError):  # it ends at this moment
            os.kill(self.first, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another command beside process 1, with its variables, as `kubectl exec` runs it."""
        first = self.first
        variables = Path(f"/proc/{first}/environ").read_text().rstrip("\0").split("\0")
        spaces = ("--mount", "--pid", "--ipc", "--uts", "--root", "--wd")
        return subprocess.run(
            ["nsenter", "--target", str(first), *spaces, "--setuid", str(USER), "--setgid", str(USER),
             "env", "-i", *variables, *command],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def container(
    image: Image,
    log: Path,
    *arguments: str,
    mounts: Mapping[Path, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Container]:
    """Runs the image's own command, or these arguments of it; killed at the end."""
    file: IO[bytes]
    with log.open("ab") as file:
        process = subprocess.Popen(
            image.command(arguments or None, mounts or {}, environment or {}),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
        made = Container(process, log)
        try:
            deadline = time.monotonic() + 30
            while process.poll() is None and not _begun(made) and time.monotonic() < deadline:
                time.sleep(0.02)
            yield made
        finally:
            made.kill()


def _begun(made: Container) -> bool:
    try:
        return Path(f"/proc/{made.first}/comm").read_text().strip() == "tini"
    except (OSError, IndexError):
        return False
