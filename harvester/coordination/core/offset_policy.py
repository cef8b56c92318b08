"""Decides at which offset a held partition is consumed, and where an administrator may set it. Pure.

Offsets are never rewound, unless an administrator sets a position. A claim begins behind what the log is certain of.
Kafka's group offset counts where the log knows nothing (a group that did not coordinate before, a new coordination
topic), or is not certain, since retention has removed its beginning: then the further one of both counts. Without
either it begins with the first record that there is.

The group offset must not count beside a position that the log is certain of: a holder that was frozen may write its
own at any time after an administrator has set the position back.

*Out of range.* Retention may have removed the record that comes next. Then `Policy` says what is done, and it is
never done silently. A position beyond the end is an error under any policy: the topic was made anew, or lost records
that had been acknowledged, and to begin again below it would be to rewind.

Which offset each partition is to go on with, from what an administrator says.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from harvester.coordination.core.overview import Bounds
from harvester.coordination.errors import CoordinationError

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


def positions(bounds: Bounds, topic: str, partitions: Collection[int], offset: str) -> dict[tuple[str, int], int]:
    """`offset`: a number, `earliest` or `latest`; without partitions all of the topic.

    Raises CoordinationError for what is not there.
    """
    known = {partition: found for (name, partition), found in bounds.items() if name == topic}
    if not known:
        raise CoordinationError(f"there is no topic {topic!r}")
    chosen: dict[tuple[str, int], int] = {}
    for partition in sorted(set(partitions) or known):
        if partition not in known:
            raise CoordinationError(f"topic {topic!r} has no partition {partition}: {len(known)} from 0 on")
        first, end = known[partition]
        chosen[topic, partition] = _offset(f"{topic}[{partition}]", first, end, offset)
    return chosen


def _offset(where: str, first: int, end: int, offset: str) -> int:
    if offset == "earliest":
        return first
    if offset == "latest":
        return end
    if not offset.isdecimal():
        raise CoordinationError(f"{offset!r} is no offset", hint="a number, earliest or latest")
    if not first <= int(offset) <= end:
        raise CoordinationError(
            f"{where} holds offsets {first:,} to {end:,}, not {int(offset):,}",
            hint="earliest and latest fit every partition",
        )
    return int(offset)
