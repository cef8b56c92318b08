"""At which offset a held place is consumed. Pure.

Offsets are never rewound, unless an administrator sets a position: a claim begins behind what the log knows and behind
what Kafka's group offset says, whichever is further; without either, with the first record that there is.

*Out of range.* Retention may have removed the record that comes next. Then `Policy` says what is done, and it is never
done silently. A position beyond the end is an error under any policy: the topic was made anew, or lost records that
had been acknowledged, and to begin again below it would be to rewind.
"""

from __future__ import annotations

from typing import Literal

Policy = Literal["earliest", "latest", "error"]


def start(committed: int | None, last_offset: int | None) -> int | None:
    """Where to begin; None for the first record that there is."""
    known = [offset for offset in (committed, None if last_offset is None else last_offset + 1) if offset is not None]
    return max(known, default=None)


def resume(offset: int, first: int, end: int, policy: Policy) -> int | None:
    """Where to go on instead of at `offset`; None is an error."""
    if first <= offset <= end:
        return offset  # it is there after all
    if offset > end or policy == "error":
        return None
    return first if policy == "earliest" else end
