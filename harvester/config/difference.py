"""What differs between two configurations, in words that hold no secret, and what a running harvester can take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harvester.config.dsn import without_password
from harvester.config.model import Config

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
