"""The shipped unit, as it is, under a real systemd: hardening, notifications, reload, restarts, watchdog, stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import systemd
from tests.support.harvesting import Scene, causal
from tests.support.systemd import ROOT, Systemd
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]
pytestmark = [systemd.needs_root, systemd.needs_systemd, pytest.mark.timeout(240)]
UNIT = "harvester.service"
# Where the test reads what would go to the journal, and shorter waits.
_ASIDE = """
[Service]
StandardOutput=append:/run/harvester.out
StandardError=append:/run/harvester.out
RestartSec=100ms
WatchdogSec=5s
"""


@pytest.fixture
def manager(scene: Scene, tmp_path: Path) -> Iterator[Systemd]:
    config = scene.config_file(control={"socket": "auto"}, heartbeat_timeout="500ms")
    shipped = (ROOT / "cli" / "harvester_cli" / "units" / UNIT).read_text(encoding="utf-8")
    place = tmp_path / "systemd"
    place.mkdir()
    with systemd.running(place, {UNIT: shipped + _ASIDE}, config) as started:
        yield started


def test_a_service_from_start_to_stop(manager: Systemd, scene: Scene) -> None:
    seldom: dict[str, float] = {"interval_s": 0.3, "longest_interval_s": 0.3}  # each question is a few processes

    def state() -> dict[str, str]:
        return manager.show(UNIT, "ActiveState", "SubState", "StatusText", "MainPID", "NRestarts", "Result")

    def leads() -> bool:
        return state()["StatusText"].startswith("leading")

    def said() -> str:
        return manager.run("cat", "/run/harvester.out", check=False)

    def add_and_wait(value: str) -> None:
        scene.add(*((key, value) for key in "abcdef"))
        scene.wait_left(timeout_s=90)

    manager.run("systemctl", "start", UNIT, check=False)
    assert state()["ActiveState"] == "active", manager.run("systemctl", "status", UNIT, check=False) + said()
    eventually(leads, 90, "the service to lead", **seldom)
    add_and_wait("1")

    # The service is of a user of its own, which may gain nothing.
    main = state()["MainPID"]
    status = dict(
        line.split(":\t", 1) for line in manager.run("cat", f"/proc/{main}/status").splitlines() if ":\t" in line
    )
    assert status["Uid"].split()[0] != "0"
    assert (int(status["CapEff"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")
    shown = json.loads(manager.run("/opt/harvester/bin/harvester", "watch", "--once", "--json"))
    assert "leader" in json.dumps(shown)

    manager.run("systemctl", "reload", UNIT)
    eventually(lambda: "reload: " in said(), what="word of the reload")
    assert state()["ActiveState"] == "active"

    # Killed, it is started again; so it is when its mark loop stands still.
    manager.run("kill", "-KILL", main)
    eventually(lambda: state()["NRestarts"] == "1" and leads(), 90, "the first restart", **seldom)
    add_and_wait("2")
    assert manager.show(UNIT, "WatchdogUSec") == {"WatchdogUSec": "16s"}, "12 H and 10 s, as it has asked for"
    manager.run("kill", "-STOP", state()["MainPID"])
    eventually(lambda: state()["NRestarts"] == "2" and leads(), 120, "the restart by the watchdog", **seldom)
    add_and_wait("3")

    manager.run("systemctl", "stop", UNIT)
    assert (state()["ActiveState"], state()["Result"]) == ("inactive", "success")
    assert manager.processes(UNIT) == []
    # What would be in the journal is JSON alone, the figures that others read on standard output included.
    lines = [json.loads(line) for line in said().splitlines()]
    assert {"at", "level", "name", "shard", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    figures = [line for line in lines if line["message"].startswith("status: ")]
    assert figures
    assert all("rate_per_s" in line and "shards" in line for line in figures)
    published = scene.published()
    assert {key: list(dict.fromkeys(values)) for key, values in published.items()} == causal("abcdef", 3)
