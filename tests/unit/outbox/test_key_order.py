"""When a record may go back: each reason by itself."""

from __future__ import annotations

import pytest

from harvester.outbox.key_order import KeyNeighbours, Obstacle, Reason, obstacle, summary


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (KeyNeighbours(), Obstacle(Reason.UNKNOWN)),
        (KeyNeighbours(is_newest=True), None),
        (KeyNeighbours(archive_reaches=True), None),
        (KeyNeighbours(archive_reaches=True, last_waiting=(1, 4)), None),
        (KeyNeighbours(archive_reaches=True, last_waiting=(1, 6)), Obstacle(Reason.WAITING, 6)),
        (KeyNeighbours(archive_reaches=True, first_left=(1, 6)), None),
        (KeyNeighbours(archive_reaches=True, first_left=(1, 4)), Obstacle(Reason.EARLIER, 4)),
        (KeyNeighbours(archive_reaches=True, last_published=(1, 4)), None),
        (KeyNeighbours(archive_reaches=True, last_published=(1, 6)), Obstacle(Reason.PUBLISHED, 6)),
        # ids of another incarnation say nothing by themselves
        (KeyNeighbours(archive_reaches=True, last_waiting=(2, 3)), Obstacle(Reason.WAITING, 3)),
        (KeyNeighbours(archive_reaches=True, first_left=(0, 9)), Obstacle(Reason.EARLIER, 9)),
        (KeyNeighbours(archive_reaches=True, last_published=(0, 9)), None),
        # what is known for certain is told before what is not
        (KeyNeighbours(last_waiting=(1, 6)), Obstacle(Reason.WAITING, 6)),
        (KeyNeighbours(last_published=(1, 6)), Obstacle(Reason.PUBLISHED, 6)),
    ],
)
def test_each_reason(others: KeyNeighbours, expected: Obstacle | None) -> None:
    assert obstacle((1, 5), others) == expected


def test_obstacles_read_as_sentences() -> None:
    for reason in Reason:
        assert "of its key" in str(Obstacle(reason, 7))
    assert "id 7" in str(Obstacle(Reason.WAITING, 7))
    assert "None" not in str(Obstacle(Reason.UNKNOWN))


def test_the_summary_counts() -> None:
    found = [Obstacle(Reason.UNKNOWN), Obstacle(Reason.WAITING, 1), Obstacle(Reason.UNKNOWN)]
    assert summary(found) == "2 unknown, 1 waiting"
    assert summary([]) == ""
