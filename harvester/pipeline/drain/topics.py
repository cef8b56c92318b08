"""What the brokers say of a slice's topics: whether they are there, and how large a record may be. Thin."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from harvester.delivery.failures import backoff_s
from harvester.errors import BrokerUnavailable
from harvester.pipeline.drain.slices import Topic

_TIMEOUT_S = 10.0
_DEFAULT_BYTES = 1_048_588  # of brokers, where their configuration may not be read
_LIMIT = "max.message.bytes"


class Topics:
    """See the module's text. `options` are librdkafka's; an unknown topic is asked for `attempts` times."""

    def __init__(self, options: Mapping[str, Any], attempts: int, first_s: float, longest_s: float) -> None:
        self._servers = options.get("bootstrap.servers", "")
        self._admin = AdminClient({**options, "log_level": "0"})
        self._attempts, self._first_s, self._longest_s = attempts, first_s, longest_s

    def look(self, names: Collection[str]) -> dict[str, Topic]:
        """Those of these topics that there are. Raises BrokerUnavailable.

        Asking for a topic by its name makes it where brokers do that, as producing to it would.
        """
        if not names:
            return {}
        try:
            counts = self._partitions(None)
            for attempt in range(1, self._attempts + 1):
                missing = [name for name in names if name not in counts]
                if not missing:
                    break
                if attempt > 1:
                    time.sleep(backoff_s(attempt - 1, self._first_s, self._longest_s, 0.5))
                for name in missing:
                    counts |= self._partitions(name)
            found = {name: counts[name] for name in names if name in counts}
            limits = self._limits(list(found))
        except (KafkaException, TimeoutError) as error:
            text = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
            raise BrokerUnavailable(f"Kafka at {self._servers} does not say which topics there are: {text}") from error
        return {name: Topic(count, limits.get(name, _DEFAULT_BYTES)) for name, count in found.items()}

    def _partitions(self, topic: str | None) -> dict[str, int]:
        known = self._admin.list_topics(**({} if topic is None else {"topic": topic}), timeout=_TIMEOUT_S).topics
        return {name: len(one.partitions) for name, one in known.items() if one.error is None and one.partitions}

    def _limits(self, names: list[str]) -> dict[str, int]:
        if not names:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        found = {}
        for resource, future in self._admin.describe_configs(resources, request_timeout=_TIMEOUT_S).items():
            try:
                found[str(resource.name)] = int(future.result(_TIMEOUT_S)[_LIMIT].value)
            except KafkaException as error:
                if error.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}:
                    raise
        return found
