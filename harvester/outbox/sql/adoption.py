"""Adopted tables: a trigger that makes a record of each new row, using templates over its columns (pure).

A template such as `outbox.event.{aggregatetype}` defines topic, key, value or a header. A name in braces is a column,
exactly as in the table; `{{` and `}}` are literal braces. The defaults are those of Debezium's outbox event router: its
column names, its topics, its header `id`.

The trigger inserts into the outbox within the statement that inserts into the table: both commit or neither does, ids
are taken when a writer expects it, and the relay sees ordinary rows. Its function runs as its owner, so inserting into
the table requires no privilege on the outbox; it belongs to one table and cannot be reused for another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harvester.errors import ConfigurationError, Problem, SchemaError
from harvester.outbox.shape import ColumnShape, header_kind
from harvester.outbox.sql import columns
from harvester.outbox.sql.insert import written_columns
from harvester.outbox.tables import OutboxTable, dollar_quoted, literal, quoted

DEBEZIUM_TOPIC = "outbox.event.{aggregatetype}"
DEBEZIUM_KEY = "{aggregateid}"
DEBEZIUM_VALUE = "{payload}"
DEBEZIUM_HEADERS = ("id={id}",)

_PIECE = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+)")
_ALLOWED = "text and {column}; {{ and }} for braces"


@dataclass(frozen=True, slots=True)
class Template:
    """Alternating text and columns; a piece is (whether it is a column, its name or the text)."""

    pieces: tuple[tuple[bool, str], ...]

    @classmethod
    def parse(cls, field: str, text: str) -> Template:
        """Parse a template, which must not be empty; raises ConfigurationError naming the field."""
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
            raise ConfigurationError([Problem(field, f"{text!r} is not a template", _ALLOWED)])
        return cls(tuple(pieces))

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(text for is_column, text in self.pieces if is_column)

    def __str__(self) -> str:
        return "".join(f"{{{text}}}" if is_column else _escaped(text) for is_column, text in self.pieces)


@dataclass(frozen=True, slots=True)
class Route:
    """Which columns become what. A record without a key has no order; a NULL key counts as none.

    `headers_from`: a column with further headers, an object of JSON or an array of pairs.
    """

    topic: Template
    key: Template | None
    value: Template
    headers: tuple[tuple[str, Template], ...]
    headers_from: str | None = None

    @classmethod
    def parse(
        cls,
        *,
        topic: str = DEBEZIUM_TOPIC,
        key: str = DEBEZIUM_KEY,
        value: str = DEBEZIUM_VALUE,
        headers: Iterable[str] = DEBEZIUM_HEADERS,
        headers_from: str | None = None,
    ) -> Route:
        """Parse templates; an empty key is none, a header is `name=template`. Raises ConfigurationError."""
        return cls(
            topic=Template.parse("topic", topic),
            key=Template.parse("key", key) if key else None,
            value=Template.parse("value", value),
            headers=tuple(_header(header) for header in headers),
            headers_from=headers_from,
        )

    @property
    def columns(self) -> frozenset[str]:
        templates = [self.topic, self.value, *(template for _, template in self.headers)]
        further = [self.key.columns if self.key else (), (self.headers_from,) if self.headers_from else ()]
        return frozenset().union(*(template.columns for template in templates), *further)

    def __str__(self) -> str:
        headers = "".join(f", header {name}={template}" for name, template in self.headers)
        further = f", headers of {self.headers_from}" if self.headers_from else ""
        return f"topic {self.topic}, key {self.key}, value {self.value}{headers}{further}"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _header(text: str) -> tuple[str, Template]:
    name, equals, template = text.partition("=")
    if not equals:
        raise ConfigurationError([Problem("header", f"{text!r} has no '='", "name=template")])
    return name, Template.parse("header", template)


_KINDS = {"r": "a table", "p": "a partitioned table"}


@dataclass(frozen=True, slots=True)
class AdoptedTable:
    """Catalog information about a table: its full name, its kind as in pg_class, and its columns with their types."""

    name: OutboxTable
    kind: str
    columns: Mapping[str, str]


def adopt(outbox: OutboxTable, shape: ColumnShape, source: AdoptedTable, route: Route) -> list[str]:
    """Statements that create or replace the trigger; `outbox` has its schema. Raises SchemaError."""
    _judge(outbox, source, route)
    function, trigger = _function(outbox, source.name), outbox.channel
    return [
        f"""CREATE OR REPLACE FUNCTION {function}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS {
            dollar_quoted(_body(outbox, shape, source, route))
        }""",
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        f"COMMENT ON FUNCTION {function}() IS {literal(f'rows of {source.name}: {route}')}",
        f"DROP TRIGGER IF EXISTS {trigger} ON {source.name.sql}",
        f"""CREATE TRIGGER {trigger} AFTER INSERT ON {source.name.sql}
