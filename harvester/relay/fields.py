"""Whether JSON values fit the fields of a frame. Pure.

A dataclass takes any value for any field, and the wrong one would surface far from the pipe, in the relay's core. So
what arrives is compared with the annotations: an unknown, missing or mistyped field raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

_Check = Callable[[object], bool]


def checked(kind: Any, values: object) -> dict[str, Any]:
    """The arguments for `kind`, a dataclass, from what a JSON text held."""
    if type(values) is not dict:
        raise ValueError("not an object")
    checks, required = _rules(kind)
    if not values.keys() <= checks.keys() or not required <= values.keys():
        raise ValueError("unknown or missing fields")
    wrong = [name for name, value in values.items() if not checks[name](value)]
    if wrong:
        raise ValueError(f"wrong types: {', '.join(wrong)}")
    return {name: _printable(value) if isinstance(value, str) else value for name, value in values.items()}


def _printable(text: str) -> str:
    """Half a surrogate pair passes JSON and breaks whoever prints or stores it."""
    return text.encode("utf-8", "replace").decode()


@cache
def _rules(kind: Any) -> tuple[Mapping[str, _Check], frozenset[str]]:
    """(check by field, the fields without a default)."""
    hints = get_type_hints(kind)
    checks = {field.name: _CHECKS[hints[field.name]] for field in fields(kind)}
    return checks, frozenset(field.name for field in fields(kind) if field.default is MISSING)


def _is_integer(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_number(value: object) -> bool:
    return _is_integer(value) or (type(value) is float and not math.isnan(value))


def _are_integers(value: object) -> bool:
    return type(value) is list and all(map(_is_integer, value))


def _is_text(value: object) -> bool:
    return type(value) is str


_CHECKS: dict[Any, _Check] = {
    int: _is_integer,
    float: _is_number,
    bool: lambda value: type(value) is bool,
    str: _is_text,
    Sequence[int]: _are_integers,
    int | None: lambda value: value is None or _is_integer(value),
    str | None: lambda value: value is None or _is_text(value),
}
