"""Frames: the messages between supervisor and shards, and their bytes on the pipe. Pure.

The *epoch* counts remarks (including take-overs, drains and stops). Both directions of a pipe preserve order, so a
shard that has read `Remark(n)` sees nothing of an epoch below n, and a supervisor that has read `Remarked(n)` receives
nothing about one, except acknowledgements of what was on the wire.

*Bytes.* A frame is a 4-byte big-endian length followed by that many bytes: one letter for the kind, then the body. The
two kinds sent per record, `Dispatch` and `Settled`, are packed binary; all rare kinds are JSON. Rows in a `Dispatch`
are the unchanged tuples of `COPY … (FORMAT BINARY)`: the shard decodes them.

*Types.* A dataclass accepts any value for any field, and a wrong one would only surface far from the pipe. So arriving
values are checked against the annotations: an unknown, missing or mistyped field raises ValueError.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from harvester.errors import WireError

# -- supervisor → shard


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows to publish, in id order. `low_water`: every id below it is settled, and none can appear there (P25)."""

    epoch: int
    rows: bytes
    low_water: int | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """Drop what is queued, reply with what is still on the wire, continue under this term.

    `term` and `holder` fence the shard's quarantine statements; if both are None, nobody leads and nothing may be
    produced. `server` is the database server on which the term was taken; None: unknown, or not to be compared.
    `incarnation` is the outbox's; `lanes` is how many must be fenced, by `shards` shards (exactly-once mode).
    """

    epoch: int
    term: int | None
    holder: str | None
    server: str | None = None
    incarnation: str | None = None
    lanes: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class ParkAcknowledged:
    """The supervisor has recorded this record as parked; no older frame of its key can follow (P5)."""

    epoch: int
    record_id: int


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials for new connections; open connections are kept. All fields are secret.

    `user` and `password` are Kafka's (SASL); an empty user leaves Kafka's credentials unchanged.
    """

    dsn: str = field(repr=False)
    user: str = field(repr=False)
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stop:
    """Produce nothing more, finish what is on the wire, purge, exit."""

    within_s: float


# -- shard → supervisor


@dataclass(frozen=True, slots=True)
class Ready:
    """Connected to the database; the producer exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The purge (or quarantine) of these ids has committed (P1, P2)."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Remarked:
    """Queues are empty; exactly these ids are on the wire or unpurged.

    `in_doubt`: something that was given up had been sent and may still arrive, or exactly once be committed already.
    """

    epoch: int
    ids: Sequence[int]
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Parked:
    """`record_id` is to be tried again after `wait_s`; it and `given_back` were dropped here.

    `held`: the policy is to retry it forever.
    """

    epoch: int
    record_id: int
    given_back: Sequence[int]
    error: str
    wait_s: float
    attempts: int
    held: bool


@dataclass(frozen=True, slots=True)
class InDoubt:
    """This record failed, and what was sent of it may still arrive (P36). A later frame says what happens to it."""

    record_id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Dropped on arrival, because a record of their key was parked in the meantime."""

    epoch: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Of any epoch: these were not sent, because trust or a leader was missing; forget them.

    `in_doubt`: something of them had been sent before and may still arrive.
    """

    ids: Sequence[int]
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class FateUnknown:
    """It is unknown whether these were published; they must be marked again."""

    epoch: int
    ids: Sequence[int]
    reason: str


@dataclass(frozen=True, slots=True)
class QueueTimedOut:
    """This record was queued for longer than queue_timeout without any progress of its key."""

    epoch: int
    record_id: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """This record was quarantined (its `Settled` is sent as well)."""

    record_id: int
    error: str


@dataclass(frozen=True, slots=True)
class Poisoned:
    """This record used up its attempts, and the policy is to stop."""

    record_id: int
    error: str