FOR EACH ROW EXECUTE FUNCTION {function}()""",
    ]


def abandon(outbox: OutboxTable, source: OutboxTable) -> list[str]:
    """Removes what `adopt` has made."""
    return [
        f"DROP TRIGGER IF EXISTS {outbox.channel} ON {source.sql}",
        f"DROP FUNCTION IF EXISTS {_function(outbox, source)}()",
    ]


def _function(outbox: OutboxTable, source: OutboxTable) -> str:
    # Based on the full name: two tables of one name in different schemas have two functions.
    return outbox.beside(f"from_{hashlib.sha256(source.sql.encode()).hexdigest()[:16]}")


def _judge(outbox: OutboxTable, source: AdoptedTable, route: Route) -> None:
    if source.name == outbox:
        raise SchemaError(f"{source.name} is the outbox itself: its rows are already records")
    if source.kind not in _KINDS:
        raise SchemaError(
            f"{source.name} is not a table, so no trigger can capture its rows", hint="name the table itself"
        )
    missing = sorted(route.columns - source.columns.keys())
    if missing:
        raise SchemaError(
            f"{source.name} has no column {', '.join(missing)}",
            hint=f"it has {', '.join(source.columns)}; use options to define topic, key, value and headers",
        )
    if route.headers_from and header_kind(source.columns[route.headers_from]) is None:
        raise SchemaError(
            f"{source.name} has {route.headers_from} as {source.columns[route.headers_from]}, which holds no headers",
            hint="headers in one column are an object (jsonb or json), or alternating names and values (text[])",
        )


def _body(outbox: OutboxTable, shape: ColumnShape, source: AdoptedTable, route: Route) -> str:
    fields = [
        "now()",
        _text(route.topic, source),
        columns.stored(
            shape,
            _bytes(route.key, source) if shape.key_type == "bytea" else _text(route.key, source),
            _bytes(route.value, source) if shape.value_type == "bytea" else _text(route.value, source),
            "names",
            "contents",
        ),
    ]
    if shape.has_partition:
        fields.append("NULL")
    return f"""
DECLARE
    names text[] := '{{}}';
    contents text[] := '{{}}';
BEGIN
{_headers(route, source)}{_further(route, source)}    INSERT INTO {outbox.sql} ({written_columns(shape)})
    VALUES ({", ".join(fields)});
    RETURN NULL;
END
"""


def _headers(route: Route, source: AdoptedTable) -> str:
    if not route.headers:
        return ""
    rows = ", ".join(
        f"({at}, {literal(name)}, {_text(template, source)})" for at, (name, template) in enumerate(route.headers)
    )
    # A header without a value is left out: the outbox accepts no NULL among them.
    return f"""    SELECT coalesce(array_agg(h.name ORDER BY h.at), '{{}}'),
        coalesce(array_agg(h.content ORDER BY h.at), '{{}}')
    INTO names, contents FROM (VALUES {rows}) AS h (at, name, content) WHERE h.content IS NOT NULL;
"""


def _further(route: Route, source: AdoptedTable) -> str:
    if route.headers_from is None:
        return ""
    kind, column = header_kind(source.columns[route.headers_from]), f"NEW.{quoted(route.headers_from)}"
    assert kind is not None, "it was checked"
    return f"""    names := names || {columns.names_in(kind, column)};
    contents := contents || {columns.values_in(kind, column)};
"""


def _text(template: Template | None, source: AdoptedTable) -> str:
    """An expression of type text; NULL if one of the columns is NULL."""
    if template is None:
        return "NULL"
    return " || ".join(_column(text, source) if is_column else literal(text) for is_column, text in template.pieces)


def _column(name: str, source: AdoptedTable) -> str:
    column = f"NEW.{quoted(name)}"
    return f"convert_from({column}, 'UTF8')" if source.columns[name] == "bytea" else f"{column}::text"


def _bytes(template: Template | None, source: AdoptedTable) -> str:
    """An expression of type bytea: a bytea column unchanged, everything else as UTF-8."""
    if template is None:
        return "NULL"
    if len(template.pieces) == 1:
        is_column, name = template.pieces[0]
        if is_column and source.columns[name] == "bytea":
            return f"NEW.{quoted(name)}"
    return f"convert_to({_text(template, source)}, 'UTF8')"
