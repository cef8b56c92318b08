"""Queries the bounds of partitions until brokers answer, and classifies which Kafka client errors are temporary.

Also looks up topics, creates admin clients that record refusals, waits for their answers, releases producers and
consumers, and has the option that makes a client print nothing.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

T = TypeVar("T")

SILENT = {"log_level": "0"}
"""For a client whose errors are all raised or returned: it prints nothing."""
STRANDED = "Kafka's client has dropped its last broker (librdkafka issue 5301)"
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # dropped by us
_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 0.25
_FEW_TOPICS = 8
_ABSENT = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED})
_AFTER = re.compile(r" \(after \d+ms in state \w+\).*")  # otherwise each attempt would be a new message
_LASTING = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.INVALID_GROUP_ID, KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE, KafkaError._INVALID_ARG, KafkaError._FATAL,
})  # fmt: skip


def passes(error: KafkaError) -> bool:
    """Whether it is worthwhile to wait and try again.

    While brokers come and go, a client reports many errors: of the network, of partitions and groups that are led by
    another broker, or by none yet. None of them is a reason to end a consumer: if they persist, its claims expire by
    themselves. Waiting does not help against a missing permission, or a client that has failed fatally. A wrong
    password is noticed at the start; later, a failed authentication may be one that was interrupted.
    """
    return not error.fatal() and error.code() not in _LASTING


def admin_client(options: Mapping[str, Any]) -> tuple[AdminClient, list[str]]:
    """A client, and the list of its refusals: to a caller, a wrong password or certificate looks like silence.

    Poll the client to receive them.
    """
    refusals: list[str] = []

    def note(error: KafkaError) -> None:
        if error.code() in {KafkaError._AUTHENTICATION, KafkaError._SSL}:
            refusals.append(_AFTER.sub("", error.str()))

    settings: dict[str, Any] = {**options, **SILENT, "error_cb": note}
    return AdminClient(settings), refusals


def answer(future: Future[T], within_s: float) -> T:
    """Wait for the result of an admin request. Raises KafkaException, with `_TIMED_OUT` if nothing arrives in time.

    A client gives up a request that changes topics only after `socket.timeout.ms`, whatever `operation_timeout` is. The
    error is a new one: the future's own, if raised, would keep the client alive through its traceback.
    """
    try:
        problem = future.exception(within_s)
    except TimeoutError:
        problem = KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer within {within_s:g} s"))
    if isinstance(problem, KafkaException):
        raise KafkaException(*problem.args)
    return future.result()


def existing_topics(client: Any, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The metadata of those of these topics that exist for this user. Raises KafkaException.

    Requests a few topics by name, because the answer about all topics of a cluster may be large. `client` must be a
    consumer with `allow.auto.create.topics` off: a request by any other would create a missing topic.
    """
    found: dict[str, Any] = {}
    for name in names if len(names) <= _FEW_TOPICS else (None,):
        found |= client.list_topics(name, timeout=timeout_s).topics
    absent = {name for name, each in found.items() if each.error is not None and each.error.code() in _ABSENT}
    return {name: found[name] for name in names if name in found.keys() - absent}


def read_bounds(client: Any, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
    """The first offset of a partition, and the end, according to the client's isolation level.

    Asks again while a partition has no leader, or another one than the client knows. Between attempts the client must
    request the topic's metadata again: without assignments it keeps the last answer for a quarter of an hour, and a
    partition without a leader stays "unknown" to it. Raises KafkaException with the last error, after `timeout_s`, or
    immediately if that error is permanent.
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
    """Make the client request a topic's leaders; all topics' if requesting one might create it."""
    with contextlib.suppress(KafkaException):
        client.list_topics(topic, timeout=timeout_s)


def let_go(producer: Any) -> None:
    """Drop what it still has. The caller then deletes the last reference, which returns when its threads have ended.

    A forgotten producer would instead run until the process ends, and crash it if it opens a TLS connection at that
    moment: OpenSSL frees what the client's threads still use. (`Producer.close` waits for brokers, and is newer than
    the oldest version that we support.)
    """
    with contextlib.suppress(KafkaException, SystemError):  # a fatally failed one raises here
        producer.purge()
        producer.poll(0)


def close_aside(consumer: Any) -> None:
    """Close it on a separate thread: a stuck consumer may never finish closing, or raise."""

    def close() -> None:
        with contextlib.suppress(KafkaException, RuntimeError):
            consumer.close()

    threading.Thread(target=close, name="kafka-close", daemon=True).start()


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
