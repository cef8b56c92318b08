"""The bytes that frames travel as over a pipe. Pure.

A frame on the pipe is a 4-byte big-endian length and that many bytes: one letter for the kind, then the body.
The two kinds that travel per record, `Dispatch` and `Settled`, are packed binary; everything rare is JSON.
Rows in a `Dispatch` are the tuples of `COPY … (FORMAT BINARY)` untouched: the shard decodes them.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harvester.errors import WireError
from harvester.relay.fields import checked
from harvester.relay.frames import (
    Closed,
    Dispatch,
    Dropped,
    FateUnknown,
    Frame,
    InDoubt,
    Log,
    Login,
    Parked,
    Poisoned,
    Quarantined,
    QueueTimedOut,
    Ready,
    Refused,
    Remark,
    Remarked,
    ServerChanged,
    Session,
    Settled,
    Stats,
    Stop,
    Trouble,
)

_LENGTH = struct.Struct(">I")
_DISPATCH = struct.Struct(">cIq")
_NO_LOW_WATER = -(2**63)
MAX_FRAME_BYTES = 1 << 30
MAX_ANSWER_BYTES = 1 << 26  # from a shard: ids, figures and texts only

_RARE: dict[bytes, type[Any]] = {
    b"m": Remark,
    b"c": Closed,
    b"n": Login,
    b"x": Stop,
    b"r": Ready,
    b"k": Remarked,
    b"p": Parked,
    b"f": Refused,
    b"d": Dropped,
    b"u": FateUnknown,
    b"i": InDoubt,
    b"t": QueueTimedOut,
    b"q": Quarantined,
    b"o": Poisoned,
    b"e": Session,
    b"v": ServerChanged,
    b"s": Stats,
    b"l": Log,
    b"w": Trouble,
}
_LETTER = {kind: letter for letter, kind in _RARE.items()}


def encode(frame: Frame) -> bytes:
    """The frame with its length in front, ready for a pipe."""
    if type(frame) is Dispatch:
        low = _NO_LOW_WATER if frame.low_water is None else frame.low_water
        return _LENGTH.pack(_DISPATCH.size + len(frame.rows)) + _DISPATCH.pack(b"D", frame.epoch, low) + frame.rows
    if type(frame) is Settled:
        body = b"S" + array("q", frame.ids).tobytes()
    else:
        text = json.dumps(asdict(frame), separators=(",", ":"), default=list)
        body = _LETTER[type(frame)] + text.encode()
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """A frame from its bytes without the length; raises WireError on anything that is none."""
    letter = body[:1]
    try:
        if letter == b"D":
            _, epoch, low = _DISPATCH.unpack_from(body)
            return Dispatch(epoch, body[_DISPATCH.size :], None if low == _NO_LOW_WATER else low)
        if letter == b"S":
            ids = array("q")
            ids.frombytes(body[1:])
            return Settled(ids.tolist())
        kind = _RARE[letter]
        frame: Frame = kind(**checked(kind, json.loads(body[1:])))
    except (KeyError, ValueError, TypeError, struct.error, RecursionError) as error:
        raise WireError(
            f"{len(body)} bytes on a pipe are no frame (first byte {letter!r})",
            hint="supervisor and shards must be of one version; restart the harvester",
        ) from error
    return frame


class Splitter:
    """Cuts a stream of bytes back into frames; keeps what is incomplete."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._pending = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that is complete now; raises WireError when the stream is no stream of frames."""
        pending = self._pending
        pending += data
        at, end = 0, len(pending)
        try:
            while end - at >= 4:
                (length,) = _LENGTH.unpack_from(pending, at)
                if length > self._max_bytes or length == 0:
                    raise WireError(
                        f"a frame of {length} bytes was announced on a pipe",
                        hint="supervisor and shards must be of one version; restart the harvester",
                    )
                if end - at - 4 < length:
                    break
                body = bytes(pending[at + 4 : at + 4 + length])
                at += 4 + length
                yield decode(body)
        finally:
            del pending[:at]
