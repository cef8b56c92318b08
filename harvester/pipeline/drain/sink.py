"""The options of a drain's producers: what the user gives, between defaults and what guards the order. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from harvester.errors import ConfigurationError, Problem
from harvester.pipeline.drain.slices import Times

_ORDER = "it guards the order of each key, and that nothing is lost"
_REFUSED = {
    "acks": f"always all: {_ORDER}",
    "enable.idempotence": f"always true: {_ORDER}",
    "retries": f"never few: {_ORDER}",
    "transactional.id": "Spark's sink has no transactions",
    "partitioner.class": "always Kafka's own: another would move keys to other partitions",
    "partitioner.ignore.keys": "always false: it would move keys to other partitions",
    "max.block.ms": "it follows from --lease",
    "compression.type": "batches whose size is not known beforehand may be split, and then lost (KAFKA-19479)",
}
_IN_FLIGHT = "max.in.flight.requests.per.connection"
# Large batches and a little patience: nobody waits for a single record of a backlog.
_DEFAULTS = {"linger.ms": "20", "batch.size": "131072", "buffer.memory": str(64 << 20), _IN_FLIGHT: "5"}
_BATCH, _DELIVERY, _REQUEST, _LARGEST = "batch.size", "delivery.timeout.ms", "request.timeout.ms", "max.request.size"
_LARGEST_DEFAULT = 1 << 20
_MARGIN_BYTES = 4096
_SHARE_OF_LIMIT = 3, 4


def check(given: Mapping[str, str]) -> int | None:
    """The user's own delivery timeout in milliseconds; ConfigurationError for options that are not the user's."""
    problems = [Problem(f"--kafka {name}", f"cannot be set: {why}") for name, why in _REFUSED.items() if name in given]
    if not _is_number(given.get(_IN_FLIGHT, "5"), 1, 5):
        problems.append(Problem(f"--kafka {_IN_FLIGHT}", f"is out of range: {_ORDER}", "1 to 5"))
    for name in (_DELIVERY, _BATCH):
        if not _is_number(given.get(name, "1"), 1, 2**31 - 1):
            problems.append(Problem(f"--kafka {name}", "is no whole number above 0"))
    if problems:
        raise ConfigurationError(problems)
    return int(given[_DELIVERY]) if _DELIVERY in given else None


def sink_options(given: Mapping[str, str], times: Times, limits: tuple[int, int]) -> dict[str, str]:
    """For Spark's Kafka sink; `limits`: the lowest and the highest of `max.message.bytes` of the slice's topics.

    A batch of several records may never be refused as too large. The client would split it, and `flush`, by which
    Spark's sink waits for acknowledgements, does not wait for the halves (KAFKA-19479, in Spark 4.0): the task would
    end as if all had been sent. So no batch is larger than the smallest limit allows.
    """
    delivery_ms = int(times.delivery * 1000)
    part, whole = _SHARE_OF_LIMIT
    lowest, highest = limits
    options = {
        **_DEFAULTS,
        _LARGEST: str(max(_LARGEST_DEFAULT, highest + _MARGIN_BYTES)),
        _REQUEST: str(min(30_000, delivery_ms // 2)),
        **given,
        _BATCH: str(min(int(given.get(_BATCH, _DEFAULTS[_BATCH])), lowest * part // whole)),
        _DELIVERY: str(delivery_ms),
        "max.block.ms": str(int(times.block * 1000)),
        "acks": "all",
        "enable.idempotence": "true",
        "retries": str(2**31 - 1),
    }
    return {f"kafka.{name}": value for name, value in options.items()}


def _is_number(text: str, low: int, high: int) -> bool:
    return text.isascii() and text.isdigit() and low <= int(text) <= high
