"""A real systemd, first process of namespaces of its own: it sees the machine's files and network, and only our units.

What it needs to be tried with a unit for production: the program below /opt/harvester, whose files the service's own
user may read, and a configuration below /etc/harvester. Both are there in its namespace alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from .wait import eventually

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may have a systemd of its own")
needs_systemd = pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemd is not installed")
_SPACES = ("--fork", "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--kill-child")
_TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network-online", "umount", "final", "exit")
_SETUP = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system /run/etc
cp -a /etc/. /run/etc
mount --bind /run/etc /etc
mkdir -p /etc/harvester
cp "$1"/units/* /run/systemd/system
cp "$1"/harvester.toml /etc/harvester
chmod -R a+rX /etc/harvester
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/harvester/bin /opt/harvester/python /opt/harvester/site /opt/harvester/lib/harvester \
  /opt/harvester/lib/harvester_cli
mount --bind "$2" /opt/harvester/python
mount --bind "$3" /opt/harvester/site
mount --bind "$4"/harvester /opt/harvester/lib/harvester
mount --bind "$4"/cli/harvester_cli /opt/harvester/lib/harvester_cli
cat > /opt/harvester/bin/harvester <<END
#!/bin/sh
export PYTHONPATH=/opt/harvester/lib:/opt/harvester/site LD_LIBRARY_PATH=/opt/harvester/python/lib
exec /opt/harvester/python/bin/python$5 -m harvester_cli "\\$@"
END
chmod 755 /opt/harvester/bin/harvester
exec env -i container=test PATH=/usr/bin:/bin:/usr/sbin:/sbin SYSTEMD_UNIT_PATH=/run/systemd/system \
  /lib/systemd/systemd --system --unit=multi-user.target --log-target=console --show-status=no
"""


class Systemd:
    """One that runs; `pid` is its first process as seen from here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, *command: str, check: bool = True) -> str:
        """A command among its processes; what it said."""
        enter = ("nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts", "--cgroup")
        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False, timeout=120)
        if check:
            assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names))
        return dict(line.split("=", 1) for line in text.splitlines() if line)

    def processes(self, unit: str) -> list[int]:
        """Those in the unit's control group, by their numbers in the namespace."""
        group = self.show(unit, "ControlGroup")["ControlGroup"]
        files = f"cat /sys/fs/cgroup/systemd{group}/cgroup.procs /sys/fs/cgroup{group}/cgroup.procs 2>/dev/null || true"
        return sorted({int(line) for line in self.run("sh", "-c", files).split()}) if group else []


@contextmanager
def running(directory: Path, units: Mapping[str, str], config: Path) -> Iterator[Systemd]:
    """With these units, by their names; ended with all its processes."""
    folder = directory / "units"
    folder.mkdir()
    for name in _TARGETS:
        needs = "Requires=basic.target\nAfter=basic.target\n" if name == "multi-user" else ""
        (folder / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n{needs}")
    for name, text in units.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copy(config, directory / "harvester.toml")
    version = sysconfig.get_python_version()
    tried = subprocess.run(
        ["unshare", *_SPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, check=False
    )
    if tried.returncode:  # as in most containers
        pytest.skip(f"this machine's root may not make namespaces: {tried.stderr.decode().strip()}")
    given = (str(directory), sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), version)
    with (directory / "systemd.log").open("w") as log:
        parent = subprocess.Popen(["unshare", *_SPACES, "bash", "-c", _SETUP, "setup", *given], stdout=log, stderr=log)
        try:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            eventually(lambda: children.read_text().split(), what="the first process of the namespaces")
            systemd = Systemd(int(children.read_text().split()[0]))
            eventually(
                lambda: systemd.run("systemctl", "is-system-running", check=False).strip() in ("running", "degraded"),
                what=f"systemd to run, see {log.name}",
            )
            yield systemd
        finally:
            # The end of its first process is the end of all in a namespace.
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            parent.wait()
