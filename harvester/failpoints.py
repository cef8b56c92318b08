"""Failpoints: named places in the code where a test can look, wait, or substitute a producer.

In production they do nothing. A test names a factory in HARVESTER_TEST_HOOKS (`module:function`); every process of the
harvester calls it, and uses the returned object, which has the methods of `Failpoints`. No failpoint is part of any
wheel.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, cast

VARIABLE = "HARVESTER_TEST_HOOKS"


class Failpoints:
    """The production failpoints, which do nothing."""

    def hit(self, place: str, **facts: Any) -> None:
        """Called when the named place is reached; a test may block here."""

    def producer(self, options: dict[str, Any]) -> Any:
        """A real confluent_kafka.Producer; a test may return any object with the same interface."""
        from confluent_kafka import Producer

        return Producer(options)


def load() -> Failpoints:
    """The failpoints of a test, or of production."""
    named = os.environ.get(VARIABLE)
    if not named:
        return Failpoints()
    module, _, factory = named.partition(":")
    return cast(Failpoints, getattr(importlib.import_module(module), factory)())
