"""Whose a checkpoint is, and what may go on from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harvester.pipeline.errors import CheckpointMismatch
from harvester.pipeline.streaming import Manifest, TopicLog, decide, from_text, logs_from_text, logs_to_text, to_text

STORED = Manifest("first", "lake", ("orders", "payments"), "harvester")


def wanted(topics: tuple[str, ...] = STORED.topics, job: str = "lake", header: str = "harvester") -> Manifest:
    return Manifest("second", job, topics, header)


def test_what_is_stored_is_read_again() -> None:
    assert from_text(to_text(STORED), "there") == STORED
    logs = replace(STORED, logs={"orders": TopicLog("kafka's own", 7), "payments": TopicLog("another", 2, 9)})
    assert from_text(to_text(logs), "there") == logs
    assert logs_from_text(logs_to_text(logs.logs)) == logs.logs
    assert logs_from_text(None) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2}', to_text(STORED)[:-9]])
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(CheckpointMismatch, match="there"):
        from_text(text, "there")


def test_a_new_one_takes_its_own_name_and_a_known_one_keeps_its() -> None:
    assert decide(None, wanted(), "there", used=False).owner == "second"
    assert decide(STORED, wanted(), "there", used=True) == STORED
    grown = decide(STORED, wanted(("refunds", "payments", "orders")), "there", used=True)
    assert (grown.owner, grown.topics) == ("first", ("refunds", "payments", "orders"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (wanted(("orders",)), "without payments"),
        (wanted(("refunds",)), "without orders, payments"),
        (wanted(job="metrics"), "the job lake"),
        (wanted(header="origin"), "'harvester', not 'origin'"),
    ],
)
def test_another_input_is_refused(other: Manifest, said: str) -> None:
    with pytest.raises(CheckpointMismatch, match=said):
        decide(STORED, other, "there", used=True)


def test_a_checkpoint_that_is_not_ours_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="something else"):
        decide(None, wanted(), "there", used=True)
