"""A user's program that uses the public names passes mypy --strict, without this project's settings for mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.longs import long

ROOT = Path(__file__).parents[2]


@long  # mypy without a cache; every run of the checks types the same program with this project's settings
def test_a_program_with_the_public_names_is_typed_strictly(tmp_path: Path) -> None:
    program = shutil.copy(ROOT / "tests" / "support" / "typed_program.py", tmp_path)
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
