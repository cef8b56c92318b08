"""What the audit's figures mean, and what follows from the keys, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harvester.pipeline.audit.report import HotKey
from harvester.pipeline.audit.schemas import Kind
from harvester.pipeline.audit.skew import Skew

MEANINGS = {
    Kind.LOST: "The archive has them as acknowledged by Kafka and purged, and none of the topics has them.",
    Kind.REPEAT: "The same id was delivered again, with no later record of its key in between. At least once allows"
    " that after a crash; exactly once never does.",
    Kind.LATE_REPEAT: "The same id was delivered again after a later record of its key: a reader is set back.",
    Kind.SWAPPED: "First deliveries of a key with descending ids. Where writers of a key wait for each other, as they"
    " should, that is a broken order; where they do not, neither order is right.",
    Kind.GAP: "A lane numbers what it sends. These numbers were given out, and their records are not in the topics.",
    Kind.CLASH: "Two ids under one number of a lane: a reader of committed records must never see that.",
    Kind.UNEXPECTED: "Delivered, but in neither outbox, quarantine nor archive: published though rolled back, purged"
    " while the archive was off, or past the archive's retention.",
    Kind.SCATTERED: "Between partitions there is no order. It comes from adding or choosing partitions.",
}

HOLES = {
    "numbers_given_up": "given up: the quarantine, or a notice, names the record",
    "numbers_handed_over": "left to a successor: a later producer or term sent what was left",
    "numbers_open": "under way or lost: nothing explains them",
    "numbers_recent": "newer than the look at the outbox: probably under way",
    "numbers_edge": "at the edge of what was read: not judged",
}


def advice(skew: Skew, hot: Sequence[HotKey]) -> str:
    """How many shards the keys are worth, and which keys stand in the way."""
    said = f"{skew.records:,} records of {skew.keys:,} keys"
    said += f", {skew.keyless:,} without one. " if skew.keyless else ". "
    if not hot:
        return said + "Without keys any number of shards is loaded evenly."
    said += (
        f"The hottest key, {hot[0].key!r}, has {skew.hottest:.1%}: no number of shards carries more than"
        f" {skew.most:.1f} times what one does. "
    )
    carried = {load.shards: load.carried for load in skew.loads}
    said += (
        f"Advised: {skew.advised} shards, which carry {carried[skew.advised]:.1f} times one;"
        f" up to {max(carried)} carry {max(carried.values()):.1f} times. "
    )
    dominating = [one.key for one in hot if one.share >= 0.1]
    if dominating:
        said += f"Keys that dominate: {', '.join(repr(key) for key in dominating)}."
    else:
        said += "No key dominates."
    return said
