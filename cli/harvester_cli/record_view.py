"""A record as a line of JSON. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from harvester_cli.dead import bytes_json

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {1: "created", 2: "appended"}  # of a timestamp, as Kafka counts them


def line_of(record: Any) -> bytes:
    """The keys are a public interface. Bytes that are no UTF-8 stand in `…_base64`, and the text is null."""
    kind, at_ms = record.timestamp()
    shown = {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": (_EPOCH + timedelta(milliseconds=at_ms)).isoformat() if kind in _KINDS else None,
        "timestamp_kind": _KINDS.get(kind),
        **bytes_json("key", record.key()),
        **bytes_json("value", record.value()),
        "headers": [{"key": name, **bytes_json("value", value)} for name, value in record.headers() or ()],
    }
    return json.dumps(shown).encode()
