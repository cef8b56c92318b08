"""`scripts/first-hour`: what somebody types who has read the tutorial, timed.

Nothing of the checkout is used but the wheel that is built from it: an empty environment, an empty directory, and an
environment of variables in which nothing points here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = 5_000
CONFIGURATION = """\
leader_group_id = "shop"
data_source = "${HARVESTER_TEST_DSN}"

[base_kafka_config]
"bootstrap.servers" = "${HARVESTER_TEST_BOOTSTRAP}"
"broker.address.family" = "v4"
"""
_BUILD = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "harvester", "cli", "docs/man")


class Failed(Exception):
    """A step did not do what it should."""


class Hour:
    """The steps so far, and how long each took."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.place, self.environment = place, environment
        self.steps: dict[str, float] = {}
        self.program = place / "venv" / "bin" / "harvester"

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.steps[name] = time.monotonic() - began
        print(f"{self.steps[name]:7.1f} s  {name}", file=sys.stderr, flush=True)

    def run(self, *command: str | Path, ends: int = 0) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=self.place, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != ends:
            raise Failed(f"{Path(command[0]).name} {command[1]}: exit code {done.returncode}: {done.stderr[-800:]}")
        return done.stdout

    def harvester(self, *arguments: str) -> str:
        return self.run(self.program, *arguments)


def wheel_house(into: Path) -> None:
    """A directory with the wheel of this checkout and all that it needs: what an index would give."""
    source = into / "source"
    for name in _BUILD:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = into / "wheels"
    for command in (
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)],
        [*pip, "download", "--require-hashes", "--only-binary=:all:", "--dest", str(wheels),
         "-r", str(ROOT / "requirements-demo.lock")],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"the wheel house: {done.stderr[-800:]}")


def play(hour: Hour, wheels: Path) -> dict[str, int]:
    """All steps; what `verify` found."""
    with hour.step("an empty environment"):
        hour.run(sys.executable, "-m", "venv", hour.place / "venv")
    with hour.step("pip install 'outbox-harvester[stack]'"):
        hour.run(
            hour.place / "venv" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
            "--find-links", wheels, "outbox-harvester[stack]",
        )  # fmt: skip
    try:
        with hour.step("harvester stack up"):
            hour.harvester("stack", "up", "--fast")
        for line in hour.harvester("stack", "env").splitlines():
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                hour.environment[name] = value.strip("'")
        with hour.step("configuration, harvester init"):
            (hour.place / "harvester.toml").write_text(CONFIGURATION)
            hour.harvester("config", "check")
            hour.harvester("init", "--notify")
        with hour.step(f"harvester pump: {RECORDS:,} records"):
            hour.harvester("pump", "--topic", "orders", "--records", str(RECORDS), "--rows-per-transaction", "5")
        with hour.step("harvester start, watched until all is published"):
            _relay(hour)
        with hour.step("harvester verify"):
            found = json.loads(hour.harvester("verify", "--topic", "orders", "--json"))
    finally:
        with hour.step("harvester stack down --delete"):
            hour.harvester("stack", "down", "--delete")
    return {
        name: found[name] for name in ("inserted", "delivered", "lost", "duplicates", "order_violations", "pending")
    }


def _relay(hour: Hour) -> None:
    with (hour.place / "start.log").open("wb") as log:
        process = subprocess.Popen(
            [hour.program, "start", "--dashboard", "off"], cwd=hour.place, env=hour.environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"start did not publish all: {(hour.place / 'start.log').read_text()[-800:]}")
            watched = subprocess.run(
                [hour.program, "watch", "--once", "--json"], cwd=hour.place, env=hour.environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if watched.returncode == 0 and json.loads(watched.stdout.splitlines()[0]).get("delivered") == RECORDS:
                break
            time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        if code := process.wait(60):
            raise Failed(f"start ended with exit code {code}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every step went well, and nothing was lost, repeated or out of order."""
    parser = argparse.ArgumentParser(prog="scripts/first-hour", description="Play a developer's first hour.")
    parser.add_argument("--warm", action="store_true", help="use the jars that are in the cache already")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="harvester-first-hour-") as scratch:
        place, house = Path(scratch) / "home", Path(scratch) / "house"
        Path(scratch).chmod(0o755)  # started by root, PostgreSQL runs under another account
        place.mkdir()
        house.mkdir()
        foreign = ("HARVESTER", "PYTHON", "VIRTUAL_ENV", "RUNTIME_DIRECTORY")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        environment["XDG_RUNTIME_DIR"] = str(place / "run")
        (place / "run").mkdir(mode=0o700)
        if not given.warm:
            environment["XDG_CACHE_HOME"] = str(place / "cache")
        hour = Hour(place, environment)
        try:
            wheel_house(house)
            found = play(hour, house / "wheels")
        except Failed as failure:
            print(f"first-hour: {failure}", file=sys.stderr)
            return 1
    whole = sum(hour.steps.values())
    print(f"{whole / 60:.1f} minutes; {found['inserted']:,} records, lost {found['lost']}", file=sys.stderr)
    print(
        json.dumps(
            {"minutes": round(whole / 60, 2), "steps_s": {n: round(s, 1) for n, s in hour.steps.items()}, **found}
        )
    )
    good = not any(found[name] for name in ("lost", "duplicates", "order_violations", "pending"))
    return 0 if good and found["inserted"] == RECORDS else 1


if __name__ == "__main__":
    sys.exit(main())
