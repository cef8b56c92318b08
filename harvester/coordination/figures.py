"""What a coordinated consumer has done so far, and has in hand. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Open:
    """Records that were handed out from the first one on that is not committed, at `offset`, `age_s` ago."""

    records: int
    offset: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the consumer began. They only grow, so a rate is the difference of two.

    `batches`: at most once, those that became ours. `claims_won` and `claims_missed`: ClaimingPartition messages by
    their outcome; one that asks for a share is missed on purpose. `releases`: claims given up in good order; `losses`:
    the others. `written`: messages for the coordination topic by kind; `written_bytes`: their values; `unwritten`: how
    many did not arrive, or may not have.
    """

    records: int
    batches: int
    claims_won: int
    claims_missed: int
    releases: int
    losses: int
    written: Mapping[str, int]
    written_bytes: int
    unwritten: int
