"""How a row of another table becomes a record: templates over its columns (pure).

    outbox.event.{aggregatetype}

A name in braces is a column, exactly as the table has it; `{{` and `}}` are braces. The defaults are those of
Debezium's outbox event router: its column names, its topics, its header `id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from harvester.errors import ConfigurationError, Problem

DEBEZIUM_TOPIC = "outbox.event.{aggregatetype}"
DEBEZIUM_KEY = "{aggregateid}"
DEBEZIUM_VALUE = "{payload}"
DEBEZIUM_HEADERS = ("id={id}",)

_PIECE = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+)")
_ALLOWED = "text and {column}; {{ and }} for braces"


@dataclass(frozen=True, slots=True)
class Template:
    """Pieces of (whether it is a column, its name or the text)."""

    pieces: tuple[tuple[bool, str], ...]

    @classmethod
    def parse(cls, field: str, text: str) -> Template:
        """Read one, which may not be empty; raises ConfigurationError that names the field."""
        pieces: list[tuple[bool, str]] = []
        at = 0
        while at < len(text):
            found = _PIECE.match(text, at)
            if found is None:
                raise ConfigurationError([Problem(field, f"{text!r} has a stray brace", _ALLOWED)])
            brace, column, plain = found.groups()
            pieces.append((column is not None, column or plain or brace[0]))
            at = found.end()
        if not pieces or "\x00" in text:
            raise ConfigurationError([Problem(field, f"{text!r} is no template", _ALLOWED)])
        return cls(tuple(pieces))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it names."""
        return frozenset(text for is_column, text in self.pieces if is_column)

    def __str__(self) -> str:
        return "".join(f"{{{text}}}" if is_column else _escaped(text) for is_column, text in self.pieces)


@dataclass(frozen=True, slots=True)
class Route:
    """A record without a key has no order; a key that is NULL is none."""

    topic: Template
    key: Template | None
    value: Template
    headers: tuple[tuple[str, Template], ...]

    @classmethod
    def parse(
        cls,
        *,
        topic: str = DEBEZIUM_TOPIC,
        key: str = DEBEZIUM_KEY,
        value: str = DEBEZIUM_VALUE,
        headers: Iterable[str] = DEBEZIUM_HEADERS,
    ) -> Route:
        """Read templates; an empty key is none, a header is `name=template`. Raises ConfigurationError."""
        return cls(
            topic=Template.parse("topic", topic),
            key=Template.parse("key", key) if key else None,
            value=Template.parse("value", value),
            headers=tuple(_header(header) for header in headers),
        )

    @property
    def columns(self) -> frozenset[str]:
        """All columns that it names."""
        templates = [self.topic, self.value, *(template for _, template in self.headers)]
        return frozenset().union(*(template.columns for template in templates), self.key.columns if self.key else ())

    def __str__(self) -> str:
        headers = "".join(f", header {name}={template}" for name, template in self.headers)
        return f"topic {self.topic}, key {self.key}, value {self.value}{headers}"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _header(text: str) -> tuple[str, Template]:
    name, equals, template = text.partition("=")
    if not equals:
        raise ConfigurationError([Problem("header", f"{text!r} has no '='", "name=template")])
    return name, Template.parse("header", template)
