"""A developer on a laptop: what somebody types who has read the tutorial.

Nothing of the checkout is used but the wheel that is built from it: an empty environment, an empty directory, and an
environment of variables in which nothing points here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from .steps import PUMP, RECORDS, TOPIC, Failed, Hour, checked, verdict, wait_published

CONFIGURATION = """\
leader_group_id = "shop"
data_source = "${HARVESTER_TEST_DSN}"

[base_kafka_config]
"bootstrap.servers" = "${HARVESTER_TEST_BOOTSTRAP}"
"broker.address.family" = "v4"
"""


class Laptop:
    """A home directory, and commands in it."""

    def __init__(self, home: Path, *, warm: bool) -> None:
        self.home = home
        self.program = home / "venv" / "bin" / "harvester"
        foreign = ("HARVESTER", "PYTHON", "VIRTUAL_ENV", "RUNTIME_DIRECTORY")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment["XDG_RUNTIME_DIR"] = str(home / "run")
        (home / "run").mkdir(mode=0o700)
        if not warm:
            self.environment["XDG_CACHE_HOME"] = str(home / "cache")

    def run(self, *command: str | Path) -> str:
        return checked(
            subprocess.run(
                list(map(str, command)),
                cwd=self.home,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
        )

    def harvester(self, *arguments: str) -> str:
        return self.run(self.program, *arguments)

    def relay(self) -> None:
        """Start, watch until all is published, stop."""
        with (self.home / "start.log").open("wb") as log:
            process = subprocess.Popen(
                [self.program, "start", "--dashboard", "off"],
                cwd=self.home, env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait_published(
                self._published,
                lambda: f"start did not publish all: {(self.home / 'start.log').read_text()[-800:]}",
                is_over=lambda: process.poll() is not None,
            )
            process.send_signal(signal.SIGTERM)
            if code := process.wait(60):
                raise Failed(f"start ended with exit code {code}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _published(self) -> bool:
        watched = subprocess.run(
            [self.program, "watch", "--once", "--json"],
            cwd=self.home, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return watched.returncode == 0 and json.loads(watched.stdout.splitlines()[0]).get("delivered") == RECORDS


def play(hour: Hour, wheels: Path, *, warm: bool) -> dict[str, int]:
    """All steps; what `verify` found."""
    laptop = Laptop(hour.place, warm=warm)
    with hour.step("an empty environment"):
        laptop.run(sys.executable, "-m", "venv", hour.place / "venv")
    with hour.step("pip install 'outbox-harvester[stack]'"):
        laptop.run(
            hour.place / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
            "--find-links", wheels, "outbox-harvester[stack]",
        )  # fmt: skip
    try:
        with hour.step("harvester stack up"):
            laptop.harvester("stack", "up", "--fast")
        for line in laptop.harvester("stack", "env").splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                laptop.environment[name] = value.strip("'")
        with hour.step("configuration, harvester init"):
            (hour.place / "harvester.toml").write_text(CONFIGURATION)
            laptop.harvester("config", "check")
            laptop.harvester("init", "--notify")
        with hour.step(f"harvester pump: {RECORDS:,} records"):
            laptop.harvester(*PUMP)
        with hour.step("harvester start, watched until all is published"):
            laptop.relay()
        with hour.step("harvester verify"):
            found = verdict(laptop.harvester("verify", "--topic", TOPIC, "--json"))
    finally:
        with hour.step("harvester stack down --delete"):
            laptop.harvester("stack", "down", "--delete")
    return found
