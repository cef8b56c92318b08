"""Serialisers: the protocol, those that need nothing but Python (bytes, text, JSON), and `Values` for reading.

Each one reads what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from harvester.errors import DeserializationFailed, SerializationFailed

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Serialized(NamedTuple):
    """A value in a record's form, with the headers that readers need to understand it."""

    value: str | bytes
    headers: tuple[tuple[str, str], ...] = ()


class Serializer(Protocol[T_contra]):
    """Turns values of one kind into what Kafka's readers expect.

    It is never called with None, which is a tombstone in every format.
    """

    @property
    def content_type(self) -> str:
        """The media type of its output."""

    def serialize(self, topic: str, value: T_contra) -> Serialized:
        """Write one value; raises SerializationFailed. `topic` is used by schema registries."""


class Deserializer(Protocol[T_co]):
    """Reads values of one kind. It is never called for a tombstone, which has no value."""

    def deserialize(self, topic: str, data: bytes) -> T_co:
        """Read one value; raises DeserializationFailed."""


class Values(Generic[T]):
    """The values of consumed records; the counterpart of `Records`.

        consumer.run(Values(Json()).handler(handle))  # handle(value, record)

    A value that cannot be read raises in the handler, so the consumer's `on_error` decides what happens to it.
    """

    def __init__(self, deserializer: Deserializer[T]) -> None:
        self._deserializer = deserializer

    def of(self, record: Any) -> T | None:
        """The value of a record, None for a tombstone; raises DeserializationFailed naming the record."""
        data = record.value()
        if data is None:
            return None
        try:
            return self._deserializer.deserialize(record.topic(), data)
        except DeserializationFailed as error:
            where = f"{record.topic()}[{record.partition()}]@{record.offset()}"
            raise DeserializationFailed(f"{where}: {error.message}", hint=error.hint) from error

    def handler(self, function: Callable[[T | None, Any], R]) -> Callable[[Any], R]:
        """A handler for `run` that passes value and record to a function or coroutine function; it is of the same kind,
        so `traced` takes either.
        """

        async def awaited(record: Any) -> Any:
            return await cast("Any", function(self.of(record), record))

        def called(record: Any) -> R:
            return function(self.of(record), record)

        return cast("Callable[[Any], R]", wraps(function)(awaited if iscoroutinefunction(function) else called))


class Bytes:
    """Bytes, unchanged. The outbox needs a BYTEA value for them, unless they are UTF-8."""

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: bytes | bytearray | memoryview) -> Serialized:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not bytes")
        return Serialized(bytes(value))

    def deserialize(self, topic: str, data: bytes) -> bytes:
        return data


class Text:
    """Text, published as UTF-8."""

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
            raise DeserializationFailed(f"the value is not UTF-8: {error}") from error


class Json:
    """JSON from the standard library, compact, in UTF-8, with members in their given order.

    `default` is called for unsupported types, as in `json.dumps`. NaN and infinities are not JSON, and are refused.
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
            raise DeserializationFailed(f"the value is not JSON: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
