"""Environment variables in settings: `${VAR}`, `${VAR:-default}`; `$$` stands for one `$`.

As in a shell, the default also replaces an empty variable. Only strings are looked into, never keys, and what a
variable holds is not looked into again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from harvester.config.problems import path_part
from harvester.errors import Problem

_REFERENCE = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\$\{)")
_FORM = "${NAME} or ${NAME:-default}; $$ for a plain $"


def interpolate_table(table: Mapping[str, object], env: Mapping[str, str]) -> tuple[dict[str, object], list[Problem]]:
    """The table with every reference replaced, and what could not be replaced (those texts stay as they are)."""
    result: dict[str, object] = {}
    problems: list[Problem] = []
    for key, value in table.items():
        try:
            result[key], more = _value(value, env, path_part(key))
        except RecursionError:
            result[key], more = None, [Problem(path_part(key), "is nested too deeply")]
        problems += more
    return result, problems


def _value(value: object, env: Mapping[str, str], path: str) -> tuple[object, list[Problem]]:
    problems: list[Problem] = []
    if isinstance(value, str):
        return _text(value, env, path)
    if isinstance(value, Mapping):
        table: dict[object, object] = {}
        for key, inner in value.items():
            table[key], more = _value(inner, env, f"{path}.{path_part(key)}")
            problems += more
        return table, problems
    if isinstance(value, list):
        items: list[object] = []
        for index, inner in enumerate(value):
            item, more = _value(inner, env, f"{path}[{index}]")
            items.append(item)
            problems += more
        return items, problems
    return value, problems


def _text(text: str, env: Mapping[str, str], path: str) -> tuple[str, list[Problem]]:
    problems: list[Problem] = []

    def replace(found: re.Match[str]) -> str:
        if found["bad"]:
            problems.append(Problem(path, "has a '${' that is no reference to a variable", _FORM))
        elif found["name"]:
            held = env.get(found["name"], "")
            if held:
                return held
            if found["default"] is not None:
                return found["default"]
            if found["name"] not in env:
                missing = f"the environment variable {found['name']} is not set"
                problems.append(Problem(path, missing, f"set it, or write ${{{found['name']}:-default}}"))
            return found[0] if found["name"] not in env else ""
        return "$" if found[0] == "$$" else found[0]

    return _REFERENCE.sub(replace, text), problems
