"""Failpoints: named places in the relay where a test can look, wait, or put its own producer.

In production this module does nothing: `hit` returns at once. A test names a factory in HARVESTER_TEST_HOOKS
(`module:function`); every process of the harvester asks what it returns. No failpoint is part of any wheel.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol, cast

VARIABLE = "HARVESTER_TEST_HOOKS"


class Failpoints(Protocol):
    """What a test may provide."""

    def hit(self, place: str, **facts: Any) -> None: ...  # the named place is reached; may block
    def producer(self, options: dict[str, Any]) -> Any: ...  # with the interface of confluent_kafka.Producer


class _Off:
    def hit(self, place: str, **facts: Any) -> None:
        """Nothing."""

    def producer(self, options: dict[str, Any]) -> Any:
        from confluent_kafka import Producer

        return Producer(options)


def load() -> Failpoints:
    """The hooks of a test, or those that do nothing."""
    named = os.environ.get(VARIABLE)
    if not named:
        return _Off()
    module, _, factory = named.partition(":")
    return cast(Failpoints, getattr(importlib.import_module(module), factory)())
