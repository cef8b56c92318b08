"""Rules between settings, apart from those of `timing`. Each gives what is wrong; nothing: they go together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from harvester.config import kafka_options, timing
from harvester.config.durations import format_duration, to_ms
from harvester.config.sections import Limits
from harvester.errors import Problem


def order_problems(limits: Limits) -> list[Problem]:
    """A backoff is no longer than the longest that it may become."""
    pairs = (("mark_backoff", "mark_backoff_max"), ("retry_backoff", "retry_backoff_max"))
    found = []
    for low, high in pairs:
        least, most = getattr(limits, low), getattr(limits, high)
        if least > most:
            text = f"is {format_duration(most)}, below {low} ({format_duration(least)})"
            found.append(Problem(f"limits.{high}", text, f"at least {format_duration(least)}"))
    return found


def linger_problems(producer_options: Mapping[str, str], delivery_timeout: timedelta) -> list[Problem]:
    """Lingering leaves time to deliver."""
    linger = kafka_options.get(producer_options, "linger.ms")
    try:
        too_long = linger is not None and float(linger) >= to_ms(delivery_timeout)
    except ValueError:
        too_long = False  # `harvester config check` asks librdkafka what it thinks of values
    if not too_long or delivery_timeout < timing.MIN_DELIVERY_TIMEOUT:
        return []
    path = kafka_options.option_path("producer_kafka_config", "linger.ms")
    return [Problem(path, "is no shorter than the delivery timeout", f"below {to_ms(delivery_timeout)}")]


def notice_problems(notice_topic: str, leader_topic: str) -> list[Problem]:
    """Notices of poison do not go where members of the group read heartbeats."""
    if notice_topic != leader_topic:
        return []
    return [Problem("poison.notice_topic", "is the leader topic, on which only heartbeats may be", "another topic")]
