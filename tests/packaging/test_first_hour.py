"""`scripts/first-hour`: from an index to a verdict, as a developer has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.longs import long

ROOT = Path(__file__).parents[2]


@long
@pytest.mark.timeout(900)
def test_the_first_hour_takes_minutes_and_loses_nothing() -> None:
    done = subprocess.run(["scripts/first-hour"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["inserted"] == found["delivered"] == 5_000
    assert (found["lost"], found["duplicates"], found["order_violations"], found["pending"]) == (0, 0, 0, 0)
    assert len(found["steps_s"]) == 8
    assert found["minutes"] < 10  # however busy the machine is
