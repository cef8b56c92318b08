"""How many files a claim passes, by the code of `scripts/walk --claim`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_claim_passes_few_files() -> None:
    command = [sys.executable, "-m", "scripts.walking_claim", "--json"]
    found = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["claim"]["files"] <= 12
