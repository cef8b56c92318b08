"""What takes minutes: `scripts/test --nightly` does it, and every other run less of it or nothing."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HARVESTER_LONG_TESTS"


def is_nightly() -> bool:
    """True in `scripts/test --nightly`, which has time for everything."""
    return bool(os.environ.get(VARIABLE))


def some_of(cases: int) -> int:
    """So many nightly; otherwise two fifths of them. Tests of mutations take all they need."""
    return cases if is_nightly() else cases * 2 // 5


long = pytest.mark.skipif(not is_nightly(), reason="takes minutes: scripts/test --nightly runs it")
