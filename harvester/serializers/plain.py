"""Serialisers that need nothing but Python: bytes, text, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from harvester.errors import SerializationFailed
from harvester.serializers.protocol import Serialized


class Bytes:
    """Bytes as they are. The outbox needs a BYTEA value for them, unless they are UTF-8."""

    def __init__(self, content_type: str = "application/octet-stream") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: bytes | bytearray | memoryview) -> Serialized:
        """See `Serializer`."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationFailed(f"the value is a {type(value).__name__}, not bytes")
        return Serialized(bytes(value))


class Text:
    """Text, which is published as UTF-8."""

    def __init__(self, content_type: str = "text/plain; charset=utf-8") -> None:
        self.content_type = content_type

    def serialize(self, topic: str, value: str) -> Serialized:
        """See `Serializer`."""
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
        """See `Serializer`."""
        try:
            return Serialized(self._encoder.encode(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise SerializationFailed(
                f"the value cannot be written as JSON: {error}", hint="Json(default=…) is asked about other types"
            ) from error
