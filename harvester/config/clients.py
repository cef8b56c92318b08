"""Builds the full options of each Kafka client: the user's, between the harvester's defaults and what it enforces.

Tokens for SASL OAUTHBEARER from a function of the application's own, which is named in the configuration. Every
client of every process asks for tokens, so what travels is the function's name: text, as all options are, that can be
called. librdkafka's own `sasl.oauthbearer.method=oidc` needs none of this.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from harvester.config.durations import to_ms
from harvester.config.kafka_options import CONSUMER_ONLY, get, merge, without
from harvester.config.problems import echo, refuse
from harvester.errors import ConfigurationError, Problem

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


FORM = '"module:function", or "" for none'
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_PATH = "oauth.token"
# The client itself fails at its birth, and for good, where it gets no token. With one that no broker takes it says what
# the broker said and asks again after four fifths of this time.
_NO_TOKEN, _AGAIN_S = "no-token", 5.0
_last: dict[str, tuple[Any, ...]] = {}  # the last answer of each function in this process; clients share it


class TokenHook(str):
    """The name of the function, and a call of it. `librdkafka` calls from threads of its own."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> TokenHook:
        """Raises ConfigurationError where there is no such function to import."""
        hook = cls(name)
        try:
            hook._function()
        except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
            problem = Problem(_PATH, f"{name!r} cannot be used: {type(error).__name__}: {error}", FORM)
            hint = "the module has to be installed where the harvester is, or stand in a directory of PYTHONPATH"
            raise ConfigurationError([problem], hint=hint) from None
        return hook

    def __call__(self, config: str | None) -> tuple[Any, ...]:
        """(token, when it expires in seconds since 1970[, principal[, extensions]]) as the function gives it.

        `config` is the option `sasl.oauthbearer.config`. Where the function fails, the last token goes on while it is
        valid; after that clients have none, and brokers refuse them until there is one.
        """
        try:
            answer = tuple(self._function()(config or ""))
            _check(answer)
        except Exception as error:  # noqa: BLE001 - whatever it raises, connections that are open should stay
            text = f"oauth.token: {self} failed: {type(error).__name__}: {error}"
            logger = logging.getLogger("harvester")
            if logger.hasHandlers():  # in shards there are none: the supervisor says it
                logger.warning("%s", text)
            return _last[self] if _is_valid(_last.get(self)) else (_NO_TOKEN, time.time() + _AGAIN_S)
        _last[self] = answer
        return answer

    def _function(self) -> Callable[[str], Any]:
        module, _, name = self.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError("it is no function")
        return found  # type: ignore[no-any-return]


def _check(answer: tuple[Any, ...]) -> None:
    if not 2 <= len(answer) <= 4 or not isinstance(answer[0], str) or not isinstance(answer[1], int | float):
        raise TypeError("it has to return (token, seconds since 1970 at which it expires[, principal[, extensions]])")
    if not _is_valid(answer):
        raise ValueError("its token has expired already")


def _is_valid(answer: tuple[Any, ...] | None) -> bool:
    return answer is not None and bool(answer[1] > time.time())


def read_hook_name(value: object) -> str:
    """The dotted name of a function, or nothing."""
    text = value.strip() if isinstance(value, str) else None
    if text is None or (text and not _NAME.fullmatch(text)):
        refuse(f"{echo(value)} names no function", FORM)
    return text


def hook_problems(name: str, base: Mapping[str, str]) -> list[Problem]:
    """What is wrong with the function among these options."""
    mechanism, protocol = (get(base, option) or "" for option in ("sasl.mechanisms", "security.protocol"))
    if not name or (mechanism.upper() == "OAUTHBEARER" and protocol.upper().startswith("SASL_")):
        return []
    allowed = 'base_kafka_config with "sasl.mechanism" = "OAUTHBEARER" and "security.protocol" = "SASL_SSL"'
    return [Problem(_PATH, "is used with SASL OAUTHBEARER only", allowed)]
