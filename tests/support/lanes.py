"""Lanes of a leader group; the fixtures that make them are in tests/support/lane_scene.py."""

from __future__ import annotations

from harvester.delivery.lane import Lane, Lanes, TransactionOutcome


def opened(lanes: Lanes, number: int = 0) -> Lane:
    """A lane that has fenced its predecessor."""
    lane = lanes.open(number)
    while (outcome := lane.init()) is TransactionOutcome.AGAIN:
        pass
    assert outcome is TransactionOutcome.DONE, lane.error
    return lane
