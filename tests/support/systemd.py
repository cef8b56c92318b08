"""A real systemd with units of ours: the program below /opt/harvester, a configuration below /etc/harvester.

The service's own user may read both. They are there in its namespace alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts import own_systemd

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may have a systemd of its own")
needs_systemd = pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemd is not installed")
_SETUP = """
cp "$1"/harvester.toml /etc/harvester
chmod -R a+rX /etc/harvester
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
"""


class Systemd(own_systemd.Systemd):
    """One that runs, for tests."""

    def run(self, *command: str, check: bool = True) -> str:
        """A command among its processes; what it said."""
        done = self.call(*command)
        if check:
            assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def processes(self, unit: str) -> list[int]:
        """Those in the unit's control group, by their numbers in the namespace."""
        group = self.show(unit, "ControlGroup")["ControlGroup"]
        files = f"cat /sys/fs/cgroup/systemd{group}/cgroup.procs /sys/fs/cgroup{group}/cgroup.procs 2>/dev/null || true"
        return sorted({int(line) for line in self.run("sh", "-c", files).split()}) if group else []


@contextmanager
def running(directory: Path, units: Mapping[str, str], config: Path) -> Iterator[Systemd]:
    """With these units, by their names; ended with all its processes."""
    (directory / "units").mkdir()
    for name, text in units.items():
        (directory / "units" / name).write_text(text, encoding="utf-8")
    shutil.copy(config, directory / "harvester.toml")
    given = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), sysconfig.get_python_version())
    try:
        with own_systemd.booted(directory, _SETUP, given) as systemd:
            yield Systemd(systemd.pid)
    except own_systemd.Impossible as error:
        pytest.skip(f"this machine's root may not make namespaces: {error}")
