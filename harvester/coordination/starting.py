"""At which offset a held place is consumed. Pure.

Offsets are never rewound, unless an administrator sets a position. A claim begins behind what the log is certain of.
Kafka's group offset counts where the log knows nothing (a group that did not coordinate before, a new coordination
topic), or is not certain, since retention has removed its beginning: then the further one of both counts. Without
either it begins with the first record that there is.

The group offset must not count beside a position that the log is certain of: a holder that was frozen may write its own
at any time after an administrator has set the position back.

*Out of range.* Retention may have removed the record that comes next. Then `Policy` says what is done, and it is never
done silently. A position beyond the end is an error under any policy: the topic was made anew, or lost records that
had been acknowledged, and to begin again below it would be to rewind.
"""

from __future__ import annotations

from typing import Literal

Policy = Literal["earliest", "latest", "error"]


def start(committed: int | None, last_offset: int | None, *, positioned: bool = True) -> int | None:
    """Where to begin; None for the first record that there is."""
    if positioned and last_offset is not None:
        return last_offset + 1
    known = [offset for offset in (committed, None if last_offset is None else last_offset + 1) if offset is not None]
    return max(known, default=None)


def resume(offset: int, first: int, end: int, policy: Policy) -> int | None:
    """Where to go on instead of at `offset`; None is an error."""
    if first <= offset <= end:
        return offset  # it is there after all
    if offset > end or policy == "error":
        return None
    return first if policy == "earliest" else end
