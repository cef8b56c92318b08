"""Tests that take minutes each: they run where they are asked for."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HARVESTER_LONG_TESTS"

long = pytest.mark.skipif(
    not os.environ.get(VARIABLE),
    reason=f"takes minutes, beyond the suite's time so far (issue 8); {VARIABLE}=1 runs it",
)
