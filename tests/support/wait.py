"""Waiting for a condition, with a deadline instead of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    predicate: Callable[[], T],
    timeout_s: float = 30.0,
    what: str = "the condition",
    interval_s: float = 0.01,
    longest_interval_s: float = 0.05,
) -> T:
    """Ask until the answer is truthy, and return it; AssertionError with the last answer when time is up.

    The first questions come quickly. Those of a long wait are rarer, since most are statements, which would keep the
    server from what is waited for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s:g} s; last answer: {answer!r}")
        time.sleep(interval_s)
        interval_s = max(interval_s, min(interval_s * 1.2, longest_interval_s))
