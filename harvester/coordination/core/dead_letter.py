"""A record that no handler took, as it stands in a dead-letter topic. Pure.

Value and headers are the record's own. One more header, the last of its name, says in JSON where the record comes from
and why it is there. The key is the record's place and not its own key: so the topic can be compacted, holds each record
once however often it was given up, and loses those that are settled, for which a record without a value stands.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harvester.origin import HEADER as ORIGIN

HEADER = "harvester-dead-letter"
FORMER_ORIGIN = "harvester-origin"
_LONGEST_ERROR = 2000
Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """`timestamp_ms`: the record's own; `failed_at_ms`: of the last try; both since the UNIX epoch."""

    group: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    error: str
    attempts: int
    client: str
    timestamp_ms: int | None
    failed_at_ms: int

    @property
    def place(self) -> str:
        """What a person calls it by."""
        return f"{self.topic}/{self.partition}/{self.offset}"

    def encode(self) -> tuple[bytes, bytes, Headers]:
        """Key, value and headers in the dead-letter topic."""
        about = {name: value for name, value in asdict(self).items() if name not in ("key", "value", "headers")}
        about["key_base64"] = None if self.key is None else base64.b64encode(self.key).decode()
        about["tombstone"] = self.value is None
        own: Headers = [*self.headers, (HEADER, json.dumps(about).encode())]
        return f"{self.group}/{self.place}".encode(), self.value or b"", own

    def redriven(self) -> Headers:
        """Its headers when it goes back to its topic.

        What an inbox knows a record by is put aside: the id may count as seen since the record was given up, and then
        nobody would process it.
        """
        return [(FORMER_ORIGIN if name == ORIGIN else name, value) for name, value in self.headers]


def dead_letter(
    record: Any, *, group: str, client: str, error: BaseException, attempts: int, now_ms: int
) -> DeadLetter:
    """Of a consumed message."""
    kind, timestamp_ms = record.timestamp()
    text = f"{type(error).__name__}: {error}"
    return DeadLetter(
        group=group, topic=record.topic(), partition=record.partition(), offset=record.offset(),
        key=_bytes(record.key()), value=_bytes(record.value()), headers=list(record.headers() or ()),
        error=text[:_LONGEST_ERROR], attempts=attempts, client=client,
        timestamp_ms=timestamp_ms if kind else None, failed_at_ms=now_ms,
    )  # fmt: skip


def decode(value: bytes | None, headers: Sequence[tuple[str, bytes | None]] | None) -> DeadLetter | None:
    """What stands in a dead-letter topic; None for a record that is settled, and for one of somebody else."""
    given = list(headers or ())
    at = max((number for number, (name, _) in enumerate(given) if name == HEADER), default=None)
    if value is None or at is None:
        return None
    try:
        about = json.loads(given.pop(at)[1] or b"")
        key = about.pop("key_base64")
        tombstone = about.pop("tombstone")
        return DeadLetter(
            **about,
            key=None if key is None else base64.b64decode(key, validate=True),
            value=None if tombstone else value,
            headers=given,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
