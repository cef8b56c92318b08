"""From pydantic's errors to problems that a person can act on; nothing that was entered is repeated unasked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from harvester.errors import Problem

_MESSAGES = {
    "string_type": ("must be text", "a string in quotes"),
    "string_unicode": ("must be text", "a string in quotes"),
    "missing": ("is missing", None),
    "model_type": ("must be a table", None),
    "dict_type": ("must be a table", None),
}
UNKNOWN = "unknown setting"
_DERIVED_FROM_INVALID = "default_factory_not_called"
_LONGEST_ECHO = 40


def refuse(message: str, allowed: str | None = None) -> NoReturn:
    """From inside a validator: this setting is wrong."""
    raise PydanticCustomError("setting", "{message}", {"message": message, "allowed": allowed})


def refuse_all(problems: Sequence[Problem]) -> NoReturn:
    """From inside a validator: several problems, each with its whole path."""
    raise PydanticCustomError("settings", "several problems", {"problems": tuple(problems)})


def problems_from(error: ValidationError, known: Mapping[str, str]) -> list[Problem]:
    """Every problem in the order of the fields. `known`: see `did_you_mean`."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False, include_input=False):
        path = ".".join(path_part(part) for part in detail["loc"])
        context = detail.get("ctx") or {}
        match detail["type"]:
            case "setting":
                found.append(Problem(path, context["message"], context["allowed"]))
            case "settings":
                found.extend(context["problems"])
            case "extra_forbidden":
                found.append(Problem(path, UNKNOWN + did_you_mean(path, known)))
            case kind if kind == _DERIVED_FROM_INVALID:
                continue
            case kind:
                found.append(Problem(path, *_MESSAGES.get(kind, (detail["msg"], None))))
    return found


def did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """`; did you mean …?` with the closest of the known names, or nothing.

    `known` maps each name that a user may have in mind to the right path. The seeds' own spellings
    (`LeaderGroupID`, `minPollInterval`) lead to ours, and so does the beginning of a name.
    """
    plain = {_plain(candidate): path for candidate, path in known.items()}
    leaf = _plain(name.rsplit(".", 1)[-1])
    begun = [candidate for candidate in plain if len(leaf) > 3 and candidate.startswith(leaf)]
    if leaf in plain:
        close = [leaf]
    elif len(begun) == 1:
        close = begun
    else:
        close = difflib.get_close_matches(leaf, list(plain), n=1, cutoff=0.7)
    return f"; did you mean {plain[close[0]]!r}?" if close else ""


def path_part(part: object) -> str:
    """A key as it may be printed: keys come from a file and can hold anything."""
    text = str(part)
    return text if text.isprintable() and len(text) <= _LONGEST_ECHO else echo(text)


def under(prefix: str, problems: Iterable[Problem]) -> list[Problem]:
    """The problems of a table, with its name in front."""
    return [
        Problem(f"{prefix}.{problem.path}" if problem.path else prefix, problem.message, problem.allowed)
        for problem in problems
    ]


def echo(value: object) -> str:
    """A short, printable form of a value that is known to be no secret."""
    text = repr(value)
    return text if len(text) <= _LONGEST_ECHO else f"{text[: _LONGEST_ECHO - 3]}..."


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
