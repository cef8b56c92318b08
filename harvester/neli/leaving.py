"""Leaving a group so that the group notices.

While a rebalance is under way a member's JoinGroup is unanswered, and a broker reads no second request of a connection
before it has answered the first. A LeaveGroup that is sent then is lost when the connection closes, and the group waits
for the member until its session times out; nobody leads meanwhile. So a member that leaves first sees the rebalance
through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

_WITHIN_S = 3.0
_REBALANCING = frozenset({ConsumerGroupState.PREPARING_REBALANCING, ConsumerGroupState.COMPLETING_REBALANCING})


def await_stable(group: str, options: Mapping[str, Any], poll: Callable[[float], object]) -> None:
    """Poll the member until its group is in no rebalance; for a few seconds at most, and not if nobody can tell."""
    admin = AdminClient({**options, "log_level": "0"})
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=_WITHIN_S)[group]
        while time.monotonic() < deadline and not answer.done():
            poll(0.02)
        try:
            if answer.result(0).state not in _REBALANCING:
                return
        except (KafkaException, NotYet):
            return
