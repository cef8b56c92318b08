"""What the relay knows of one key. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from harvester.relay.machine import Phase, Relay

_LEADING = (Phase.LEADING, Phase.REMARKING, Phase.SCALING)


@dataclass(frozen=True, slots=True)
class KeyUnderWay:
    """As in `harvester.status.KeyStatus`."""

    leads: bool
    shard: int
    under_way: int
    waiting: int
    retry_in_s: float | None
    held: bool


def look_up(relay: Relay, key: bytes, now: float) -> KeyUnderWay:
    """Where this key stands at `now`, the time of the machine's clock. Only on the thread of the relay."""
    lane = relay.intake.waiting.lanes.get(key)
    return KeyUnderWay(
        leads=relay.phase in _LEADING,
        shard=relay.intake.shard_of(key),
        under_way=relay.ledger.count_of(key),
        waiting=len(lane) + lane.fetching if lane is not None else 0,
        retry_in_s=max(0.0, lane.not_before - now) if lane is not None and lane.parked else None,
        held=lane is not None and lane.held,
    )
