"""When a lane counts as opened, and what is told while it cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from harvester.delivery.lane import TransactionOutcome
from harvester.delivery.opening import Leadership, Opener, Superseded
from harvester.delivery.progress_topic import ProgressTopic, check_recorded


class Unwanted:
    """A host that gives up while it waits for another attempt, and what it was told."""

    def __init__(self) -> None:
        self.told: list[str | None] = []
        self.over = False

    def term_row(self) -> tuple[int, str]:
        return 1, "h"

    def is_over(self) -> bool:
        return self.over

    def pause(self, _: float) -> None:
        self.over = True

    def trouble(self, text: str | None) -> None:
        self.told.append(text)


def test_a_lane_that_nobody_wants_any_more_is_no_trouble_any_more() -> None:
    """Who opens it next may succeed at once, and would have nothing to withdraw."""
    host: Any = Unwanted()
    lane = SimpleNamespace(number=0, error="timed out", init=lambda: TransactionOutcome.UNCLEAR, close=lambda: None)
    lanes: Any = SimpleNamespace(open=lambda _: lane, explain=lambda _: lane.error)
    with pytest.raises(Superseded):
        Opener(lanes, host).open(0, Leadership(1, "h", uuid4()), lambda _: None)
    assert host.told == ["lane 0 cannot be opened: timed out", None]


def test_that_nothing_was_committed_is_believed_of_the_recorded_topic_only() -> None:
    """P22. It is recreated just before it is read."""
    host: Any = Unwanted()
    host.progress_topic, host.fenced = lambda: "recorded", lambda _: None
    lane = SimpleNamespace(number=0, init=lambda: TransactionOutcome.DONE, close=lambda: None)
    answers = iter([ProgressTopic("t", "recorded", 2), ProgressTopic("t", "another", 2)])
    lanes: Any = SimpleNamespace(
        open=lambda _: lane, progress=lambda *_: None, room=lambda: 100,
        check_topic=lambda recorded: check_recorded(next(answers), recorded),
    )  # fmt: skip
    published: list[list[int]] = []
    with pytest.raises(Superseded):
        Opener(lanes, host).open(0, Leadership(1, "h", uuid4()), published.append)
    assert published == []
    assert "recorded, is a different one (another)" in host.told[0]
