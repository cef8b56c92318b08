"""Serialisers by msgspec: structs, dataclasses, attrs and whatever else it knows, as JSON or MessagePack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from harvester.errors import SerializationFailed
from harvester.serializers.plain import Serialized


class Msgspec:
    """`encoding="json"` fits any outbox, `"msgpack"` needs a BYTEA value. `enc_hook` is msgspec's."""

    def __init__(
        self, encoding: Literal["json", "msgpack"] = "json", *, enc_hook: Callable[[Any], Any] | None = None
    ) -> None:
        encoder = msgspec.json.Encoder if encoding == "json" else msgspec.msgpack.Encoder
        self.content_type = f"application/{encoding}"
        self._encode = encoder(enc_hook=enc_hook).encode

    def serialize(self, topic: str, value: object) -> Serialized:
        try:
            return Serialized(self._encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise SerializationFailed(f"msgspec cannot write the value: {error}") from error
