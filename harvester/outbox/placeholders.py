"""How a driver wants parameters to stand in a statement (pure).

Statements are written once, as psycopg reads them: `%s`, `%b` (in binary form), `%(name)s`, and `%%` for a per cent
sign. For another driver the finished text is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum

_PLACEHOLDER = re.compile(r"%(?:(%)|[sbt]|\((\w+)\)[sbt])")


class Style(Enum):
    """Of whom a statement is to be understood."""

    PSYCOPG = "psycopg"
    FORMAT = "format"  # psycopg2: no binary form, names are allowed
    DOLLAR = "dollar"  # asyncpg, and functions in the server: $1, $2, …


def rewritten(statement: str, style: Style, names: Iterable[str] = ()) -> str:
    """The statement for that driver; `names` are those of the parameters, in the order in which DOLLAR numbers them.

    A statement has either names or none; what is not named is numbered as it comes.
    """
    if style is Style.PSYCOPG:
        return statement
    numbers = {name: number for number, name in enumerate(names, 1)}
    last = 0

    def placeholder(found: re.Match[str]) -> str:
        nonlocal last
        percent, name = found.groups()
        if percent:
            return "%" if style is Style.DOLLAR else "%%"
        if style is Style.FORMAT:
            return f"%({name})s" if name else "%s"
        last = numbers[name] if name else last + 1
        return f"${last}"

    return _PLACEHOLDER.sub(placeholder, statement)


def inlined(statement: str, expressions: Mapping[str, str]) -> str:
    """The statement with these SQL expressions in place of its named parameters."""

    def placeholder(found: re.Match[str]) -> str:
        percent, name = found.groups()
        return "%" if percent else expressions[name]

    return _PLACEHOLDER.sub(placeholder, statement)
