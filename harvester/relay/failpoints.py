"""Failpoints: named places in the relay where a test can look, wait, or put its own producer.

In production they do nothing. A test names a factory in HARVESTER_TEST_HOOKS (`module:function`); every process of the
harvester asks what it returns, an object with the methods of `Failpoints`. No failpoint is part of any wheel.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, cast

VARIABLE = "HARVESTER_TEST_HOOKS"


class Failpoints:
    """Those of production."""

    def hit(self, place: str, **facts: Any) -> None:
        """The named place is reached; a test may block here."""

    def producer(self, options: dict[str, Any]) -> Any:
        """A producer with the interface of confluent_kafka.Producer: the real one."""
        from confluent_kafka import Producer

        return Producer(options)


def load() -> Failpoints:
    """Those of a test, or of production."""
    named = os.environ.get(VARIABLE)
    if not named:
        return Failpoints()
    module, _, factory = named.partition(":")
    return cast(Failpoints, getattr(importlib.import_module(module), factory)())
