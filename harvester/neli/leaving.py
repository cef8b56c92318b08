"""Leaving a group so that the group notices.

While a rebalance is under way a member's JoinGroup is unanswered, and a broker reads no second request of a connection
before it has answered the first. A LeaveGroup that is sent then is lost when the connection closes, and the group waits
for the member until its session times out; nobody leads meanwhile. So a member that leaves first sees the rebalance
through.

Nor does the client always end: it waits for the answer to every commit, and one that a broken connection took along may
never have any (librdkafka issue 3740). A client that does not end is left behind; its member goes by session timeout,
or with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

_WITHIN_S = 3.0
_CLOSE_S = 10.0  # beyond what a revoke takes
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


def leave(consumer: Consumer, revoke_within_s: float, said: Callable[[int, str], None]) -> None:
    """Leave the group and end the client, for as long as a revoke may take and a little longer.

    Revoke callbacks run on another thread meanwhile. `said` is told, with a level of the log, what did not go well.
    """

    def close() -> None:
        try:
            consumer.unsubscribe()  # else a member without a partition leaves only by session timeout
            consumer.close()
        except (KafkaException, RuntimeError) as error:
            said(logging.WARNING, f"the group was not left in good order: {error}")

    leaving = threading.Thread(target=close, name="neli-leave", daemon=True)
    leaving.start()
    leaving.join(revoke_within_s + _CLOSE_S)
    if leaving.is_alive():
        said(logging.WARNING, "the Kafka client does not leave the group: it is left behind")
