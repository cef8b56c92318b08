"""A headless Chromium, run once for each look at a page."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

VARIABLE = "HARVESTER_TEST_BROWSER"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Its command; skips the test where there is none, and says what to do."""
    given = os.environ.get(VARIABLE)
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: run scripts/browser, install Chromium, or name one in {VARIABLE}")
    return found


def dump_dom(url: str, folder: Path, *, budget_ms: int = 3_000, may_fail: bool = False) -> str:
    """The page's HTML after its scripts have run for so long, in the page's time, which stands while it fetches."""
    done = subprocess.run(
        [
            find_browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-proxy-server",
            f"--user-data-dir={folder}",
            f"--virtual-time-budget={budget_ms}",
            "--enable-logging=stderr",
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    if may_fail:
        console = [line for line in console if "Failed to load resource" not in line]
    assert console == [], console  # an error of the script, or something that the policy forbids
    return done.stdout
