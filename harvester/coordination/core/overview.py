"""Shows people and scripts who holds what, and reads the positions that an administrator names. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from harvester.coordination.core.messages import Client, GroupPartition
from harvester.coordination.core.world import NO_GENERATION, SET_TO_START, Claim, Freshness, World
from harvester.coordination.errors import CoordinationError

Bounds = Mapping[tuple[str, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """One place. `age_s`: since the holder's last accepted message; `lag`: records behind the last processed one.

    `certain`: a reader from offset 0 would say the same; else the log begins too late, and two intervals settle it.
    """

    place: GroupPartition
    holder: Client | None
    freshness: Freshness
    generation: int | None
    last_offset: int | None
    age_s: float | None
    lag: int | None
    certain: bool


def rows(worlds: Iterable[World], bounds: Bounds, now_ms: int, group: str | None = None) -> list[PartitionRow]:
    """Of one group, or of all, in order of names.

    `bounds` are the first offset and the end of each partition; those that were never claimed get a row as well.
    `now_ms` is the time here. What is fresh is decided by the log, and the log stands still when nobody writes any
    more; so a claim is shown as one that is appended now would find it.
    """
    found: dict[GroupPartition, tuple[World, Claim]] = {}
    for world in worlds:
        for place, claim in world.claims.items():
            if group is None or place.group == group:
                found[place] = (world, claim)
    consumed = {(place.group, place.topic) for place in found}
    never = {
        GroupPartition(name, topic, partition)
        for name, known in consumed
        for topic, partition in bounds
        if topic == known and GroupPartition(name, topic, partition) not in found
    }
    shown = [_row(place, world, claim, bounds, now_ms) for place, (world, claim) in found.items()]
    shown += [
        PartitionRow(place, None, Freshness.FREE, None, None, None, _lag(bounds, place, None), certain=True)
        for place in never
    ]
    return sorted(shown, key=lambda row: row.place)


def _row(place: GroupPartition, world: World, claim: Claim, bounds: Bounds, now_ms: int) -> PartitionRow:
    log_ms = max(world.now_ms, now_ms)
    held = claim.holder is not None
    return PartitionRow(
        place,
        claim.holder,
        claim.freshness(log_ms, world.timing),
        claim.generation if claim.generation != NO_GENERATION else None,
        None if claim.last_offset == SET_TO_START else claim.last_offset,
        (log_ms - claim.beat_ms) / 1000 if held else None,
        _lag(bounds, place, claim.last_offset),
        certain=claim.exact,
    )


def _lag(bounds: Bounds, place: GroupPartition, last_offset: int | None) -> int | None:
    found = bounds.get((place.topic, place.partition))
    if found is None:
        return None  # the topic is gone
    first, end = found
    return max(0, end - max(first, 0 if last_offset is None else last_offset + 1))


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
