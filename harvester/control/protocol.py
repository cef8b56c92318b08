"""The protocol of a control socket: requests, answers, a status as JSON, and what can go wrong. Pure.

One JSON object a line, UTF-8, in both directions; a connection carries any number of requests, one after the other.

    → {"v": 1, "command": "scale", "arguments": {"shards": 4, "within_s": 10}}
    ← {"v": 1, "ok": true, "result": {"shards": 4}}
    ← {"v": 1, "ok": false, "error": "what happened", "hint": "what to do, or null"}

Whoever reads ignores members that it does not know, so that a newer one may add some; anything else that an older one
would misunderstand raises the version.

What can go wrong between a harvester and whoever controls it.

A Status as JSON and back: names as in `harvester.status`, times ISO 8601, ids and states as text. Members that this
version does not know are ignored; those that an older one did not send have their default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from harvester.errors import ExitCode, HarvesterError
from harvester.status import KeyStatus, Status


class ControlError(HarvesterError):
    """Base of all of them; by itself: the harvester answered, and the answer is no."""


class NotUnderstood(ControlError):
    """Bytes on a control socket that are no request or no answer, or of another version."""


class NoHarvester(ControlError):
    """No harvester that could be asked runs, or it does not answer."""

    exit_code = ExitCode.UNAVAILABLE


class SeveralHarvesters(ControlError):
    """More than one runs, and it was not said which is meant."""

    exit_code = ExitCode.USAGE


class NoPlace(ControlError):
    """There is no safe place for the socket, or somebody else has it."""


VERSION = 1
MAX_REQUEST_BYTES = 1 << 14
MAX_ANSWER_BYTES = 1 << 22  # a snapshot of 256 shards has a hundredth of that

# The commands, and the arguments that each needs.
COMMANDS: Mapping[str, Mapping[str, type]] = {
    "status": {},
    "key": {"key": str},
    "pause": {},
    "resume": {},
    "remark": {},
    "stop": {},
    "scale": {"shards": int, "within_s": float},
    "loglevel": {"level": str},
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a harvester is asked to do; a command of COMMANDS with its arguments."""

    command: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What it says to that: `result`, or `error` and `hint` when it did not do it."""

    result: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    hint: str | None = None


def encode_request(request: Request) -> bytes:
    """One line."""
    return _line({"v": VERSION, "command": request.command, "arguments": dict(request.arguments)})


def encode_answer(answer: Answer) -> bytes:
    """One line."""
    if answer.error is not None:
        return _line({"v": VERSION, "ok": False, "error": answer.error, "hint": answer.hint})
    return _line({"v": VERSION, "ok": True, "result": dict(answer.result)})


def decode_request(line: bytes) -> Request:
    """A request from its line. Raises NotUnderstood, also for a command that this version does not have."""
    said = _object(line)
    command, arguments = said.get("command"), said.get("arguments", {})
    if not isinstance(command, str) or not isinstance(arguments, dict):
        raise NotUnderstood("a request names no command")
    wanted = COMMANDS.get(command)
    if wanted is None:
        known = ", ".join(COMMANDS)
        raise NotUnderstood(f"this harvester has no command {command[:40]!r}", hint=f"it knows {known}")
    missing = [name for name, kind in wanted.items() if not _fits(arguments.get(name), kind)]
    if missing:
        raise NotUnderstood(f"{command} lacks a usable {' and a usable '.join(missing)}")
    return Request(command, {name: kind(arguments[name]) for name, kind in wanted.items()})


def decode_answer(line: bytes) -> Answer:
    """An answer from its line; raises NotUnderstood."""
    said = _object(line)
    ok, result, error, hint = (said.get(name) for name in ("ok", "result", "error", "hint"))
    if ok is True and isinstance(result, dict):
        return Answer(result)
    if ok is False and isinstance(error, str) and (hint is None or isinstance(hint, str)):
        return Answer(error=error, hint=hint)
    raise NotUnderstood("an answer is neither a yes nor a no")


class Lines:
    """Cuts a stream of bytes into lines; keeps what is incomplete."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._pending = max_bytes, bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every line that is complete now; raises NotUnderstood when one is longer than allowed."""
        self._pending += data
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            self._check(len(line))
            yield line
        self._check(len(self._pending))

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise NotUnderstood(f"a line is longer than {self._max_bytes} bytes")


def _fits(value: object, kind: type) -> bool:
    if kind is float and type(value) is int:
        return abs(value) < 1 << 53  # further ones may have no float
    return type(value) is kind and (kind is not float or math.isfinite(value))  # type: ignore[arg-type]


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"  # ASCII: half a surrogate pair is escaped


def _object(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood("a line is no JSON") from error
    if not isinstance(said, dict):
        raise NotUnderstood("a line is no JSON object")
    if said.get("v") != VERSION or said.get("v") is True:
        theirs = str(said.get("v"))[:20]
        raise NotUnderstood(
            f"the other side speaks version {theirs} of the control protocol, this one {VERSION}",
            hint="use the same version of the harvester for both",
        )
    return said


def to_json(status: Status) -> dict[str, Any]:
    """Plain values."""
    return _plain(Status, status)


def from_json(values: Mapping[str, Any]) -> Status:
    """The snapshot, equal to the one that was sent; raises NotUnderstood."""
    status: Status = _read(Status, values)
    return status


def key_to_json(status: KeyStatus) -> dict[str, Any]:
    """Plain values."""
    return _plain(KeyStatus, status)


def key_from_json(values: Mapping[str, Any]) -> KeyStatus:
    """What was sent; raises NotUnderstood."""
    status: KeyStatus = _read(KeyStatus, values)
    return status


def _plain(kind: type, status: object) -> dict[str, Any]:
    values: dict[str, Any] = _adapter(kind).dump_python(status, mode="json")
    return values


def _read(kind: type, values: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(dict(values))
    except ValidationError as error:
        raise NotUnderstood(
            f"a status that is none: {error.error_count()} of its members are missing or wrong",
            hint="use the same version of the harvester for both",
        ) from None


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