@dataclass(frozen=True, slots=True)
class ShardSession:
    """The shard's database session; `started` is pg_stat_activity.backend_start as printed (P7)."""

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class ShardServerChanged:
    """The shard's database server is not the previous one (P9); it purges nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class IdsGivenAgain:
    """Another record has the id of a published one (P50); the shard purges nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """At most once a second: gauges, counters since start, latency buckets since the last frame."""

    queued: int
    in_flight: int
    parked: int
    delivered: int
    retries: int
    errors: int
    quarantined: int
    latency: str = ""  # harvester.telemetry.latency.Histogram.pack() in hex
    stored: int = 0  # values that were stored


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the log. `level` as in the module logging."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """What this shard is waiting for, in words; None when that is over."""

    text: str | None


Frame = (
    Dispatch
    | Remark
    | ParkAcknowledged
    | Login
    | Stop
    | Ready
    | Settled
    | Remarked
    | Parked
    | InDoubt
    | Refused
    | Dropped
    | FateUnknown
    | QueueTimedOut
    | Quarantined
    | Poisoned
    | ShardSession
    | ShardServerChanged
    | IdsGivenAgain
    | Stats
    | Log
    | Trouble
)


_Check = Callable[[object], bool]


def checked(kind: Any, values: object) -> dict[str, Any]:
    """The arguments for the dataclass `kind`, from parsed JSON."""
    if type(values) is not dict:
        raise ValueError("not an object")
    checks, required = _rules(kind)
    if not values.keys() <= checks.keys() or not required <= values.keys():
        raise ValueError("unknown or missing fields")
    wrong = [name for name, value in values.items() if not checks[name](value)]
    if wrong:
        raise ValueError(f"wrong types: {', '.join(wrong)}")
    return {name: _printable(value) if isinstance(value, str) else value for name, value in values.items()}


def _printable(text: str) -> str:
    """Replaces lone surrogates, which pass JSON and break printing and storing."""
    return text.encode("utf-8", "replace").decode()


@cache
def _rules(kind: Any) -> tuple[Mapping[str, _Check], frozenset[str]]:
    """(check by field, the fields without a default)."""
    hints = get_type_hints(kind)
    checks = {field.name: _CHECKS[hints[field.name]] for field in fields(kind)}
    return checks, frozenset(field.name for field in fields(kind) if field.default is MISSING)


def _is_integer(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_number(value: object) -> bool:
    return _is_integer(value) or (type(value) is float and not math.isnan(value))


def _are_integers(value: object) -> bool:
    return type(value) is list and all(map(_is_integer, value))


def _is_text(value: object) -> bool:
    return type(value) is str


_CHECKS: dict[Any, _Check] = {
    int: _is_integer,
    float: _is_number,
    bool: lambda value: type(value) is bool,
    str: _is_text,
    Sequence[int]: _are_integers,
    int | None: lambda value: value is None or _is_integer(value),
    str | None: lambda value: value is None or _is_text(value),
}


_LENGTH = struct.Struct(">I")
_DISPATCH = struct.Struct(">cIq")
_NO_LOW_WATER = -(2**63)
MAX_FRAME_BYTES = (1 << 30) + (1 << 10)  # the largest row that the server can send, and its frame's head
_MANY_BYTES = 1 << 26
MAX_ANSWER_BYTES = 1 << 26  # from a shard: ids, numbers and texts only

_RARE: dict[bytes, type[Any]] = {
    b"m": Remark,
    b"c": ParkAcknowledged,
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
    b"e": ShardSession,
    b"v": ShardServerChanged,
    b"a": IdsGivenAgain,
    b"s": Stats,
    b"l": Log,
    b"w": Trouble,
}
_LETTER = {kind: letter for letter, kind in _RARE.items()}


def in_pieces(rows: Sequence[bytes]) -> Iterator[bytes]:
    """These rows in their order, in pieces for one `Dispatch` each: a single row, or no more than 64 MiB."""
    if sum(map(len, rows)) <= _MANY_BYTES:
        yield b"".join(rows)
        return
    piece: list[bytes] = []
    size = 0
    for row in rows:
        if size + len(row) > _MANY_BYTES and piece:
            yield b"".join(piece)
            piece, size = [], 0
        piece.append(row)
        size += len(row)
    yield b"".join(piece)


def encode(frame: Frame) -> bytes:
    """The frame with its length prefix, ready for a pipe."""
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
    """A frame from its bytes without the length; raises WireError if they are not a frame."""
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
            f"{len(body)} bytes on a pipe are not a frame (first byte {letter!r})",
            hint="supervisor and shards must run the same version; restart the harvester",
        ) from error
    return frame


class Splitter:
    """Splits a byte stream into frames; keeps an incomplete one."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._pending = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that is complete now; raises WireError if the stream does not consist of frames."""
        pending = self._pending
        pending += data
        at, end = 0, len(pending)
        try:
            while end - at >= 4:
                (length,) = _LENGTH.unpack_from(pending, at)
                if length > self._max_bytes or length == 0:
                    raise WireError(
                        f"a frame of {length} bytes was announced on a pipe",
                        hint="supervisor and shards must run the same version; restart the harvester",
                    )
                if end - at - 4 < length:
                    break
                body = bytes(pending[at + 4 : at + 4 + length])
                at += 4 + length
                yield decode(body)
        finally:
            del pending[:at]
