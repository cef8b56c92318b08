"""Collects all problems of a configuration, in words that users can act on.

Tables of settings derive from `SettingsTable`; validators reject a value with `refuse`. Entered values are never
repeated unless a validator echoes one that cannot be secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from harvester.errors import ConfigurationError, Problem

UNKNOWN = "unknown setting"
_DERIVED_FROM_INVALID = "default_factory_not_called"
_LONGEST_ECHO = 40


def refuse(message: str, allowed: str | None = None) -> NoReturn:
    """Called in a validator: this setting is wrong."""
    raise PydanticCustomError("setting", "{message}", {"message": message, "allowed": allowed})


def refuse_all(problems: Sequence[Problem]) -> NoReturn:
    """Called in a validator: several problems, each with its full path."""
    raise PydanticCustomError("settings", "several problems", {"problems": tuple(problems)})


class SettingsTable(BaseModel):
    """An immutable table whose fields are the settings. Raises ConfigurationError with all problems."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    if not TYPE_CHECKING:  # type checkers keep the signature derived from the fields

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                # Not chained: pydantic's error contains the input, including secrets.
                raise ConfigurationError(_problems_from(error, self.known_names())) from None

    @classmethod
    def known_names(cls) -> dict[str, str]:
        """Maps every name that a user may have in mind to the right path, relative to this table."""
        known = {name: name for name in cls.model_fields}
        for table, kind in cls.tables().items():
            known |= {name: f"{table}.{path}" for name, path in kind.known_names().items()}
        return known

    @classmethod
    def tables(cls) -> dict[str, type[SettingsTable]]:
        """The tables inside this one."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, SettingsTable)
        }


def nested(kind: type[SettingsTable], name: str) -> BeforeValidator:
    """A nested table: its problems are reported with their full paths."""

    def read(value: object) -> object:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            refuse(f"must be a table ([{name}])")
        try:
            return kind(**{str(key): inner for key, inner in value.items()})
        except ConfigurationError as error:
            refuse_all([Problem(f"{name}.{each.path}", each.message, each.allowed) for each in error.problems])

    return BeforeValidator(read)


def _problems_from(error: ValidationError, known: Mapping[str, str]) -> list[Problem]:
    """All problems in the order of the fields. `known`: see `_did_you_mean`."""
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
                found.append(Problem(path, UNKNOWN + _did_you_mean(path, known)))
            case "string_unicode":  # a lone surrogate
                found.append(Problem(path, "must be text", "a string in quotes"))
            case kind if kind != _DERIVED_FROM_INVALID:
                found.append(Problem(path, detail["msg"]))
    return found


def _did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """`; did you mean …?` with the closest known name, or nothing.

    goharvest's spellings (`LeaderGroupID`, `minPollInterval`) lead to ours, as does the beginning of a name.
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


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def path_part(part: object) -> str:
    """A printable form of a key: keys come from a file and can contain anything."""
    text = str(part)
    return text if text.isprintable() and len(text) <= _LONGEST_ECHO else echo(text)


def echo(value: object) -> str:
    """A short, printable form of a value that is known not to be secret."""
    text = repr(value)
    return text if len(text) <= _LONGEST_ECHO else f"{text[: _LONGEST_ECHO - 3]}..."
