"""How many files a record, a consumer's claim and a control command pass, by the code of `scripts/walk`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def figures(module: str) -> Any:
    command = [sys.executable, "-m", f"scripts.{module}", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("what", "files"), [("claim", 12), ("command", 25)])
def test_it_passes_few_files(what: str, files: int) -> None:
    assert figures(f"walking_{what}")[what]["files"] <= files


def test_a_record_passes_few_files_in_either_mode() -> None:
    """Which starts a PostgreSQL of its own."""
    found = figures("walking")
    assert found["at-least-once"]["files"] <= 25
    assert found["exactly-once"]["files"] <= 28
