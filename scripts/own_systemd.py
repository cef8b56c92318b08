"""A real systemd, first process of namespaces of its own: it sees the machine's files and network, and only our units.

/opt, /run and /etc/systemd/system are empty in it, and /etc is a copy, so that whatever is installed there is gone with
it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_SPACES = ("--fork", "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--kill-child")
_TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network-online", "umount", "final", "exit")
_BEGIN = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system /run/etc
cp -a /etc/. /run/etc
mount --bind /run/etc /etc
rm -rf /etc/systemd/system /etc/harvester
mkdir -p /etc/systemd/system /etc/harvester
cp "$1"/units/* /run/systemd/system
mount -t tmpfs -o mode=755 tmpfs /opt
"""
_END = """
exec env -i container=test PATH=/usr/bin:/bin:/usr/sbin:/sbin \
  SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/systemd/system \
  /lib/systemd/systemd --system --unit=multi-user.target --log-target=console --show-status=no
"""


class Impossible(Exception):
    """This machine's root may not make namespaces, as in most containers."""


class Systemd:
    """One that runs; `pid` is its first process as seen from here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command among its processes."""
        enter = ("nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts", "--cgroup")
        return subprocess.run([*enter, *command], capture_output=True, text=True, check=False, timeout=300)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.call("systemctl", "show", unit, *(f"--property={name}" for name in names)).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if line)


@contextmanager
def booted(directory: Path, prepare: str = "", arguments: Sequence[str] = ()) -> Iterator[Systemd]:
    """Yields once it is up, and ends it with all its processes. Its log is `systemd.log` in the directory.

    Units in the directory's folder `units` are known to it. `prepare` are lines of shell, run in its namespaces before
    it starts, in which `$1` is the directory and `$2` and so on the arguments.
    """
    units = directory / "units"
    units.mkdir(exist_ok=True)
    for name in _TARGETS:
        needs = "Requires=basic.target\nAfter=basic.target\n" if name == "multi-user" else ""
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n{needs}")
    tried = subprocess.run(
        ["unshare", *_SPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, check=False
    )
    if tried.returncode:
        raise Impossible(tried.stderr.decode().strip())
    script = _BEGIN + prepare + _END
    with (directory / "systemd.log").open("w") as log:
        parent = subprocess.Popen(
            ["unshare", *_SPACES, "bash", "-c", script, "setup", str(directory), *arguments], stdout=log, stderr=log
        )
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        try:
            deadline = time.monotonic() + 60
            while not _runs(children):
                if parent.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"systemd does not run, see {log.name}")
                time.sleep(0.05)
            yield Systemd(_first(children))
        finally:
            # The end of its first process is the end of all in a namespace.
            if parent.poll() is None:
                for pid in children.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            parent.wait()


def _first(children: Path) -> int:
    return int(children.read_text().split()[0])


def _runs(children: Path) -> bool:
    try:
        state = Systemd(_first(children)).call("systemctl", "is-system-running").stdout.strip()
    except (OSError, IndexError):
        return False
    return state in ("running", "degraded")
