"""Whether a record that was set aside can be published without breaking its key's order. Pure.

A record's *position* in its key is (epoch, id): the epoch ranks incarnations by age, and ids order records within one.
A record that was put back has a new id, but keeps the position of its origin, which a header carries: so it may wait,
or fail again, without blocking its successors.

Order is kept if everything before the record is gone or put back with it, and nothing after it has been published or
would be published first. The database knows what waits and what is in quarantine. It does not know what was published,
since that is purged, unless an archive reaches back to the record's quarantine; anything published earlier precedes the
record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

Position = tuple[int, int]

ORIGIN_HEADER = "harvester-origin"


class Reason(Enum):
    """Why the order would be broken, or is unknown."""

    WAITING = "waiting"
    EARLIER = "earlier"
    PUBLISHED = "published"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyNeighbours:
    """What the database knows about the other records of a key. None: there are none."""

    last_waiting: Position | None = None  # in the outbox
    first_left: Position | None = None  # in quarantine, not chosen
    last_published: Position | None = None  # in the archive, since the record was quarantined
    archive_reaches: bool = False  # back to when the record was quarantined
    is_newest: bool = False  # no higher id was ever given out


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a record cannot go back in order. `other_id` is the id it conflicts with; None if unknown."""

    reason: Reason
    other_id: int | None = None

    def __str__(self) -> str:
        match self.reason:
            case Reason.WAITING:
                return f"a later record of its key (id {self.other_id}) waits in the outbox and would come first"
            case Reason.EARLIER:
                return f"an earlier record of its key (id {self.other_id}) is in quarantine, too, and was not chosen"
            case Reason.PUBLISHED:
                return f"a later record of its key (id {self.other_id}) has been published"
            case Reason.UNKNOWN:
                return "later records of its key may have been published: without an archive this is unknown"


def obstacle(position: Position, others: KeyNeighbours) -> Obstacle | None:
    """What prevents a record at this position from being put back in order; None if nothing does."""
    if others.first_left is not None and others.first_left < position:
        return Obstacle(Reason.EARLIER, others.first_left[1])
    if others.last_published is not None and others.last_published > position:
        return Obstacle(Reason.PUBLISHED, others.last_published[1])
    if others.last_waiting is not None and others.last_waiting > position:
        return Obstacle(Reason.WAITING, others.last_waiting[1])
    if not (others.archive_reaches or others.is_newest):
        return Obstacle(Reason.UNKNOWN)
    return None


def summary(obstacles: Sequence[Obstacle]) -> str:
    """How often each reason occurs, most frequent first: `2 waiting, 1 unknown`."""
    counts = {reason: sum(1 for found in obstacles if found.reason is reason) for reason in Reason}
    ranked = sorted((reason for reason in Reason if counts[reason]), key=lambda reason: -counts[reason])
    return ", ".join(f"{counts[reason]} {reason.value}" for reason in ranked)
