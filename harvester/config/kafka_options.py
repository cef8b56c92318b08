"""Reads tables of Kafka client options: which are passed on, which are refused and why, which are secret.

Names are librdkafka's (its CONFIGURATION.md). Aliases count as the option they stand for, so that a refused option
cannot be set under its other name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from harvester.config.problems import path_part
from harvester.errors import Problem

Table = Literal["base_kafka_config", "producer_kafka_config"]

ALIASES = {
    "metadata.broker.list": "bootstrap.servers",
    "acks": "request.required.acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "linger.ms": "queue.buffering.max.ms",
    "retries": "message.send.max.retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "compression.type": "compression.codec",
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "auto.commit.enable": "enable.auto.commit",
}

_ORDER = "it protects the order of each key (I2) and prevents loss (I5)"
_ELECTION = "the election sets it: it decides who may lead (I4)"
_CALLBACK = "it is a callback, which a configuration cannot carry into the shard processes"
REFUSED = {
    "request.required.acks": f"always all: {_ORDER}",
    "enable.idempotence": f"always true: {_ORDER}",
    "enable.gapless.guarantee": "it would fail the producer at the first record that a broker refuses (I7)",
    "transactional.id": "it identifies a shard's lane; the harvester sets it",
    "enable.auto.commit": f"always false; {_ELECTION}",
    "enable.auto.offset.store": _ELECTION,
    "auto.offset.reset": _ELECTION,
    "partition.assignment.strategy": f"always cooperative-sticky; {_ELECTION}",
    "session.timeout.ms": "set limits.session_timeout instead: other limits are checked against it",
    "heartbeat.interval.ms": "it follows from limits.session_timeout",
    "partitioner": "always murmur2_random, as in Java and Spark: any other would move keys to other partitions",
    "delivery.report.only.error": "always false: a record is purged when its acknowledgement is reported (I5)",
    "default.topic.config": "give its options directly in the table",
    "logger": "set [logging] level, or pass a logger where the harvester is embedded",
    "oauth_cb": "set oauth.token instead, with the function's name",
    "opaque": _CALLBACK,
    "on_delivery": _CALLBACK,
    "on_commit": _CALLBACK,
}
_CALLBACK_ENDINGS = ("_cb", "_callback_data", "msg_order_cmp", "enabled_events")

PRODUCER_ONLY = frozenset(
    {
        "message.timeout.ms", "queue.buffering.max.ms", "message.send.max.retries", "compression.codec",
        "transaction.timeout.ms", "queue.buffering.max.messages", "queue.buffering.max.kbytes",
        "queue.buffering.backpressure.threshold", "batch.num.messages", "batch.size",
        "sticky.partitioning.linger.ms", "request.timeout.ms", "compression.level", "queuing.strategy",
        "produce.offset.report",
    }
)  # fmt: skip
CONSUMER_ONLY = frozenset(
    {
        "max.poll.interval.ms", "auto.commit.interval.ms", "queued.min.messages", "queued.max.messages.kbytes",
        "fetch.wait.max.ms", "fetch.queue.backoff.ms", "fetch.message.max.bytes", "fetch.max.bytes",
        "fetch.min.bytes", "fetch.error.backoff.ms", "offset.store.method", "offset.store.path",
        "offset.store.sync.interval.ms", "isolation.level", "enable.partition.eof", "check.crcs",
        "coordinator.query.interval.ms", "consume.callback.max.messages", "max.poll.records",
    }
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)
# librdkafka puts the client's name into its JSON statistics without escaping it, and truncates it after 127 bytes,
# possibly within a character. Either makes them unreadable, and `poll` raises.
_LONGEST_CLIENT_ID_BYTES = 100
_MAX_IN_FLIGHT = 5  # librdkafka's limit for an idempotent producer
_INTEGER_OPTIONS = {
    "message.timeout.ms": (0, 2_147_483_647),
    "max.poll.interval.ms": (1, 86_400_000),
    "max.in.flight.requests.per.connection": (1, _MAX_IN_FLIGHT),
    "message.send.max.retries": (1, 2_147_483_647),
}
_INTEGER_REASONS = {
    "max.in.flight.requests.per.connection": f"more would break the order; {_ORDER}",
    "message.send.max.retries": "without retries the order cannot be kept when a broker fails over",
}


def canonical(option: str) -> str:
    """The option for which a name stands."""
    return ALIASES.get(option, option)


def flatten(table: Mapping[str, object]) -> list[tuple[str, object]]:
    """A TOML table as (option, value); `linger.ms = 1` without quotes is a nested table in TOML with the same
    meaning.
    """
    pairs: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            pairs += [(f"{key}.{rest}", inner) for rest, inner in flatten(value)]
        else:
            pairs.append((str(key), value))
    return pairs


def read_options(table: Mapping[str, object], name: Table) -> tuple[dict[str, str], list[Problem]]:
    """A table from a file or from Python as options for librdkafka, and all problems with it.

    Problems never repeat values. Order and spelling of names are kept.
    """
    options: dict[str, str] = {}
    seen: dict[str, str] = {}
    problems: list[Problem] = []
    for option, value in flatten(table):
        path = option_path(name, option)
        meant = canonical(option)
        text = _text(value)
        if meant in seen:
            twice = "is given twice" if seen[meant] == option else f"and {seen[meant]!r} are the same option"
            problems.append(Problem(path, twice, "one of them"))
            continue
        seen[meant] = option
        reason = refusal(meant)
        if reason:
            problems.append(Problem(path, f"cannot be set: {reason}"))
        elif not _NAME.fullmatch(option):
            problems.append(Problem(path, "is not the name of an option", "letters, digits, '.', '_' and '-'"))
        elif text is None:
            problems.append(Problem(path, "has the wrong type", "a string, a number or a boolean"))
        elif "\x00" in text:
            problems.append(Problem(path, "holds a NUL character"))
        elif name == "base_kafka_config" and meant in PRODUCER_ONLY:
            problems.append(Problem(path, "applies to producers only; move it to [producer_kafka_config]"))
        elif name == "producer_kafka_config" and meant in CONSUMER_ONLY:
            problems.append(Problem(path, "applies to consumers only; move it to [base_kafka_config]"))
        elif meant == "client.id" and not _fits_client_id(text):
            problems.append(Problem(path, "would make the Kafka client's statistics unreadable", _CLIENT_ID_FORM))
        elif wrong := _out_of_range(meant, text):
            problems.append(Problem(path, *wrong))
        else:
            options[option] = text
    return options, problems


def client_id(name: str) -> str:
    """A process name as an option `client.id`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST_CLIENT_ID_BYTES]


