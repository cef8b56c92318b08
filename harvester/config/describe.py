"""Describes a configuration, has the Kafka client check it, and compares it with another; shows no secrets."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from harvester.config.dsn import without_password
from harvester.config.durations import format_duration
from harvester.config.kafka_options import canonical, get, mask_options, option_path, scrub
from harvester.config.load import Loaded
from harvester.config.model import Config
from harvester.errors import Problem


@dataclass(frozen=True, slots=True)
class Setting:
    """One line: the setting's path as in TOML, its value (masked), and its origin."""

    table: str  # empty at the top level
    name: str
    value: str | int
    origin: str

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def toml(self) -> str:
        """`name = value`; a name with dots is quoted."""
        return to_toml({self.name: self.value}).rstrip("\n")


def to_toml(settings: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """Settings as TOML. `comments` come first, one line each."""
    one_line = (" ".join(re.sub(r"[\x00-\x1f\x7f]", " ", comment).split()) for comment in comments)
    head = "".join(f"# {line}\n" for line in one_line)
    return f"{head}\n{tomli_w.dumps(settings)}" if head else tomli_w.dumps(settings)


def settings_of(loaded: Loaded) -> Iterator[Setting]:
    """Every setting, top-level ones first, then table by table in the model's order."""
    shown = loaded.config.masked()
    described = {name: field.description for name, field in Config.model_fields.items()}
    for table, kind in Config.tables().items():
        described |= {f"{table}.{name}": field.description for name, field in kind.model_fields.items()}

    def setting(table: str, name: str, value: Any) -> Setting:
        path = f"{table}.{name}" if table else name
        if path in loaded.overridden:
            origin = "--set"
        elif path in loaded.given:
            origin = "file"
        else:
            origin = f"derived: {described[path]}" if described.get(path) else "default"
        return Setting(table, name, value, origin)

    for name, value in shown.items():
        if not isinstance(value, Mapping):
            yield setting("", name, value)
    for table, values in shown.items():
        if isinstance(values, Mapping):
            for name, value in values.items():
                yield setting(table, name, value)


def in_effect(config: Config) -> dict[str, str]:
    """The times that follow from the settings and are only visible here."""
    return {
        "delivery_timeout": format_duration(config.delivery_timeout),
        "group_heartbeat_interval": format_duration(config.group_heartbeat_interval),
        "rebalance_timeout": format_duration(config.rebalance_timeout),
    }


def as_json(loaded: Loaded) -> dict[str, Any]:
    """Everything, for scripts. Durations are text, as in the file."""
    config = loaded.config
    return {
        "source": str(loaded.source) if loaded.source else None,
        "settings": config.masked(),
        "origins": {setting.path: setting.origin for setting in settings_of(loaded)},
        "in_effect": in_effect(config),
        "producer_options": mask_options(config.producer_options()),
        "consumer_options": mask_options(config.consumer_options()),
    }


_NAMED = re.compile(r'(?:No such configuration property: |for configuration property )"(?P<option>[^"]+)"')
_CREATING = re.compile(r"^Failed to create (?:producer|consumer): ")
# A client without address opens no connection, but may fetch a token of OAUTHBEARER over HTTP; without `oauth_cb` it
# does not wait for one.
_PROTOCOLS = {"sasl_ssl": "ssl", "sasl_plaintext": "plaintext"}
_LEFT_OUT = frozenset({"bootstrap.servers", "oauth_cb"})


def check_clients(config: Config) -> list[Problem]:
    """What librdkafka refuses in the options of producers and of the leader group's member. Opens no connection."""
    problems: list[Problem] = []
    seen: set[tuple[str | None, str]] = set()
    # Consumers first: what they have in common with producers is in base_kafka_config.
    for options, producer in ((config.consumer_options(), False), (config.producer_options(), True)):
        for option, message in _refusals(options, producer=producer):
            if (option, message) not in seen:
                seen.add((option, message))
                problems.append(Problem(_option_path(config, option, producer=producer), message))
    return problems


def _refusals(options: Mapping[str, str], *, producer: bool) -> list[tuple[str | None, str]]:
    """(option or None, message) for each refusal: the client reports one at a time, so each is removed in turn."""
    rest = {name: value for name, value in options.items() if canonical(name) not in _LEFT_OUT}
    protocol = rest.get("security.protocol", "").lower()
    if protocol in _PROTOCOLS and get(rest, "sasl.mechanisms") == "OAUTHBEARER":
        rest["security.protocol"] = _PROTOCOLS[protocol]
    found: list[tuple[str | None, str]] = []
    while (message := _refusal(rest, producer=producer)) is not None:
        named = _NAMED.search(message)
        wrong = [name for name in rest if named and canonical(name) == canonical(named["option"])]
        message = scrub(message, options)
        if not wrong:
            found.append((None, message))
            break
        unknown = "No such" in message
        found.append((wrong[0], "the Kafka client does not know this option" if unknown else message))
        for name in wrong:
            del rest[name]
    return found


def _refusal(options: Mapping[str, str], *, producer: bool) -> str | None:
    from confluent_kafka import Consumer, KafkaException, Producer

    silent = logging.Logger("harvester.config.check")  # outside the tree: its warnings are discarded
    silent.addHandler(logging.NullHandler())
    try:
        client = (Producer if producer else Consumer)(dict(options), logger=silent)
    except KafkaException as error:
        return _CREATING.sub("", error.args[0].str())
    except (TypeError, ValueError) as error:
        return str(error)
    if not producer:
        client.close()
    return None


def _option_path(config: Config, option: str | None, *, producer: bool) -> str:
    if option is None:
        return "producer_kafka_config" if producer else "base_kafka_config"
    in_producer = get(config.producer_kafka_config, option) is not None
    return option_path("producer_kafka_config" if in_producer else "base_kafka_config", option)


# Settings that `harvester start` applies to a running harvester when the configuration is reread.
LIVE = frozenset({"limits.shards", "logging.level"})
_KAFKA_PASSWORDS = frozenset(f"{table}.sasl.password" for table in ("base_kafka_config", "producer_kafka_config"))


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs. `before` and `after` are masked, None if not given; `password`: only the password
    differs.
    """

    path: str
    before: Any
    after: Any
    password: bool = False

    @property
    def live(self) -> bool:
        """Whether it can be applied without a restart."""
        return self.password or self.path in LIVE

    def __str__(self) -> str:
        if self.before == self.after:  # masked alike
            return f"{self.path}: a secret in it"
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"


def changes(before: Config, after: Config) -> list[Change]:
    """Every setting whose effective value differs, in the model's order."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    masked_old, masked_new = _flat(before.masked()), _flat(after.masked())
    paths = dict.fromkeys([*old, *new])
    return [
        Change(path, masked_old.get(path), masked_new.get(path), _is_password(path, old.get(path), new.get(path)))
        for path in paths
        if old.get(path) != new.get(path)
    ]


def _is_password(path: str, old: Any, new: Any) -> bool:
    """Whether only a password differs, and both have one."""
    if path in _KAFKA_PASSWORDS:
        return bool(old and new)
    return path == "data_source" and without_password(old) == without_password(new)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def _shown(value: Any) -> str:
    return "(not given)" if value is None else repr(value)
