"""The systemd unit: valid, in step with exit codes and timeouts, and its hardening does not break a relay's parts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harvester_cli.start import least_watchdog_s
from harvester_cli.systemd import NAMES, unit_text

from harvester.config import Limits
from harvester.errors import ExitCode

ROOT = Path(__file__).parents[2]
UNITS = [ROOT / "cli" / "harvester_cli" / "units" / name for name in NAMES]
UNIT, TEMPLATE = UNITS
WORST = 2.5  # what systemd-analyze calls the exposure level: 0 to 10
CONSOLE_SCRIPT = Path(sys.executable).parent / "harvester"
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1  # prctl(2); what MemoryDenyWriteExecute= sets

with_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings(text: str | None = None) -> dict[str, list[str]]:
    """Every setting of a unit with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in (UNIT.read_text(encoding="utf-8") if text is None else text).splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def complaints(folder: Path, text: str, name: str = "harvester.service", *, user: bool = False) -> list[str]:
    """What systemd says about a unit whose program is the installed one."""
    copy = folder / name.replace("@", "@billing")
    copy.write_text(unit_text(text, str(CONSOLE_SCRIPT), user=user), encoding="utf-8")
    manager = "--user" if user else "--system"
    done = subprocess.run(
        ["systemd-analyze", manager, "verify", "--man=no", str(copy)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "harvester" in line]
    return said if said or not done.returncode else done.stderr.splitlines()


@with_analyze
@pytest.mark.parametrize("user", [False, True])
@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_systemd_finds_nothing_wrong(unit: Path, user: bool, tmp_path: Path) -> None:
    assert complaints(tmp_path, unit.read_text(encoding="utf-8"), unit.name, user=user) == []


def exposure(unit: Path, threshold: float) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold * 10:.0f}", str(unit)]
    return subprocess.run(command, env=os.environ | {"LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False)


@with_analyze
@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_the_service_is_exposed_to_little(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text(encoding="utf-8"), encoding="utf-8")
    done = exposure(copy, WORST)
    assert done.returncode == 0, done.stdout[-300:]
    assert "Overall exposure level" in done.stdout
    copy.write_text(copy.read_text(encoding="utf-8").replace("CapabilityBoundingSet=\n", ""), encoding="utf-8")
    assert exposure(copy, WORST).returncode != 0  # it does look


def test_the_template_differs_by_the_name_alone() -> None:
    def bare(unit: Path) -> list[str]:
        text = unit.read_text(encoding="utf-8").replace("Harvester %i:", "Harvester:").replace("%i", "harvester")
        return [line for line in text.splitlines() if not line.startswith("#")]

    assert bare(TEMPLATE) == bare(UNIT)
    assert TEMPLATE.read_text(encoding="utf-8").count("=/etc/harvester/") == 0
    assert settings(TEMPLATE.read_text(encoding="utf-8"))["RuntimeDirectory"] == ["harvester/%i"]


def test_the_watchdog_gives_a_default_harvester_its_time() -> None:
    assert settings()["WatchdogSec"] == ["2min"]
    assert least_watchdog_s(Limits().heartbeat_timeout.total_seconds()) < 120


@with_analyze
def test_systemd_would_have_found_a_wrong_setting(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert complaints(tmp_path, text.replace("KillMode=control-group", "KillMode=gently")) != []
    assert complaints(tmp_path, text.replace("UMask=", "UMusk=")) != []


def test_what_a_restart_does_not_help_is_not_restarted() -> None:
    final = {ExitCode.USAGE, ExitCode.SCHEMA, ExitCode.POISON, ExitCode.LEADERSHIP, ExitCode.CONFIGURATION}
    assert settings()["RestartPreventExitStatus"] == [" ".join(str(int(code)) for code in sorted(final))]
    assert settings()["Restart"] == ["on-failure"]


def test_a_stop_has_time_for_the_drain() -> None:
    assert int(settings()["TimeoutStopSec"][0]) > 2 * Limits().drain_interval.total_seconds()
    assert settings()["KillMode"] == ["control-group"]


def test_the_command_line_is_one_that_the_program_knows() -> None:
    _, command, *options = settings()["ExecStart"][0].split()
    done = subprocess.run(
        [CONSOLE_SCRIPT, command, "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    for option in options:
        assert not option.startswith("-") or option in done.stdout


def test_forked_processes_and_clients_work_without_writable_code() -> None:
    """With what MemoryDenyWriteExecute= forbids, a forked shard can still use its Kafka and PostgreSQL clients."""
    script = """
import ctypes, os, sys, time
if ctypes.CDLL(None).prctl(int(sys.argv[1]), int(sys.argv[2]), 0, 0, 0):
    sys.exit(77)
from harvester.relay.forkserver import Forkserver
from tests.integration.test_unit_file import use_clients
forkserver = Forkserver()
while not forkserver.is_up():
    time.sleep(0.01)
child = forkserver.start(use_clients, None, "child")
told = os.read(child.read_fd, 10)
child.reap()
sys.exit(told != b"done")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(PR_SET_MDWE), str(PR_MDWE_REFUSE_EXEC_GAIN)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert done.returncode == 0, done.stderr


def use_clients(_spec: Any, _inbound: int, outbound: int, _shared: Any, _supervisor: int, _memory: int) -> int:
    """Runs in the forked child: delivery callbacks are called from C, the likeliest user of generated code."""
    import confluent_kafka
    import psycopg.sql

    # The child really is restricted: turning a writable page into an executable one is refused.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, ctypes.c_long(0))
    assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 5) == -1

    reports: list[object] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 1, "log_level": 0})
    producer.produce("t", b"x", on_delivery=lambda error, _message: reports.append(error))
    producer.flush(10)
    assert len(reports) == 1
    assert psycopg.sql.Literal("x").as_string(None) == "'x'"
    os.write(outbound, b"done")
    return 0
