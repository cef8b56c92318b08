"""Dead letters as JSON and as text. Pure: records in, plain values or renderables out."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from rich.table import Table

    from harvester.outbox.dead import DeadRecord
    from harvester.outbox.redrive import Planned, Redriven

_LONGEST_CELL = 60


def as_json(record: DeadRecord, *, value: bool = False) -> dict[str, Any]:
    """The keys are a public interface. Bytes that are no UTF-8 stand in `…_base64`, and the text is null."""
    shown: dict[str, Any] = {
        "id": record.id,
        "incarnation": str(record.incarnation),
        "topic": record.topic,
        **bytes_json("key", record.key),
        "partition": record.partition,
        "error": record.error,
        "attempts": record.attempts,
        "create_time": _time(record.create_time),
        "first_failed_at": _time(record.first_failed_at),
        "quarantined_at": _time(record.quarantined_at),
        "value_bytes": record.value_bytes,
    }
    if value:
        shown |= bytes_json("value", record.value)
        shown |= {"header_keys": record.header_keys, "header_values": record.header_values}
    return shown


def planned_json(entry: Planned) -> dict[str, Any]:
    """A record and its obstacle: `reason` is one of waiting, earlier, published, unknown."""
    found = entry.obstacle
    return {
        **as_json(entry.record),
        "obstacle": None
        if found is None
        else {"reason": found.reason.value, "other_id": found.other_id, "text": str(found)},
    }


def redriven_json(entry: Redriven) -> dict[str, Any]:
    """A record under its old id, and the new one."""
    return {**as_json(entry.record), "new_id": entry.new_id}


def table_of(records: Sequence[DeadRecord]) -> Table:
    """One line a record."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("id", "topic", "key", "quarantined at", "attempts", "error"):
        table.add_column(name, overflow="fold", justify="right" if name in ("id", "attempts") else "left")
    for record in records:
        # Text, not markup: keys and errors may contain brackets.
        cells = (
            str(record.id), one_line(record.topic), key_text(record.key),
            f"{record.quarantined_at:%Y-%m-%d %H:%M:%S}", str(record.attempts), one_line(record.error),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def page_of(record: DeadRecord) -> Table:
    """Everything about one record; name and value."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    headers = "none"
    if record.header_keys or record.header_values:
        headers = f"keys {record.header_keys}, values {record.header_values}"
    for name, shown in (
        ("id", f"{record.id}, incarnation {record.incarnation}"),
        ("topic", record.topic or ""),
        ("partition", "any" if record.partition is None else str(record.partition)),
        ("key", key_text(record.key)),
        ("error", record.error),
        ("attempts", str(record.attempts)),
        ("created", _time(record.create_time) or "unknown"),
        ("first failed", _time(record.first_failed_at) or "unknown"),
        ("quarantined", _time(record.quarantined_at) or "unknown"),
        ("headers", headers),
        ("value", f"{record.value_bytes:,} bytes" if record.value_bytes is not None else "none (a tombstone)"),
    ):
        grid.add_row(name, Text(shown))
    if record.value is not None:
        grid.add_row("", Text(_text(record.value)))
    return grid


def line_of(record: DeadRecord) -> str:
    """A record in a sentence."""
    key = "no key" if record.key is None else f"key {key_text(record.key)}"
    return f"record {record.id} of {one_line(record.topic)}, {key}"


def key_text(key: bytes | None) -> str:
    """For people: text, or the bytes in hexadecimal, or nothing."""
    return "" if key is None else one_line(_text(key))


def one_line(text: str | None) -> str:
    """On one line, printable, shortened: errors and keys can hold anything."""
    flat = "".join(c if c.isprintable() else " " for c in " ".join((text or "").split()))
    return flat if len(flat) <= _LONGEST_CELL else f"{flat[: _LONGEST_CELL - 1]}…"


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def bytes_json(name: str, value: bytes | None) -> dict[str, str | None]:
    """As text, or what is no UTF-8 in base64, under another name."""
    if value is None:
        return {name: None, f"{name}_base64": None}
    try:
        return {name: value.decode(), f"{name}_base64": None}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(value).decode()}


def _time(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None
