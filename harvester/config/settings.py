"""What every table of settings is: immutable, and refused with everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from harvester.config.problems import problems_from, refuse, refuse_all, under
from harvester.errors import ConfigurationError


def derived(compute: Any) -> Any:
    """A default computed from the fields above it (pydantic skips it when one of those is invalid)."""
    return Field(default_factory=compute)


class Settings(BaseModel):
    """A table; its fields are the settings. `_aliases`: other names that may be given -> the setting's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)
    _aliases: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields give

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                # Not chained: pydantic's error holds the input, secrets included.
                raise ConfigurationError(problems_from(error, known_names(type(self)))) from None


def nested(kind: type[Settings], name: str) -> BeforeValidator:
    """A table inside another: its problems are reported with their whole paths."""

    def read(value: object) -> object:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            refuse(f"must be a table ([{name}])")
        try:
            return kind(**{str(key): inner for key, inner in value.items()})
        except ConfigurationError as error:
            refuse_all(under(name, error.problems))

    return BeforeValidator(read)


def known_names(kind: type[Settings]) -> dict[str, str]:
    """Every name that a user may have in mind -> the path that is right, seen from inside `kind`."""
    known = {name: name for name in kind.model_fields}
    for table, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            known |= {name: f"{table}.{path}" for name, path in known_names(inner).items()}
    return known | dict(kind._aliases)
