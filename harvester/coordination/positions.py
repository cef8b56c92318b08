"""Which offset each partition is to go on with, from what an administrator says. Pure."""

from __future__ import annotations

from collections.abc import Collection

from harvester.coordination.errors import CoordinationError
from harvester.coordination.overview import Bounds


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
