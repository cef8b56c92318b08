"""How many files a consumer's claim and a control command pass, by the code of `scripts/walk`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("what", "files"), [("claim", 12), ("command", 25)])
def test_it_passes_few_files(what: str, files: int) -> None:
    command = [sys.executable, "-m", f"scripts.walking_{what}", "--json"]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout.splitlines()[-1])[what]["files"] <= files
