"""A Status as JSON and back: names as in `harvester.status`, times ISO 8601, ids and states as text.

Members that this version does not know are ignored; those that an older one did not send have their default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from harvester.control.errors import NotUnderstood
from harvester.status import KeyStatus, Status


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
