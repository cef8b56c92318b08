"""The full options of each Kafka client: what the user gave, between the harvester's defaults and its guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from harvester.config.durations import to_ms
from harvester.config.kafka_options import CONSUMER_ONLY, merge, without
from harvester.config.oauth import TokenHook

# syslog severities, librdkafka's `log_level`
_LOG_LEVELS = {"trace": "7", "debug": "7", "info": "6", "warning": "4", "error": "3"}
_MAX_PROPAGATION = timedelta(seconds=1)
_MIN_TRANSACTION_MS = 10_000
_MIN_PRODUCER_QUEUE_RECORDS = 100_000


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What the options of all clients depend on."""

    base: Mapping[str, str] = field(repr=False)  # they hold passwords
    producer: Mapping[str, str] = field(repr=False)
    client_id: str
    log_level: str
    delivery_timeout: timedelta
    max_in_flight_records: int
    group_id: str
    session_timeout: timedelta
    group_heartbeat_interval: timedelta
    rebalance_timeout: timedelta
    min_poll_interval: timedelta
    token_hook: str = ""  # the name of the function that gives tokens

    def common(self) -> dict[str, str]:
        """For any producer or admin client of the election: without the options that only consumers know."""
        return merge(self._defaults(), without(self.base, CONSUMER_ONLY))

    def for_producer(self) -> dict[str, str]:
        """For a shard's producer."""
        defaults = {
            # Batches grow while the last ones are under way, and not by waiting: the barrier makes every key wait for
            # its acknowledgement, so that each millisecond would be felt. More requests at a time would be smaller.
            "linger.ms": "0",
            "max.in.flight.requests.per.connection": "2",
            # An unknown topic may not hold a record for longer than it may live.
            "topic.metadata.propagation.max.ms": str(to_ms(min(self.delivery_timeout / 2, _MAX_PROPAGATION))),
            # In-flight records are bounded by the harvester: the client's own queue must never be the bound.
            "queue.buffering.max.messages": str(max(2 * self.max_in_flight_records, _MIN_PRODUCER_QUEUE_RECORDS)),
            "queue.buffering.max.kbytes": "1048576",
        }
        return merge(self._defaults(), defaults, without(self.base, CONSUMER_ONLY), self.producer, self._guards())

    def for_lane(self) -> dict[str, str]:
        """For a shard's transactional producer; a transaction outlives what it sends, and not by much."""
        # A transaction waits for all it has sent in any case.
        defaults = {"linger.ms": "5", "max.in.flight.requests.per.connection": "5"}
        guards = {"transaction.timeout.ms": str(max(_MIN_TRANSACTION_MS, 2 * to_ms(self.delivery_timeout)))}
        return merge(
            self.for_producer(), defaults, without(self.base, CONSUMER_ONLY), self.producer, self._guards(), guards
        )

    def for_consumer(self) -> dict[str, str]:
        """For the member of the leader group: the classic protocol, cooperative (design section 4)."""
        defaults = {"fetch.wait.max.ms": str(max(1, to_ms(self.min_poll_interval)))}
        guards = {
            "group.id": self.group_id,
            "group.protocol": "classic",
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": "false",
            "auto.offset.reset": "latest",
            "session.timeout.ms": str(to_ms(self.session_timeout)),
            "heartbeat.interval.ms": str(to_ms(self.group_heartbeat_interval)),
            "max.poll.interval.ms": str(to_ms(self.rebalance_timeout)),
            "allow.auto.create.topics": "false",
        }
        return merge(self._defaults(), defaults, self.base, guards)

    def _guards(self) -> dict[str, str]:
        # delivery.report.only.error is refused in the tables and false by default: every record is reported.
        return {
            "acks": "all",
            "enable.idempotence": "true",
            "partitioner": "murmur2_random",
            "delivery.timeout.ms": str(to_ms(self.delivery_timeout)),
        }

    def _defaults(self) -> dict[str, str]:
        return {
            "client.id": self.client_id,
            "log_level": _LOG_LEVELS[self.log_level],
            "socket.nagle.disable": "true",
            **({"oauth_cb": TokenHook.of(self.token_hook)} if self.token_hook else {}),
        }