_CLIENT_ID_FORM = (
    "printable characters other than '\"' and '\\',"
    f" and at most {_LONGEST_CLIENT_ID_BYTES} bytes where they are not all ASCII"
)


def _fits_client_id(text: str) -> bool:
    is_whole = text.isascii() or len(text.encode()) <= _LONGEST_CLIENT_ID_BYTES
    return is_whole and text.isprintable() and not {'"', "\\"} & set(text)


def option_path(table: str, option: str) -> str:
    """The name of an option in a problem: it is quoted, since it contains dots."""
    return f'{table}."{path_part(option)}"'


def get(options: Mapping[str, str], option: str) -> str | None:
    """The value of an option under any of its names."""
    meant = canonical(option)
    return next((value for name, value in options.items() if canonical(name) == meant), None)


def merge(*layers: Mapping[str, str]) -> dict[str, str]:
    """Later layers win, even if they spell an option differently."""
    merged: dict[str, tuple[str, str]] = {}
    for layer in layers:
        for name, value in layer.items():
            merged[canonical(name)] = (name, value)
    return dict(merged.values())


def without(options: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    """The options supported by a kind of client: librdkafka would warn about others at every start."""
    return {name: value for name, value in options.items() if canonical(name) not in names}


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return repr(value) if abs(value) < float("inf") else None
    return None


def refusal(option: str) -> str | None:
    """Why an option cannot be set; takes its canonical name."""
    if option.startswith("group."):
        return f"set leader_group_id instead; {_ELECTION}"
    return REFUSED.get(option) or (_CALLBACK if option.endswith(_CALLBACK_ENDINGS) else None)


def _out_of_range(option: str, text: str) -> tuple[str, str] | None:
    if option not in _INTEGER_OPTIONS:
        return None
    low, high = _INTEGER_OPTIONS[option]
    if text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high:
        return None
    reason = _INTEGER_REASONS.get(option)
    return (f"is out of range: {reason}" if reason else "is out of range", f"a whole number from {low} to {high}")


# Names follow librdkafka's own list of sensitive properties, extended to everything with a similar name: a misspelt
# `sasl.pasword` gets past, but is refused before it is shown.
MASK = "***"
_ANYWHERE = re.compile(r"pass|secret|credential", re.IGNORECASE)
_AT_END = re.compile(r"(\.pem|_pem|[._]key|^key|token|user\.info|sasl\.username|oauthbearer\.config)$", re.IGNORECASE)
_PATHS = re.compile(r"(\.location|\.file|passfile|\.id)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]*@")


def is_secret(option: str) -> bool:
    """Whether the value of a Kafka option is a secret. Paths to key files are not."""
    if _PATHS.search(option):
        return False
    return bool(_ANYWHERE.search(option) or _AT_END.search(option))


def mask_options(options: Mapping[str, str]) -> dict[str, str]:
    """Kafka options in a form that may be shown, in their order; a login inside a URL is masked, too."""
    return {
        option: (MASK if value else value) if is_secret(option) else _URL_LOGIN.sub(f"{MASK}@", value)
        for option, value in options.items()
    }


def scrub(text: str, options: Mapping[str, str]) -> str:
    """A librdkafka message with every secret value masked."""
    for option, value in options.items():
        if is_secret(option) and value:
            text = text.replace(value, MASK)
    return text
