"""`scripts/first-hour`: from an index, a machine or a chart to a verdict, as each kind of user has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.hours.__main__ import unusable
from scripts.hours.steps import RECORDS, is_good
from tests.support.longs import long

ROOT = Path(__file__).parents[2]
GOOD = {"inserted": RECORDS, "delivered": RECORDS, "lost": 0, "duplicates": 0, "order_violations": 0, "pending": 0}


@pytest.mark.parametrize(("count", "value"), [("inserted", 4_999), ("delivered", 4_999), ("lost", 1), ("pending", 1)])
def test_an_hour_is_good_only_if_all_arrived_once_and_in_order(count: str, value: int) -> None:
    assert is_good(GOOD)
    assert not is_good({**GOOD, count: value})


@long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "steps"), [("laptop", 8), ("vm", 6), ("kubernetes", 7)])
def test_the_first_hour_takes_minutes_and_loses_nothing(kind: str, steps: int) -> None:
    if why := unusable(kind):
        pytest.skip(why)
    done = subprocess.run(["scripts/first-hour", kind], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[kind]
    assert {name: found[name] for name in GOOD} == GOOD
    assert len(found["steps_s"]) == steps
    assert found["minutes"] < 10  # however busy the machine is
