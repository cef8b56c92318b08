"""Finding, reading and completing a configuration: file, then overrides, then defaults; all problems at once."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from harvester.config.interpolation import interpolate_table
from harvester.config.kafka_options import flatten
from harvester.config.model import Config
from harvester.config.overrides import apply_overrides
from harvester.config.problems import UNKNOWN
from harvester.config.sections import Limits
from harvester.errors import ConfigurationError, Problem

ENV_VARIABLE = "HARVESTER_CONFIG"
DEFAULT_FILE = Path("harvester.toml")
_MAX_FILE_BYTES = 1_000_000
_OPTION_TABLES = ("base_kafka_config", "producer_kafka_config")
_DURATIONS = frozenset(name for name, field in Limits.model_fields.items() if field.annotation is timedelta)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where it comes from: the file (None: no file), and the dotted paths that were given at
    all and those that were given by an override."""

    config: Config
    source: Path | None
    given: frozenset[str]
    overridden: frozenset[str]


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration from `path`, else $HARVESTER_CONFIG, else ./harvester.toml, else the defaults.

    `overrides`: texts `a.b=c`, later ones win, the value as in TOML or plain text. `env`: instead of os.environ.
    Raises ConfigurationError with everything that is wrong.
    """
    return load(path, overrides, env).config


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """`load_config`, and where each part came from."""
    variables = os.environ if env is None else env
    source = find_file(path, variables)
    data = _read(source) if source is not None else {}
    data, overridden, problems = apply_overrides(data, overrides)
    resolved, unresolved = interpolate_table(data, variables)
    problems += unresolved
    reported = {problem.path for problem in unresolved}
    try:
        config = build(resolved)
    except ConfigurationError as error:
        problems += [problem for problem in error.problems if problem.path.replace('"', "") not in reported]
    if problems:
        hint = "sample-config.toml shows every setting with its default" if source else None
        raise ConfigurationError(problems, source=str(source) if source else None, hint=hint)
    given = frozenset(path for path, _ in flatten(resolved))
    return Loaded(config=config, source=source, given=given, overridden=overridden)


def find_file(path: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path | None:
    """Which file counts; None when there is none. A file that was asked for and is missing is an error."""
    named = path if path is not None else env.get(ENV_VARIABLE) or None
    if named is None:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    return Path(named)


def build(data: Mapping[str, object]) -> Config:
    """A Config from plain values. Raises ConfigurationError with everything that is wrong.

    Rules between settings are judged only where every setting is right by itself. So that one misspelt name does
    not hide them, they are judged once more without the settings that are wrong, unless a rule depends on one.
    """
    try:
        return Config(**data)  # type: ignore[arg-type]  # validation is what it is for
    except ConfigurationError as error:
        problems = list(error.problems)
    if not any(_decides_rules(problem) for problem in problems):
        try:
            Config(**_without(data, problems))  # type: ignore[arg-type]
        except ConfigurationError as again:
            problems += [problem for problem in again.problems if problem not in problems]
    raise ConfigurationError(problems)


def _decides_rules(problem: Problem) -> bool:
    """Whether the rules would be judged on other values than were meant."""
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
            aliases = {name, "send_concurrency"} if name == "shards" else {name}
            kept[table] = {key: value for key, value in inner.items() if key not in aliases}
        else:
            kept.pop(table, None)
    # Its default may be what is wrong; the rules do not look at it.
    if any(problem.path in ("leader_group_id", "leader_topic") for problem in problems):
        kept |= {"leader_group_id": "any", "leader_topic": "any"}
    return kept


def _read(source: Path) -> dict[str, object]:
    try:
        with source.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            [Problem(str(source), f"cannot be read: {error.strerror or error}")],
            hint=f"name the file with -f or {ENV_VARIABLE}; sample-config.toml shows every setting",
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigurationError([Problem(str(source), f"is longer than {_MAX_FILE_BYTES} bytes")])
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # Not chained: these errors carry the text of the file.
        what = "a number is too long, or tables are nested too deeply"  # Python's own bounds, which tomllib passes on
        if isinstance(error, tomllib.TOMLDecodeError):
            what = str(error)
        elif isinstance(error, UnicodeDecodeError):
            what = "it is not UTF-8 text"
        raise ConfigurationError([Problem(str(source), f"is not valid TOML: {what}")]) from None
