"""Loads a configuration from file, overrides and environment, and reports all problems at once.

Text may refer to environment variables: `${VAR}`, `${VAR:-default}`; `$$` stands for `$`. As in a shell, the default
also replaces an empty variable. Keys and the values of variables are not interpolated.

Overrides come from the command line: `--set limits.shards=4`, `--set base_kafka_config.bootstrap.servers=db:9092`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from harvester.config.kafka_options import canonical, flatten
from harvester.config.model import Config, Limits
from harvester.config.problems import UNKNOWN, path_part
from harvester.errors import ConfigurationError, Problem

ENV_VARIABLE = "HARVESTER_CONFIG"
DEFAULT_FILE = Path("harvester.toml")
_HINT = "`harvester config show` without a file prints every setting with its default"
_MAX_FILE_BYTES = 1_000_000
_DURATIONS = frozenset(name for name, field in Limits.model_fields.items() if field.annotation is timedelta)
_OPTION_TABLES = ("base_kafka_config", "producer_kafka_config")
_TIMES = frozenset({"delivery.timeout.ms", "max.poll.interval.ms", "linger.ms"})  # checked against the limits
_ASSIGNMENT = 'SETTING=VALUE, such as limits.shards=4 or producer_kafka_config."linger.ms"=5'
_REFERENCE = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\$\{)")
_FORM = "${NAME} or ${NAME:-default}; $$ for a plain $"


def interpolate_table(table: Mapping[str, object], env: Mapping[str, str]) -> tuple[dict[str, object], list[Problem]]:
    """The table with all references replaced, and those that could not be replaced (their text is unchanged)."""
    result: dict[str, object] = {}
    problems: list[Problem] = []
    for key, value in table.items():
        try:
            result[key] = _interpolate(value, env, path_part(key), problems)
        except RecursionError:
            result[key] = None
            problems.append(Problem(path_part(key), "is nested too deeply"))
    return result, problems


def _interpolate(value: object, env: Mapping[str, str], path: str, problems: list[Problem]) -> object:
    def replace(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        if found["bad"]:
            problems.append(Problem(path, "has a '${' that does not refer to a variable", _FORM))
            return found[0]
        if not name:
            return "$"
        if default is None and name not in env:
            missing = f"the environment variable {name} is not set"
            problems.append(Problem(path, missing, f"set it, or write ${{{name}:-default}}"))
            return found[0]
        return env.get(name, "") or default or ""

    if isinstance(value, str):
        return _REFERENCE.sub(replace, value)
    if isinstance(value, Mapping):
        return {key: _interpolate(inner, env, f"{path}.{path_part(key)}", problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [_interpolate(inner, env, f"{path}[{index}]", problems) for index, inner in enumerate(value)]
    return value


def apply_overrides(
    data: Mapping[str, object], overrides: Iterable[str]
) -> tuple[dict[str, object], frozenset[str], list[Problem]]:
    """The data with all overrides applied, the dotted paths that were set, and problems with the texts."""
    result = dict(data)
    touched: set[str] = set()
    problems: list[Problem] = []
    for text in overrides:
        name, equals, raw = text.partition("=")
        path = _path(name.strip())
        if not equals or path is None:
            # The text is not repeated: what precedes a missing '=' may be a password.
            problems.append(Problem("--set", "is not an assignment", _ASSIGNMENT))
            continue
        value = parse_value(raw)
        if len(path) == 1 and not isinstance(value, str | dict) and path[0] not in (*_OPTION_TABLES, "limits"):
            value = raw.strip()  # every top-level setting is text, even if it looks like a number
        if _put(result, path, value):
            touched.update(name for name, _ in flatten({".".join(path): value}))
        else:
            problems.append(Problem(".".join(path), f"cannot be set: {path[0]!r} is not a table"))
    return result, frozenset(touched), problems


def parse_value(raw: str) -> object:
    """The value parsed as TOML if possible, otherwise the text itself."""
    try:
        parsed = tomllib.loads(f"value = {raw}\n")
    except (ValueError, RecursionError):  # TOMLDecodeError is one; a number of 5,000 digits raises another
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _path(name: str) -> tuple[str, ...] | None:
    """The parts of `a.b`; in a table of Kafka options, everything after the first dot is one name."""
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
        table[part] = copy
        table = copy
    table[path[-1]] = value
    return True


def _without_same_option(table: Mapping[str, object], option: str) -> dict[str, object]:
    # The file may spell the option differently, or as a nested table; the override still replaces it.
    return {name: value for name, value in flatten(table) if canonical(name) != canonical(option)}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and its origin: the file, if any, all dotted paths that were given, and those from overrides."""

    config: Config
    source: Path | None
    given: frozenset[str]
    overridden: frozenset[str]


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration from `path`, or from $HARVESTER_CONFIG, or from ./harvester.toml, or the defaults.

    `overrides`: texts `a.b=c`, later ones win, the value as in TOML or plain text. `env`: instead of os.environ. Raises
    ConfigurationError with all problems.
    """
    return load(path, overrides, env).config


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    check: Callable[[Config], list[Problem]] | None = None,
) -> Loaded:
    """`load_config`, with the origin of each part.

    `check` finds further problems; if settings are already wrong, it checks those Kafka options that are right.
    """
    variables = os.environ if env is None else env
    named = path if path is not None else variables.get(ENV_VARIABLE) or None
    source = Path(named) if named is not None else _default_file()
    data = _read(source) if source is not None else {}
    data, overridden, problems = apply_overrides(data, overrides)
    resolved, unresolved = interpolate_table(data, variables)
    problems += unresolved
    reported = {problem.path for problem in unresolved}
    config: Config | None
    try:
        config = build(resolved)
    except ConfigurationError as error:
        problems += [problem for problem in error.problems if problem.path.replace('"', "") not in reported]
        config = _kafka_options_only(resolved, error.problems) if check is not None else None
    if check is not None and config is not None:
        paths = {problem.path for problem in problems}
        problems += [problem for problem in check(config) if problem.path not in paths]
    if config is None or problems:
        hint = _HINT if source else None
        raise ConfigurationError(problems, source=str(source) if source else None, hint=hint)
    given = frozenset(path for path, _ in flatten(resolved))
    return Loaded(config=config, source=source, given=given, overridden=overridden)


def build(data: Mapping[str, object]) -> Config:
    """A Config from plain values. Raises ConfigurationError with all problems.

    Rules between settings are only checked if every single setting is right. So that one misspelt name does not hide
    broken rules, they are checked again without the wrong settings, unless a rule depends on one.
    """
    try:
        return Config(**data)  # type: ignore[arg-type]  # it validates them
    except ConfigurationError as error:
        problems = list(error.problems)
    if not any(_decides_rules(problem) for problem in problems):
        try:
            Config(**_without(data, problems))  # type: ignore[arg-type]
        except ConfigurationError as again:
            problems += [problem for problem in again.problems if problem not in problems]
    raise ConfigurationError(problems)


def _decides_rules(problem: Problem) -> bool:
    """Whether the rules would be checked against values that were not meant."""
    if problem.message.startswith(UNKNOWN):
        meant = problem.message.removeprefix(UNKNOWN)
        return "limits." in meant or (bool(meant) and problem.path.startswith("limits."))
    table, _, name = problem.path.partition(".")
    return table in _OPTION_TABLES or (table == "limits" and (not name or name in _DURATIONS))


def _without(data: Mapping[str, object], problems: Iterable[Problem]) -> dict[str, object]:
    kept = dict(data)
    for problem in problems:
        table, _, name = problem.path.partition(".")
        inner = kept.get(table)
        if name and isinstance(inner, Mapping):
            kept[table] = {key: value for key, value in inner.items() if key != name}
        else:
            kept.pop(table, None)
    # Its default may be what is wrong; the rules do not use it.
    if any(problem.path in ("leader_group_id", "leader_topic") for problem in problems):
        kept |= {"leader_group_id": "any", "leader_topic": "any"}
    return kept


def _kafka_options_only(data: Mapping[str, object], problems: Iterable[Problem]) -> Config | None:
    """A Config with those Kafka options that have no problem, to check them; None if rules do not allow that."""
    wrong = {problem.path.replace('"', "") for problem in problems}
    tables: dict[str, object] = {}
    for table in _OPTION_TABLES:
        given = data.get(table)
        if isinstance(given, Mapping) and table not in wrong:
            tables[table] = {
                name: value
                for name, value in flatten(given)
                if f"{table}.{path_part(name)}" not in wrong and canonical(name) not in _TIMES
            }
    names = {"leader_group_id": "any", "leader_topic": "any"}
    token = {"oauth": data["oauth"]} if "oauth" in data else {}
    for more in (token, {}):
        try:
            return Config(**names, **tables, **more)  # type: ignore[arg-type]
        except ConfigurationError:
            continue
    return None


def _default_file() -> Path | None:
    """None if there is none, or if this user may not enter the current directory."""
    try:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    except OSError:
        return None


def _read(source: Path) -> dict[str, object]:
    try:
        with source.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            [Problem(str(source), f"cannot be read: {error.strerror or error}")],
            hint=f"name the file with -f or {ENV_VARIABLE}; {_HINT}",
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigurationError([Problem(str(source), f"is longer than {_MAX_FILE_BYTES} bytes")])
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # Not chained: these errors contain the file's text.
        what = "a number is too long, or tables are nested too deeply"  # Python's own limits, raised by tomllib
        if isinstance(error, tomllib.TOMLDecodeError):
            what = str(error)
        elif isinstance(error, UnicodeDecodeError):
            what = "it is not UTF-8 text"
        raise ConfigurationError([Problem(str(source), f"is not valid TOML: {what}")]) from None
