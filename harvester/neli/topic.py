"""The leader topic: creates it if missing, explains refused heartbeats, and reads the cluster's id.

Without the topic, a member of the group would wait forever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from harvester.bounds import SILENT, admin_client, answer
from harvester.errors import BrokerUnavailable
from harvester.neli.heartbeat import LEAST_MESSAGE_BYTES

_TIMEOUT_S = 5.0
_LOOK_S = 0.5
_UNTOLD = "Kafka does not return the id of its cluster"

_REMEDIES = {
    KafkaError.MSG_SIZE_TOO_LARGE: f"raise the topic's max.message.bytes to {LEAST_MESSAGE_BYTES} or more",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user to write to the topic",
    KafkaError.TOPIC_EXCEPTION: "set leader_topic to a topic that is not reserved by Kafka",
    KafkaError.INVALID_RECORD: "set the topic's cleanup.policy to delete",
    KafkaError.POLICY_VIOLATION: "set leader_topic to a topic that the cluster's policies let this user write to",
    KafkaError.NOT_ENOUGH_REPLICAS: "bring brokers back, or lower the topic's min.insync.replicas",
    KafkaError._MSG_TIMED_OUT: "check that the topic has a leader and min.insync.replicas in sync",
}


_PASSING = frozenset({KafkaError.NOT_ENOUGH_REPLICAS, KafkaError._MSG_TIMED_OUT})


def needs_somebody(error: KafkaError) -> bool:
    """Whether this refusal lasts until a setting or permission is changed."""
    return error.code() in _REMEDIES.keys() - _PASSING


def refusal(topic: str, error: KafkaError) -> str:
    """Explains a heartbeat that Kafka refused: cause and remedy."""
    remedy = _REMEDIES.get(error.code(), "run `harvester doctor`")
    return f"the leader topic {topic!r} accepts no heartbeats, so nobody can lead: {error.str()}; {remedy}"


def ensuring_leader_topic(
    topic: str, options: Mapping[str, Any], warn: Callable[[str], None], ended: Callable[[], bool]
) -> Future[str | None]:
    """Run `ensure_leader_topic` on its own thread, since Kafka may take long; only the process's end waits for it."""
    found: Future[str | None] = Future()

    def ensure() -> None:
        try:
            found.set_result(ensure_leader_topic(topic, options, warn, ended))
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            found.set_exception(error)

    try:
        threading.Thread(target=ensure, name="neli-topic", daemon=False).start()  # no client may outlive the process
    except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
        ensure()
    return found


def ensure_leader_topic(
    topic: str, options: Mapping[str, Any], warn: Callable[[str], None], ended: Callable[[], bool] = lambda: False
) -> str | None:
    """None if the topic exists (by now); otherwise the obstacle, in words.

    Once `ended` returns True, unreachable brokers are soon given up.
    """
    admin, refusals = admin_client(options)
    try:
        metadata = _all_topics(admin, ended)  # requesting one by name could create it
        found = metadata.topics.get(topic)
        if found is not None and found.error is None and found.partitions:
            if len(found.partitions) > 1:
                warn(
                    f"the leader topic {topic!r} has {len(found.partitions)} partitions: a joining member may take"
                    " partition 0, and with it leadership, from another; with one partition it cannot"
                )
            return None
        config = {"retention.ms": "86400000", "cleanup.policy": "delete"}
        created = admin.create_topics([NewTopic(topic, 1, -1, config=config)], operation_timeout=_TIMEOUT_S)
        answer(created[topic], _TIMEOUT_S * 2)
    except KafkaException as error:
        problem = error.args[0]
        if problem.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return None
        if problem.code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}:
            servers = options.get("bootstrap.servers", "")
            admin.poll(0)
            if refusals:
                return f"Kafka at {servers} cannot be used: {refusals[-1]}"
            return f"Kafka at {servers} does not answer: {problem.str()}"
        return f"the leader topic {topic!r} is missing and cannot be created: {problem.str()}"
    return None


def _all_topics(admin: AdminClient, ended: Callable[[], bool]) -> Any:
    """Retries in short attempts for as long as no broker can be reached."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return admin.list_topics(timeout=_LOOK_S)
        except KafkaException as error:
            asked = error.args[0].code() == KafkaError._TIMED_OUT  # asked once more if a broker is slow to answer
            if ended() or time.monotonic() > deadline:
                raise
        if asked:
            return admin.list_topics(timeout=2 * _TIMEOUT_S)


def ask_cluster_id(options: Mapping[str, Any]) -> str | None:
    """The id of a Kafka cluster, None if it has none, read with a temporary client. Raises BrokerUnavailable."""
    client = AdminClient({**options, **SILENT})
    try:
        found: str | None = answer(client.describe_cluster(request_timeout=_TIMEOUT_S), _TIMEOUT_S * 2).cluster_id
    except KafkaException as error:
        raise BrokerUnavailable(
            f"Kafka at {options.get('bootstrap.servers', '')}: {_UNTOLD}: {error.args[0].str()}",
            hint=BrokerUnavailable.NO_ANSWER,
        ) from error
    return found


def cluster_id(client: Any, topic: str) -> str | None:
    """The same with an existing client; `topic` exists, and keeps the answer short. Raises BrokerUnavailable."""
    try:
        found: str | None = client.list_topics(topic, timeout=_TIMEOUT_S).cluster_id
    except KafkaException as error:
        raise BrokerUnavailable(f"{_UNTOLD}: {error.args[0].str()}") from error
    return found
