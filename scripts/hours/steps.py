"""What the three hours share: steps that are timed, an index to install from, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = 5_000
TOPIC = "orders"
PUMP = ("pump", "--topic", TOPIC, "--records", str(RECORDS), "--rows-per-transaction", "5")
_PUBLISHED_S = 120
_COUNTS = ("inserted", "delivered", "lost", "duplicates", "order_violations", "pending")


class Failed(Exception):
    """A step did not do what it should."""


class Hour:
    """The steps so far, and how long each took."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        self.steps: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.steps[name] = time.monotonic() - began
        print(f"{self.kind}: {self.steps[name]:7.1f} s  {name}", file=sys.stderr, flush=True)

    @property
    def minutes(self) -> float:
        return sum(self.steps.values()) / 60


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed; Failed where it did not end well."""
    if done.returncode:
        command = done.args if isinstance(done.args, str) else " ".join(map(str, done.args))
        raise Failed(f"…{command[-200:]}: exit code {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def wait_published(
    is_published: Callable[[], bool], why_not: Callable[[], str], is_over: Callable[[], bool] = lambda: False
) -> None:
    """Until all records of the pump are; Failed, with a reason, after two minutes or when it `is_over` before."""
    deadline = time.monotonic() + _PUBLISHED_S
    while not is_published():
        if is_over() or time.monotonic() > deadline:
            raise Failed(why_not())
        time.sleep(0.3)


def verdict(said: str) -> dict[str, int]:
    """The counts in the output of `harvester verify --json`."""
    found = json.loads(said)
    return {name: found[name] for name in _COUNTS}


def is_good(found: Mapping[str, int]) -> bool:
    """Everything written arrived, once and in order, and nothing waits."""
    return found["inserted"] == found["delivered"] == RECORDS and not any(
        found[name] for name in ("lost", "duplicates", "order_violations", "pending")
    )


def wheel_house(into: Path) -> Path:
    """A directory with the wheel of this checkout and all that it needs: what an index would give."""
    wheels = into / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)],
        [*pip, "download", "--require-hashes", "--only-binary=:all:", "--dest", str(wheels),
         "-r", str(ROOT / "requirements-demo.lock")],
    ):  # fmt: skip
        checked(subprocess.run(command, capture_output=True, text=True, check=False))
    return wheels
