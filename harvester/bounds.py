"""Asks where a partition begins and ends until the brokers tell it, and judges which errors of Kafka's client pass.

Makes an admin client that keeps what it is refused, and waits for its answers; lets go of producers and consumers;
names the option of a client that prints nothing.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

T = TypeVar("T")

SILENT = {"log_level": "0"}
"""For a client of which everything that is wrong is raised or returned: it prints nothing."""
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # dropped by us
_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 0.25
_AFTER = re.compile(r" \(after \d+ms in state \w+\).*")  # else each attempt would be news
_LASTING = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.INVALID_GROUP_ID, KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE, KafkaError._INVALID_ARG, KafkaError._FATAL,
})  # fmt: skip


def passes(error: KafkaError) -> bool:
    """Whether it is worth while to wait and try again.

    While brokers come and go, a client reports many errors: of the network, of partitions and groups that are led by
    somebody else, or by nobody yet. None of them is a reason to end a consumer: its claims run out by themselves when
    it lasts. What does not get better by waiting is a missing right, and a client that has given itself up. A wrong
    password is noticed at the start; later, an authentication that fails may be one that was cut short.
    """
    return not error.fatal() and error.code() not in _LASTING


def admin_client(options: Mapping[str, Any]) -> tuple[AdminClient, list[str]]:
    """A client, and the refusals that it has met: a wrong password or certificate looks like silence to who asks.

    Poll it for them.
    """
    refusals: list[str] = []

    def note(error: KafkaError) -> None:
        if error.code() in {KafkaError._AUTHENTICATION, KafkaError._SSL}:
            refusals.append(_AFTER.sub("", error.str()))

    settings: dict[str, Any] = {**options, **SILENT, "error_cb": note}
    return AdminClient(settings), refusals


def answer(future: Future[T], within_s: float) -> T:
    """Wait for the result of an admin request. Raises KafkaException, `_TIMED_OUT` where nothing comes in time.

    A client gives a request that changes topics up after `socket.timeout.ms` only, whatever `operation_timeout` says.
    The error is a new one: the future's own, once raised, would keep the client alive by its traceback.
    """
    try:
        problem = future.exception(within_s)
    except TimeoutError:
        problem = KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer within {within_s:g} s"))
    if isinstance(problem, KafkaException):
        raise KafkaException(*problem.args)
    return future.result()


def read_bounds(client: Any, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
    """The first offset of a partition, and the one behind its last record, as the client's isolation level sees it.

    Asks again while a partition is led by nobody, or by another broker than the client knows. Between two attempts the
    client is made to ask for the topic anew: one that nothing is assigned to keeps what it was told last, for a quarter
    of an hour, and a partition that had no leader then stays "unknown" to it. Raises KafkaException with the last error
    that it met, after `timeout_s` or at once if that error does not pass.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _AGAIN_S
    while True:
        try:
            bounds: tuple[int, int] | None = client.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=_left_s(deadline)
            )
            if bounds is not None:
                return bounds
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        except KafkaException as error:
            if not passes(error.args[0]) or time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        refresh(client, topic, _left_s(deadline))


def refresh(client: Any, topic: str | None, timeout_s: float) -> None:
    """Make the client ask who leads the partitions of a topic; of all, where one that is asked for might be created."""
    with contextlib.suppress(KafkaException):
        client.list_topics(topic, timeout=timeout_s)


def let_go(producer: Any) -> None:
    """Drop what it still has. The caller deletes the last reference next, which returns when its threads have ended.

    One that is forgotten instead goes on until the process has ended, and crashes it if it makes a connection with TLS
    at that moment: OpenSSL frees what the client's threads still use. (`Producer.close` waits for brokers, and is
    newer than the oldest version that we support.)
    """
    with contextlib.suppress(KafkaException, SystemError):  # one that has given itself up says so here
        producer.purge()
        producer.poll(0)


def close_aside(consumer: Any) -> None:
    """Close it on a thread of its own: one that has lost its way may not find the end either, or complain of it."""

    def close() -> None:
        with contextlib.suppress(KafkaException, RuntimeError):
            consumer.close()

    threading.Thread(target=close, name="kafka-close", daemon=True).start()


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
