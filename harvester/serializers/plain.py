"""Serialisers: the protocol, and those that need nothing but Python (bytes, text, JSON); and `Values`, which reads.

Each of them reads what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from harvester.errors import DeserializationFailed, SerializationFailed

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Serialized(NamedTuple):
    """A value as a record holds it, with the headers that readers need to understand it."""

    value: str | bytes
    headers: tuple[tuple[str, str], ...] = ()


class Serializer(Protocol[T_contra]):
    """Turns values of one kind into what Kafka's readers expect.

    It is never asked about None, which is a tombstone whatever the format.
    """

    @property
    def content_type(self) -> str:
        """The media type of what it writes."""

    def serialize(self, topic: str, value: T_contra) -> Serialized:
        """Write one value; raises SerializationFailed. `topic` is where a registry of schemas files it."""


class Deserializer(Protocol[T_co]):
    """Reads values of one kind. It is never asked about a tombstone, which has none."""

    def deserialize(self, topic: str, data: bytes) -> T_co:
        """Read one value; raises DeserializationFailed."""


class Values(Generic[T]):
    """The values of consumed records; the counterpart of `Records`.

        consumer.run(Values(Json()).handler(handle))  # handle(value, record)

    What cannot be read raises in the handler, so `on_error` of the consumer says what is done with it.
    """

    def __init__(self, deserializer: Deserializer[T]) -> None:
        self._deserializer = deserializer

    def of(self, record: Any) -> T | None:
        """The value of a record, None for a tombstone; raises DeserializationFailed that names the record."""
        data = record.value()
        if data is None:
            return None
        try:
            return self._deserializer.deserialize(record.topic(), data)
        except DeserializationFailed as error:
            where = f"{record.topic()}[{record.partition()}]@{record.offset()}"
            raise DeserializationFailed(f"{where}: {error.message}", hint=error.hint) from error

    def handler(self, function: Callable[[T | None, Any], R]) -> Callable[[Any], R]:
        """A handler for `run` that gives value and record to a function; also to a coroutine function."""

        @wraps(function)
        def handle(record: Any) -> R:
            return function(self.of(record), record)

        return handle


class Bytes:
    """Bytes as they are. The outbox needs a BYTEA value for them, unless they are UTF-8."""

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: bytes | bytearray | memoryview) -> Serialized:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not bytes")
        return Serialized(bytes(value))

    def deserialize(self, topic: str, data: bytes) -> bytes:
        return data


class Text:
    """Text, which is published as UTF-8."""

    def __init__(self, content_type: str = "text/plain; charset=utf-8") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: str) -> Serialized:
        if not isinstance(value, str):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not a str")
        return Serialized(value)

    def deserialize(self, topic: str, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise DeserializationFailed(f"the value is no UTF-8: {error}") from error


class Json:
    """JSON by the standard library, compact, in UTF-8, its members in the order in which they come.

    `default` is asked about what JSON does not know, as by `json.dumps`. NaN and infinities are no JSON, and refused.
    """

    content_type = "application/json"

    def __init__(self, *, default: Callable[[Any], Any] | None = None, sort_keys: bool = False) -> None:
        self._encoder = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default, sort_keys=sort_keys
        )

    def serialize(self, topic: str, value: object) -> Serialized:
        try:
            return Serialized(self._encoder.encode(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise SerializationFailed(
                f"the value cannot be written as JSON: {error}", hint="Json(default=…) handles other types"
            ) from error

    def deserialize(self, topic: str, data: bytes) -> Any:
        try:
            return json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise DeserializationFailed(f"the value is no JSON: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
