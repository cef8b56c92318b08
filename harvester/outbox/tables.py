"""The names of the outbox, its companion tables and its channel.

A name is given as in SQL: `outbox`, `billing.outbox`, `"My Schema"."the outbox"`; unquoted parts fold to lower case as
in PostgreSQL. Names for SQL text are quoted here and nowhere else, so a name can never inject anything.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from harvester.errors import SchemaError

_PART = re.compile(r'\s*(?:"((?:[^"\x00]|"")+)"|([A-Za-z_\u0080-\uffff][\w$\u0080-\uffff]*))\s*')
_MAX_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class OutboxTable:
    """The outbox's name; `schema` is None when the search path decides."""

    schema: str | None
    name: str

    @classmethod
    def parse(cls, text: str) -> OutboxTable:
        """Read `[schema.]name`; raises SchemaError on anything else, or on a name too long for a suffix."""
        parts: list[str] = []
        at = 0
        while True:
            found = _PART.match(text, at)
            if not found:
                break
            quoted, plain = found.groups()
            parts.append(quoted.replace('""', '"') if quoted is not None else _fold(plain))
            at = found.end()
            if at == len(text) or text[at] != ".":
                break
            at += 1
            if at == len(text):
                parts.clear()
        if at != len(text) or len(parts) not in (1, 2):
            raise SchemaError(
                f"{text!r} is not a table name",
                hint='write it as in SQL: outbox, billing.outbox or "My Schema"."outbox"',
            )
        if len(f"{parts[-1]}_quarantine".encode()) > _MAX_NAME_BYTES:
            raise SchemaError(
                f"the table name {parts[-1]!r} is too long",
                hint=f"it may have {_MAX_NAME_BYTES - len('_quarantine')} bytes, so that its companions' names fit",
            )
        return cls(schema=parts[0] if len(parts) == 2 else None, name=parts[-1])

    def _qualified(self, name: str) -> str:
        return f"{quoted(self.schema)}.{quoted(name)}" if self.schema is not None else quoted(name)

    @property
    def sql(self) -> str:
        """The outbox, quoted for SQL text."""
        return self._qualified(self.name)

    @property
    def term(self) -> str:
        """The table with the single term row."""
        return self._qualified(f"{self.name}_term")

    @property
    def quarantine(self) -> str:
        """The table for poison records."""
        return self._qualified(f"{self.name}_quarantine")

    @property
    def lease(self) -> str:
        """The table of leases, one row per name under which records are numbered."""
        return self._qualified(f"{self.name}_lease")

    @property
    def archive(self) -> str:
        """The optional table that keeps a trace of purged records, partitioned by day."""
        return self._qualified(f"{self.name}_archive")

    def beside(self, suffix: str) -> str:
        """Another name in the outbox's schema, shortened if PostgreSQL would truncate it."""
        name = f"{self.name}_{suffix}"
        if len(name.encode()) > _MAX_NAME_BYTES:
            name = f"harvester_{hashlib.sha256(self.name.encode()).hexdigest()[:16]}_{suffix}"
        return self._qualified(name)

    @property
    def channel(self) -> str:
        """The NOTIFY channel of the optional trigger; usable unquoted, since it is a lower-case identifier."""
        return f"harvester_{hashlib.sha256(self.sql.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self.sql


def doubled(name: str) -> str:
    """A quoted name in a statement with psycopg's parameters, where a per cent sign is special."""
    return name.replace("%", "%%")


def _fold(identifier: str) -> str:
    """Folds to lower case as PostgreSQL does in UTF-8 databases: ASCII letters only."""
    return "".join(c.lower() if c.isascii() else c for c in identifier)


def quoted(identifier: str) -> str:
    """Quotes the name of a column, a schema or a role for SQL text."""
    return '"' + identifier.replace('"', '""') + '"'


_ENCODING = "CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END"


def as_bytes(column: str, kind: str) -> str:
    """A text or bytea column as the bytes that Kafka gets: in UTF-8, or unchanged in SQL_ASCII (P33)."""
    return column if kind == "bytea" else f"convert_to({column}, {_ENCODING})"


def literal(text: str) -> str:
    """A string literal for SQL text; E'' works with any setting of standard_conforming_strings."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def dollar_quoted(body: str) -> str:
    """Quotes the body of a function for SQL text, whatever it contains."""
    tag = "$function$"
    while tag in body:
        tag = f"{tag[:-1]}_$"
    return f"{tag}{body}{tag}"
