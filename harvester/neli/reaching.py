"""Whether any broker can be reached, as a member of the group notices it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from harvester.clock import clock_s

_RETRY_S = 1.0
_LOOK_S = 0.2


class Reaching:
    """Where none could be reached, it looks until one answers: nothing else would show that to a standby."""

    def __init__(self, topic: str, trouble: Callable[[str | None], None]) -> None:
        self._topic, self._trouble = topic, trouble
        self._look_at = math.inf

    @property
    def is_lost(self) -> bool:
        """No broker could be reached lately."""
        return self._look_at < math.inf

    def heard(self, error: KafkaError) -> None:
        """The client reports an error."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._trouble("Kafka: no broker can be reached")
            self._look_at = clock_s() + _RETRY_S

    def look(self, consumer: Any) -> None:
        """At every turn; asks for metadata once a second, and only where none could be reached."""
        now = clock_s()
        if now < self._look_at:
            return
        self._look_at = now + _RETRY_S
        try:
            consumer.list_topics(self._topic, timeout=_LOOK_S)
        except KafkaException:
            return
        self._look_at = math.inf
        self._trouble(None)
