"""A Status as JSON and back: names as in `harvester.status`, times ISO 8601, ids and states as text.

Members that this version does not know are ignored; those that an older one did not send have their default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from harvester.control.errors import NotUnderstood
from harvester.status import Status


def to_json(status: Status) -> dict[str, Any]:
    """Plain values."""
    values: dict[str, Any] = _adapter().dump_python(status, mode="json")
    return values


def from_json(values: Mapping[str, Any]) -> Status:
    """The snapshot, equal to the one that was sent; raises NotUnderstood."""
    from pydantic import ValidationError

    try:
        status: Status = _adapter().validate_python(dict(values))
    except ValidationError as error:
        raise NotUnderstood(
            f"a status that is none: {error.error_count()} of its members are missing or wrong",
            hint="use the same version of the harvester for both",
        ) from None
    return status


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Status)
