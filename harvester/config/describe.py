"""Describes a configuration for printing, and the difference between two; no secret is shown.

What differs between two configurations, in words that hold no secret, and what a running harvester can take over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harvester.config.dsn import without_password
from harvester.config.durations import format_duration
from harvester.config.load import Loaded
from harvester.config.model import Config
from harvester.config.secrets import mask_options
from harvester.config.toml_text import assignment

# Defaults that are computed, and from what.
DERIVED = {
    "limits.max_poll_interval": "heartbeat_timeout / 2",
    "limits.session_timeout": "3 x heartbeat_timeout",
    "limits.drain_interval": "the lower of max_poll_interval and queue_timeout",
    "leader_topic": "leader_group_id + .neli",
    "leader_group_id": "the main script's name",
    "name": "host, process and start time",
}
_TABLES = (
    "base_kafka_config",
    "producer_kafka_config",
    "limits",
    "poison",
    "logging",
    "http",
    "tracing",
    "control",
    "oauth",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line: the setting's path as in TOML, its value (masked), and where that comes from."""

    table: str  # empty at the top
    name: str
    value: str | int
    origin: str

    @property
    def toml(self) -> str:
        """`name = value`; a name with dots is quoted."""
        return assignment(self.name, self.value)


def settings_of(loaded: Loaded) -> Iterator[Setting]:
    """Every setting, those at the top first, then table by table in the model's order."""
    shown = loaded.config.masked()
    for name in Config.model_fields:
        if name not in _TABLES:
            yield Setting("", name, shown[name], _origin(loaded, name))
    for table in _TABLES:
        for name, value in shown[table].items():
            yield Setting(table, name, value, _origin(loaded, f"{table}.{name}"))


def in_effect(config: Config) -> dict[str, str]:
    """The times that follow from the settings and can only be seen here."""
    return {
        "delivery_timeout": format_duration(config.delivery_timeout),
        "group_heartbeat_interval": format_duration(config.group_heartbeat_interval),
        "rebalance_timeout": format_duration(config.rebalance_timeout),
    }


def as_json(loaded: Loaded) -> dict[str, Any]:
    """All of it for scripts. Durations are text, as in the file."""
    config = loaded.config
    return {
        "source": str(loaded.source) if loaded.source else None,
        "settings": config.masked(),
        "origins": {
            f"{setting.table}.{setting.name}" if setting.table else setting.name: setting.origin
            for setting in settings_of(loaded)
        },
        "in_effect": in_effect(config),
        "producer_options": mask_options(config.producer_options()),
        "consumer_options": mask_options(config.consumer_options()),
    }


def _origin(loaded: Loaded, path: str) -> str:
    names = {path, "limits.send_concurrency"} if path == "limits.shards" else {path}
    if names & loaded.overridden:
        return "--set"
    if names & loaded.given:
        return "file"
    return f"derived: {DERIVED[path]}" if path in DERIVED else "default"


# What `harvester start` applies while it runs (cli/reload.py).
LIVE = frozenset({"limits.shards", "logging.level"})
_KAFKA_PASSWORDS = frozenset(f"{table}.sasl.password" for table in ("base_kafka_config", "producer_kafka_config"))


@dataclass(frozen=True, slots=True)
class Change:
    """One setting. `before` and `after` are masked; None: not given there. `password`: nothing else differs."""

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
    """Every setting that is another one in effect, in the order of the model."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    masked_old, masked_new = _flat(before.masked()), _flat(after.masked())
    paths = dict.fromkeys([*old, *new])
    return [
        Change(path, masked_old.get(path), masked_new.get(path), _is_password(path, old.get(path), new.get(path)))
        for path in paths
        if old.get(path) != new.get(path)
    ]


def _is_password(path: str, old: Any, new: Any) -> bool:
    """Whether only a password differs, where there was one and is one."""
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
