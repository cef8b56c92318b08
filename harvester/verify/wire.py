"""The form of a pumped record: key `k-000123`, value `<number>:<microseconds>:<kind>:` padded with `.`.

The number counts the key's records from 1. The microseconds are the server's clock since the UNIX epoch, read when
the row was inserted, after the key's lock was held. The kind tells how the transaction was going to end, so that a
published row of a rolled-back transaction convicts itself although its number is used again later.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_VALUE_BYTES = 40  # 18 digits of number, 16 of time, one of kind, three colons
PREFIX_BYTES = 48  # enough of a value to parse it

COMMITTED = "c"
LATE = "l"  # its transaction stayed open after the insert: not fit for latencies
ROLLED_BACK = "r"
_KINDS = {b"c": COMMITTED, b"l": LATE, b"r": ROLLED_BACK}


class Pumped(NamedTuple):
    """The parsed head of a value."""

    seq: int
    created_us: int
    kind: str


def key_name(index: int) -> str:
    """The key with this index, from 0."""
    return f"k-{index:06d}"


def parse(value: bytes | None) -> Pumped | None:
    """Read a value or any prefix of it of PREFIX_BYTES; None when it is not one of ours."""
    if value is None:
        return None
    parts = value[:PREFIX_BYTES].split(b":", 3)
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    kind = _KINDS.get(parts[2])
    return Pumped(int(parts[0]), int(parts[1]), kind) if kind else None
