"""The protocol of a control socket: HTTP, JSON in both directions. Pure.

    POST /v2/scale {"shards": 4, "within_s": 10}
    ← 200 {"name": "billing-1", "changed": true, …}
    ← 409 {"error": "what happened", "hint": "what to do, or null"}

`COMMANDS` lists the paths; `GET /v2/status` also works. `watch` is answered by one line of JSON per snapshot until
either side closes the connection. Readers ignore unknown members, so that a newer side may add some; changes that an
older side would misunderstand get another version in the path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harvester.errors import ExitCode, HarvesterError
from harvester.status import KeyStatus, Status, adapter

S = TypeVar("S", Status, KeyStatus)


class ControlError(HarvesterError):
    """The base of errors in controlling a harvester; used by itself when the harvester refuses."""


class NotUnderstood(ControlError):
    """A request or an answer cannot be parsed, or has another version."""


class NoHarvester(ControlError):
    """No harvester is running that could be asked, or it does not answer."""

    exit_code = ExitCode.UNAVAILABLE


class SeveralHarvesters(ControlError):
    """Several harvesters are running, and none was named."""

    exit_code = ExitCode.USAGE


class NoPlace(ControlError):
    """There is no safe place for the socket, or another process uses it."""


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The last status of a harvester, or in `trouble` why there is none; since `at` (monotonic)."""

    path: Path
    status: Status | None = None
    trouble: str | None = None
    at: float = 0.0


PREFIX = "/v2/"
MAX_ANSWER_BYTES = 1 << 22  # a snapshot of 256 shards has a hundredth of this
SAME_VERSION = "use the same version of the harvester for both"

# The commands, and each one's required arguments.
COMMANDS: Mapping[str, Mapping[str, type]] = {
    "status": {},
    "watch": {"every_s": float},
    "key": {"key": str},
    "pause": {},
    "resume": {},
    "remark": {},
    "stop": {},
    "scale": {"shards": int, "within_s": float},
    "loglevel": {"level": str},
}


def arguments_of(command: str, body: bytes) -> dict[str, Any]:
    """A command's arguments from a request's body; raises NotUnderstood. Unknown ones are dropped."""
    wanted = COMMANDS[command]
    given = object_of(body) if body.strip() else {}
    missing = [name for name, kind in wanted.items() if not _fits(given.get(name), kind)]
    if missing:
        raise NotUnderstood(f"{command} lacks a usable {' and a usable '.join(missing)}")
    return {name: kind(given[name]) for name, kind in wanted.items()}


def object_of(text: bytes) -> dict[str, Any]:
    """A JSON object; raises NotUnderstood."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood("the message is not JSON") from error
    if not isinstance(values, dict):
        raise NotUnderstood("the message is not a JSON object")
    return values


def from_json(kind: type[S], values: Mapping[str, Any]) -> S:
    """The reverse of `harvester.status.to_json`; raises NotUnderstood. Members with a default may be missing."""
    from pydantic import ValidationError

    plain: type = kind
    try:
        status: S = adapter(plain).validate_python(dict(values))
    except ValidationError as error:
        text = f"{error.error_count()} members of the status are missing or wrong"
        raise NotUnderstood(text, hint=SAME_VERSION) from None
    return status


def _fits(value: object, kind: type) -> bool:
    if kind is float and type(value) is int:
        return abs(value) < 1 << 53  # larger ones may have no exact float
    return type(value) is kind and (kind is not float or math.isfinite(value))  # type: ignore[arg-type]
