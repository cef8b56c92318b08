"""Which errors of the client pass by themselves. Pure.

While brokers come and go, a client reports a great many: of the network, of partitions and groups that are led by
somebody else, or by nobody yet. None of them is a reason to end a consumer: its claims run out by themselves when it
lasts. What does not get better by waiting is a right that is missing, and a client that has given itself up. A password
that is wrong is noticed at the start; later, an authentication that fails may be one that was cut short.
"""

from __future__ import annotations

from confluent_kafka import KafkaError

_LASTING = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.INVALID_GROUP_ID, KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE, KafkaError._INVALID_ARG, KafkaError._FATAL,
})  # fmt: skip


# What a topic's own settings forbid: said of each message again, until somebody changes them.
_REFUSED = frozenset({
    KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_TIMESTAMP,
})  # fmt: skip


def refuses(error: KafkaError) -> bool:
    """Whether the topic's settings are the reason that it does not take a message."""
    return error.code() in _REFUSED


def passes(error: KafkaError) -> bool:
    """Whether it is worth while to wait and try again."""
    return not error.fatal() and error.code() not in _LASTING
