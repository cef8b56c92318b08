"""Tests that take minutes each: `scripts/test --nightly` runs them, and every run skips them otherwise."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HARVESTER_LONG_TESTS"

long = pytest.mark.skipif(not os.environ.get(VARIABLE), reason="takes minutes: scripts/test --nightly runs it")
