"""Serialisers using msgspec: structs, dataclasses, attrs and other supported types, as JSON or MessagePack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from harvester.errors import DeserializationFailed, SerializationFailed
from harvester.serializers.plain import Serialized


class Msgspec:
    """`encoding="json"` works with any outbox, `"msgpack"` requires a BYTEA value. `enc_hook` and `dec_hook` are
    msgspec's.

    `type`: the type as which values are read, which validates them.
    """

    def __init__(
        self,
        encoding: Literal["json", "msgpack"] = "json",
        *,
        enc_hook: Callable[[Any], Any] | None = None,
        type: Any = Any,  # noqa: A002 - msgspec's name
        dec_hook: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        codec = msgspec.json if encoding == "json" else msgspec.msgpack
        self.content_type = f"application/{encoding}"
        self._encode = codec.Encoder(enc_hook=enc_hook).encode
        self._decode = codec.Decoder(type, dec_hook=dec_hook).decode

    def serialize(self, topic: str, value: object) -> Serialized:
        try:
            return Serialized(self._encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise SerializationFailed(f"msgspec cannot write the value: {error}") from error

    def deserialize(self, topic: str, data: bytes) -> Any:
        try:
            return self._decode(data)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise DeserializationFailed(f"msgspec cannot read the value: {error}") from error
