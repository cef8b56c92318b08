"""Overrides from the command line: `--set limits.shards=4`, `--set base_kafka_config.bootstrap.servers=db:9092`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping

from harvester.config.kafka_options import canonical, flatten
from harvester.errors import Problem

_OPTION_TABLES = ("base_kafka_config", "producer_kafka_config")
_SAME = {("limits", "shards"): "send_concurrency", ("limits", "send_concurrency"): "shards"}
_FORM = 'SETTING=VALUE, such as limits.shards=4 or producer_kafka_config."linger.ms"=5'


def apply_overrides(
    data: Mapping[str, object], overrides: Iterable[str]
) -> tuple[dict[str, object], frozenset[str], list[Problem]]:
    """The data with each override put in, the dotted paths that were set, and what is wrong with the texts."""
    result = dict(data)
    touched: set[str] = set()
    problems: list[Problem] = []
    for text in overrides:
        name, equals, raw = text.partition("=")
        path = _path(name.strip())
        if not equals or path is None:
            # The text is not repeated: what stands before a missing '=' may be a password.
            problems.append(Problem("--set", "is not an assignment", _FORM))
            continue
        value = parse_value(raw)
        if len(path) == 1 and not isinstance(value, str | dict) and path[0] not in (*_OPTION_TABLES, "limits"):
            value = raw.strip()  # every setting at the top is text, also where it looks like a number
        if _put(result, path, value):
            touched.update(name for name, _ in flatten({".".join(path): value}))
        else:
            problems.append(Problem(".".join(path), f"cannot be set: {path[0]!r} is not a table"))
    return result, frozenset(touched), problems


def parse_value(raw: str) -> object:
    """The value as TOML, where it is TOML; else the text itself."""
    try:
        parsed = tomllib.loads(f"value = {raw}\n")
    except (ValueError, RecursionError):  # TOMLDecodeError is one, and so is what a number of 5,000 digits gives
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _path(name: str) -> tuple[str, ...] | None:
    """`a.b` as its parts; in a table of Kafka options all that follows the first dot is one name."""
    table, dot, rest = name.partition(".")
    if table in _OPTION_TABLES and dot:
        option = rest.strip().strip("\"'")
        return (table, option) if option else None
    parts = tuple(part.strip().strip("\"'") for part in name.split("."))
    return parts if all(parts) else None


def _put(data: dict[str, object], path: tuple[str, ...], value: object) -> bool:
    table = data
    for part in path[:-1]:
        inner = table.get(part, {})
        if not isinstance(inner, Mapping):
            return False
        copy = _without_same_option(inner, path[-1]) if part in _OPTION_TABLES else dict(inner)
        if path in _SAME:
            copy.pop(_SAME[path], None)
        table[part] = copy
        table = copy
    table[path[-1]] = value
    return True


def _without_same_option(table: Mapping[str, object], option: str) -> dict[str, object]:
    # The file may spell the option differently, or as a nested table; the override replaces it all the same.
    return {name: value for name, value in flatten(table) if canonical(name) != canonical(option)}
