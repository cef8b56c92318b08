"""Whether a record can be stored and published, checked before any SQL is sent (pure).

A record that passes becomes a row with exactly the bytes that consumers will see: text in a BYTEA column is stored as
UTF-8, and bytes in a text column must be UTF-8. Limits that only Kafka knows (message.max.bytes, the number of
partitions) cannot be checked here; such records end in quarantine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from uuid import UUID

from harvester.errors import RecordRejected
from harvester.outbox.shape import ColumnShape, StoredType
from harvester.record import OutboxRecord

MAX_TOPIC_CHARACTERS = 249
MAX_PARTITION = 2**31 - 1
TOPIC_CHARACTERS = "[a-zA-Z0-9._-]+"

_TOPIC = re.compile(TOPIC_CHARACTERS)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A checked record in the types of its columns; the header lists have equal lengths."""

    topic: str
    key: str | bytes | None
    value: str | bytes | None
    header_keys: list[str]
    header_values: list[str]
    partition: int | None


def check(record: OutboxRecord, shape: ColumnShape, *, encoding: str = "utf-8", index: int | None = None) -> CheckedRow:
    """Turn a record into a row; raises RecordRejected naming the field.

    `encoding` is the Python codec of the session's client_encoding; `index` is the record's place in its batch.
    """
    return _Check(shape, encoding, "" if index is None else f" {index} of the batch").row(record)


@dataclass(frozen=True, slots=True)
class _Check:
    shape: ColumnShape
    encoding: str
    where: str

    def row(self, record: OutboxRecord) -> CheckedRow:
        if not isinstance(record, OutboxRecord):
            self.refuse(f"it is {_article(record)}, not an OutboxRecord")
        topic = self.topic(record.topic)
        key = self.key(record.key)
        value = self.value(record.value)
        header_keys, header_values = self.headers(record.headers)
        return CheckedRow(topic, key, value, header_keys, header_values, self.partition(record.partition))

    def topic(self, topic: object) -> str:
        if not isinstance(topic, str):
            self.refuse(f"topic is {_article(topic)}, not a str")
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            self.refuse(
                f"topic {_shown(topic)} is not a valid topic name",
                hint="letters, digits, '.', '_' and '-' are allowed; not '.' or '..' alone",
            )
        self.length("topic", topic, min(self.shape.topic_max or MAX_TOPIC_CHARACTERS, MAX_TOPIC_CHARACTERS))
        return topic

    def key(self, key: object) -> str | bytes | None:
        if key is None:
            if not self.shape.key_nullable:
                self.refuse("key is None, but the column kafka_key is NOT NULL", hint="give a key, or make it nullable")
            return None
        if not isinstance(key, str):
            self.refuse(f"key is {_article(key)}, not a str or None")
        if self.shape.key_stored:
            self.castable("key", key, self.shape.key_stored)
        if self.shape.key_type == "bytea":
            return self.utf8("key", key)
        self.text("key", key)
        self.length("key", key, self.shape.key_max)
        return key

    def value(self, value: object) -> str | bytes | None:
        if value is None:
            if not self.shape.value_nullable:
                self.refuse("value is None, but the column kafka_value is NOT NULL")
            return None
        if not isinstance(value, str | bytes):
            self.refuse(f"value is {_article(value)}, not a str, bytes or None")
        if self.shape.value_type == "bytea":
            return value if isinstance(value, bytes) else self.utf8("value", value)
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                self.refuse(
                    "value is bytes that are not UTF-8, but the column kafka_value is text",
                    hint="make the column BYTEA, as `harvester init --value-type bytea` does for a new table",
                )
        if self.shape.value_stored:
            self.castable("value", value, self.shape.value_stored)
        self.text("value", value)
        self.length("value", value, self.shape.value_max)
        return value

    def headers(self, headers: object) -> tuple[list[str], list[str]]:
        if not isinstance(headers, Sequence) or isinstance(headers, str | bytes):
            self.refuse(f"headers is {_article(headers)}, not a sequence of pairs (name, value)")
        names: list[str] = []
        values: list[str] = []
        for at, pair in enumerate(headers):
            # A str of two characters would unpack as a pair.
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                self.refuse(f"headers[{at}] is not a pair (name, value)")
            for part, text, into in (("name", pair[0], names), ("value", pair[1], values)):
                if not isinstance(text, str):
                    self.refuse(f"headers[{at}]: the {part} is {_article(text)}, not a str")
                self.text(f"headers[{at}]: the {part}", text)
                into.append(text)
        if self.shape.headers == "jsonb" and len(set(names)) < len(names):
            self.refuse("two headers have the same name, which the object in kafka_headers cannot hold")
        return names, values

    def partition(self, partition: object) -> int | None:
        if partition is None:
            return None
        if not isinstance(partition, int) or isinstance(partition, bool):
            self.refuse(f"partition is {_article(partition)}, not an int or None")
        if not 0 <= partition <= MAX_PARTITION:
            self.refuse(f"partition is {partition}, not between 0 and {MAX_PARTITION}")
        if not self.shape.has_partition:
            self.refuse(
                f"partition is {partition}, but the outbox has no column kafka_partition",
                hint="add it (ALTER TABLE … ADD COLUMN kafka_partition INTEGER), or leave partition out",
            )
        return partition

    def castable(self, field: str, text: str, kind: StoredType) -> None:
        """Check that the column accepts it. The server checks more of JSON: `jsonb` holds no character U+0000."""
        try:
            match kind:
                case "uuid":
                    UUID(text)
                case "json" | "jsonb":
                    json.loads(text, parse_constant=_no_number)
                case _:
                    bits = 64 if kind == "bigint" else 32
                    if not text.isascii() or not -(2 ** (bits - 1)) <= int(text) < 2 ** (bits - 1):
                        raise ValueError
        except (ValueError, RecursionError):
            self.refuse(f"{field} is {_shown(text)}, which a column of type {kind} does not accept")

    def text(self, field: str, text: str) -> None:
        if "\x00" in text:
            self.refuse(f"{field} contains a NUL character, which PostgreSQL cannot store as text")
        if text.isascii():
            return
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError as error:
            self.refuse(f"{field} cannot be encoded as {self.encoding} (at character {error.start})")

    def utf8(self, field: str, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            self.refuse(f"{field} cannot be encoded as utf-8 (at character {error.start})")

    def length(self, field: str, text: str, limit: int | None) -> None:
        if limit is not None and len(text) > limit:
            self.refuse(f"{field} has {len(text)} characters, its column accepts {limit}")

    def refuse(self, problem: str, *, hint: str | None = None) -> NoReturn:
        raise RecordRejected(f"record{self.where} refused: {problem}", hint=hint)


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are not JSON, although Python accepts them


def _article(thing: object) -> str:
    if thing is None:
        return "None"
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return ascii(cut) if not cut.isprintable() else repr(cut)
