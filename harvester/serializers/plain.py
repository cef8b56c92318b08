"""Serialisers: the protocol, and those that need nothing but Python (bytes, text, JSON)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from harvester.errors import SerializationFailed

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


class Bytes:
    """Bytes as they are. The outbox needs a BYTEA value for them, unless they are UTF-8."""

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: bytes | bytearray | memoryview) -> Serialized:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not bytes")
        return Serialized(bytes(value))


class Text:
    """Text, which is published as UTF-8."""

    def __init__(self, content_type: str = "text/plain; charset=utf-8") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: str) -> Serialized:
        if not isinstance(value, str):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not a str")
        return Serialized(value)


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
