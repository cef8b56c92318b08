"""An operator on a virtual machine: the commands of docs/operations.md, under a real systemd.

The systemd is the first process of namespaces of its own, so nothing is left of it. It finds a Python at /opt/python,
that of this checkout; the servers run elsewhere, as far as it knows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import psycopg.conninfo

from harvester.stack import StackInfo
from scripts.own_systemd import Impossible, Systemd, booted

from .steps import PUMP, RECORDS, TOPIC, Failed, Hour, checked, verdict, wait_published

UNIT = "harvester.service"
_CONFIGURATION = """\
leader_group_id = "shop"
data_source = "{dsn} password=${{DB_PASSWORD}}"

[base_kafka_config]
"bootstrap.servers" = "{bootstrap}"
"broker.address.family" = "v4"
"""
# The interpreter is a borrowed one, which looks for its library where it was built.
_SECRETS = "DB_PASSWORD=known-to-nobody\nLD_LIBRARY_PATH=/opt/python/lib\n"
_PREPARE = """
mkdir /opt/python
mount --bind "$2" /opt/python
"""
_PROGRAM = "/opt/harvester/bin/harvester"
_FILE = "/etc/harvester/harvester.toml"


class Machine:
    """A shell of root's on it, in which the variables of harvester.env are known."""

    def __init__(self, systemd: Systemd) -> None:
        self.systemd = systemd

    def sh(self, command: str) -> str:
        return checked(self.systemd.call("bash", "-ec", f"set -a; {_SECRETS.replace(chr(10), ';')} {command}"))

    def harvester(self, *arguments: str) -> str:
        return self.sh(" ".join([_PROGRAM, *arguments, "--config", _FILE]))

    def published(self) -> bool:
        """Whether the service, as seen by `watch`, has published all."""
        said = self.systemd.call("bash", "-ec", f"LD_LIBRARY_PATH=/opt/python/lib {_PROGRAM} watch --once --json")
        return said.returncode == 0 and json.loads(said.stdout.splitlines()[0]).get("delivered") == RECORDS


def play(hour: Hour, wheels: Path, servers: StackInfo) -> dict[str, int]:
    """All steps; what `verify` found."""
    dsn = psycopg.conninfo.make_conninfo(servers.dsn, dbname="shop_vm")
    with psycopg.connect(servers.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop_vm")
    (hour.place / "harvester.toml").write_text(_CONFIGURATION.format(dsn=dsn, bootstrap=servers.bootstrap))
    (hour.place / "harvester.env").write_text(_SECRETS)
    try:
        with booted(hour.place, _PREPARE, [sys.base_prefix]) as systemd:
            return _play(hour, Machine(systemd), wheels)
    except Impossible as error:
        raise Failed(f"this machine's root may not make namespaces: {error}") from error


def _play(hour: Hour, machine: Machine, wheels: Path) -> dict[str, int]:
    python = f"/opt/python/bin/python{sysconfig.get_python_version()}"
    with hour.step("python3 -m venv, pip install outbox-harvester"):
        machine.sh(f"{python} -m venv /opt/harvester")
        machine.sh(
            "/opt/harvester/bin/pip install --quiet --disable-pip-version-check --no-index "
            f"--find-links {wheels} outbox-harvester"
        )
    with hour.step("configuration, secrets, harvester init"):
        machine.sh(f"mkdir -p /etc/harvester; cp {hour.place}/harvester.toml /etc/harvester/")
        machine.sh(f"install -m 0600 {hour.place}/harvester.env /etc/harvester/")
        machine.harvester("config", "check")
        machine.harvester("init", "--notify")
    with hour.step("harvester systemd install, systemctl enable --now"):
        machine.sh(f"{_PROGRAM} systemd install --system")
        machine.sh("systemctl daemon-reload")
        machine.sh("systemctl enable --now harvester")  # returns when it is ready
    state = machine.systemd.show(UNIT, "ActiveState", "StatusText")
    if state["ActiveState"] != "active":
        raise Failed(f"the service is {state}")
    with hour.step(f"harvester pump: {RECORDS:,} records, watched until all is published"):
        machine.harvester(*PUMP)
        wait_published(
            machine.published, lambda: f"the service did not publish all: {machine.systemd.show(UNIT, 'StatusText')}"
        )
    with hour.step("systemctl reload, systemctl stop"):
        machine.sh("systemctl reload harvester")
        machine.sh("systemctl stop harvester")
    ended = machine.systemd.show(UNIT, "ActiveState", "Result", "NRestarts")
    if ended != {"ActiveState": "inactive", "Result": "success", "NRestarts": "0"}:
        raise Failed(f"after the stop, the service is {ended}")
    with hour.step("harvester verify"):
        return verdict(machine.harvester("verify", "--topic", TOPIC, "--json"))


def unusable() -> str:
    """Why this machine cannot play it; empty if it can."""
    found = subprocess.run(["sh", "-c", "command -v systemctl nsenter unshare"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "systemd and util-linux are needed"
