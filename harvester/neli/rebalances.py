"""Joining and leaving a group without holding it up.

A rebalance waits for every member, a dead one too, until its session has run out. Until then the leader's own JoinGroup
is unanswered, and its commits behind it; that lasts longer than its last commit proves its place (P39). So who joins a
group in which another standby may have died just now lets some time pass first. It costs nothing: nobody else can be
elected before the dead are removed, and what is left then is a rebalance that ends in time.

Leaving has its own trap. While a rebalance is under way a member's JoinGroup is unanswered, and a broker reads no
second request of a connection before it has answered the first. A LeaveGroup that is sent then is lost when the
connection closes, and the group waits for the member until its session times out; nobody leads meanwhile. So a member
that leaves first sees the rebalance through.

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
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

from harvester.clock import clock_s

_WITHIN_S = 3.0
_LOOK_S = 0.2
# librdkafka 2.16 aborts the process when a coordinator appears whose request has timed out before: so none times out.
# The client is given up instead.
_NEVER_S = 3_600.0
_MAY_HIDE_A_DEAD_ONE = 2  # members: the leader, and one that may be dead
_CLOSE_S = 10.0  # beyond what a revoke takes
_REBALANCING = frozenset({ConsumerGroupState.PREPARING_REBALANCING, ConsumerGroupState.COMPLETING_REBALANCING})


def await_dead(
    group: str, options: Mapping[str, Any], until: float, ended: threading.Event, said: Callable[[int, str], None]
) -> None:
    """Let time pass before joining, while another standby is in the group that may be dead; not if nobody can tell."""
    admin = AdminClient({**options, "log_level": "0"})
    waits = False
    while not ended.is_set() and clock_s() < until:
        described = _describe(admin, group, time.monotonic() + _WITHIN_S, ended.wait)
        if described is None or len(described.members) < _MAY_HIDE_A_DEAD_ONE:
            return
        if not waits:
            waits = True
            left_s = max(0.0, until - clock_s())
            said(logging.INFO, f"joins group {group} within {left_s:.1f} s: one of its members may be dead")
        ended.wait(_LOOK_S)


def await_stable(group: str, options: Mapping[str, Any], poll: Callable[[float], object]) -> None:
    """Poll the member until its group is in no rebalance; for a few seconds at most, and not if nobody can tell."""
    admin = AdminClient({**options, "log_level": "0"})
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        described = _describe(admin, group, deadline, poll)
        if described is None or described.state not in _REBALANCING:
            return


def _describe(admin: AdminClient, group: str, deadline: float, meanwhile: Callable[[float], object]) -> Any | None:
    """The group; None when Kafka does not say."""
    answer: Future[Any] = admin.describe_consumer_groups([group], request_timeout=_NEVER_S)[group]
    while time.monotonic() < deadline and not answer.done():
        meanwhile(0.02)
    # Raising the future's exception would tie the client to its traceback, and keep it until the garbage is collected.
    return answer.result() if answer.done() and answer.exception() is None else None


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
