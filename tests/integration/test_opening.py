"""Opening a lane, against the real broker; the database is played, since its answers are what the cases are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from harvester.delivery.lane import Lanes, LaneSettings, TransactionOutcome
from harvester.delivery.opening import Deposed, Leadership, Opener, Superseded
from harvester.delivery.progress import EncodedProgress, Progress, encode
from harvester.delivery.progress_topic import find_progress_topic
from harvester.record import RowVersions
from tests.support.lanes import opened
from tests.support.rows import progress_of, row

pytest_plugins = ["tests.support.lane_scene"]

OURS = Leadership(5, "holder", uuid4())


class Database:
    """The term row, and what was deleted; `fenced` runs when a lane is fenced and its progress not read."""

    def __init__(self) -> None:
        self.row: tuple[int, str | None] | None = (OURS.term, OURS.holder)
        self.deleted: list[int] = []
        self.xmins: list[int] = []  # that these rows must have
        self.found: list[tuple[int, bytes | None, bytes]] = []  # the rows that it has
        self.rows: Iterator[tuple[int, str | None]] | None = None  # what it says each time, if that changes
        self.over = self.ends = False
        self.troubles: list[str | None] = []
        self.recorded: str | None = None  # the id of the progress topic
        self.then: Callable[[], None] = lambda: None  # when the lane is fenced
        self.paused: Callable[[], None] = lambda: None  # before another attempt

    def term_row(self) -> tuple[int, str | None] | None:
        return next(self.rows) if self.rows is not None else self.row

    def progress_topic(self) -> str | None:
        return self.recorded

    def delete(self, rows: RowVersions) -> bool:
        self.deleted += [] if self.ends else rows.ids
        self.xmins += rows.xmins
        return not self.ends

    def delete_same(
        self, ids: Sequence[int], same: Callable[[list[tuple[int, bytes | None, bytes]]], RowVersions], _: UUID
    ) -> list[int] | None:
        chosen = same([row for row in self.found if row[0] in ids])
        return list(chosen.ids) if self.delete(chosen) else None

    def is_over(self) -> bool:
        return self.over

    def pause(self, _seconds: float) -> None:
        """At once."""
        self.paused()

    def trouble(self, text: str | None) -> None:
        self.troubles.append(text)

    def fenced(self, _lane: int) -> None:
        self.then()


@pytest.fixture
def database() -> Database:
    return Database()


def commit(lanes: Lanes, progress: Progress) -> None:
    """What a predecessor has left behind on lane 0."""
    lane = opened(lanes)
    for _ in range(5):  # on a busy machine the record may time out, and then the transaction is refused
        assert lane.begin() is TransactionOutcome.DONE
        if lane.commit(encode(progress)) is TransactionOutcome.DONE:
            break
        assert lane.abort() is TransactionOutcome.DONE
    else:
        raise AssertionError(lane.error)
    lane.close()


def open_lane(lanes: Lanes, database: Database) -> list[list[int]]:
    """Open lane 0; what was published by then."""
    found: list[list[int]] = []
    Opener(lanes, database).open(0, OURS, found.append).close()
    return found


def test_a_lane_that_nobody_has_used_is_opened(lanes: Lanes, database: Database) -> None:
    assert open_lane(lanes, database) == [[]]
    assert (database.deleted, database.troubles) == ([], [])


def test_what_the_predecessor_committed_is_purged_and_its_progress_emptied(lanes: Lanes, database: Database) -> None:
    commit(lanes, Progress(4, OURS.incarnation, (3, 5, 9)))
    assert open_lane(lanes, database) == [[3, 5, 9]]
    assert database.deleted == [3, 5, 9]
    assert lanes.progress(0, 5.0) == Progress(OURS.term, OURS.incarnation)


def test_what_a_predecessor_of_an_older_version_committed_is_purged_by_its_ids(
    lanes: Lanes, database: Database
) -> None:
    """Its progress has no versions of the rows; with them, no other rows are meant (P50)."""
    commit(lanes, Progress(4, OURS.incarnation, (3, 5)))
    assert open_lane(lanes, database) == [[3, 5]]
    assert database.xmins == []
    commit(lanes, Progress(4, OURS.incarnation, (6, 7), (800, 801), (1_001, 2_002), (0, 0)))
    assert open_lane(lanes, database) == [[6, 7]]
    assert (database.deleted, database.xmins) == ([3, 5, 6, 7], [800, 801])


def test_ids_of_another_incarnation_are_other_rows(lanes: Lanes, database: Database) -> None:
    """P9: they are not purged, whatever stands under them now; a harvester from before P49 has told no more of them."""
    commit(lanes, Progress(4, uuid4(), (3, 5, 9)))
    assert open_lane(lanes, database) == [[]]
    assert database.deleted == []


@pytest.mark.parametrize(
    ("recorded", "said"), [("another", "the progress topic, another, is a different one"), ("", "no longer records")]
)
def test_a_topic_that_the_term_row_does_not_record_is_not_read(
    lanes: Lanes, lane_settings: LaneSettings, database: Database, recorded: str, said: str
) -> None:
    """P22: it does not tell what was committed. The lane is opened when the topic is back."""
    commit(lanes, Progress(4, OURS.incarnation, (3,)))
    found = find_progress_topic(lane_settings.topic, lane_settings.options)
    assert found is not None

    def restore() -> None:
        assert database.deleted == []
        database.recorded = found.id

    database.recorded, database.paused = recorded, restore
    assert open_lane(lanes, database) == [[3]]
    trouble, over = database.troubles
    assert trouble is not None
    assert said in trouble
    assert "start the harvesters again" in trouble, "the remedy"
    assert over is None


def test_a_record_that_cannot_be_read_is_told_and_waited_for(lanes: Lanes, database: Database) -> None:
    """It could name what was committed, so nothing is sent; a version that can read it may take over meanwhile."""
    lane = opened(lanes)
    lane.begin()
    assert lane.commit(EncodedProgress(b"\x02 of a newer version")) is TransactionOutcome.DONE
    lane.close()
    database.paused = lambda: setattr(database, "over", True)
    with pytest.raises(Superseded):
        open_lane(lanes, database)
    assert "20 bytes are not a progress record; it was written by" in (database.troubles[0] or "")


NAMED = progress_of([row(record_id=number) for number in (3, 5, 9)], 4, uuid4())
ROWS: list[tuple[int, bytes | None, bytes]] = [
    (3, b"k", row(record_id=3)), (4, b"k", row(record_id=4)), (9, b"k", row(record_id=9, value=b"another")),
]  # fmt: skip


@pytest.mark.parametrize(
    "named",
    [NAMED, replace(NAMED, term=6, incarnation=OURS.incarnation), replace(NAMED, term=6)],
    ids=["another incarnation", "a higher term", "both"],
)
def test_rows_that_are_the_same_in_another_incarnation_are_purged(
    lanes: Lanes, database: Database, named: Progress
) -> None:
    """P49."""
    commit(lanes, named)
    database.found = ROWS
    assert open_lane(lanes, database) == [[3]]
    assert database.deleted == [3]
    assert lanes.progress(0, 5.0) == Progress(OURS.term, OURS.incarnation)


def test_in_the_same_incarnation_the_ids_say_which_rows_are_meant(lanes: Lanes, database: Database) -> None:
    """Whatever somebody has made of a row since it was read."""
    commit(lanes, replace(NAMED, incarnation=OURS.incarnation))
    database.found = ROWS
    assert open_lane(lanes, database) == [[3, 5, 9]]


def test_nothing_is_fenced_under_a_term_that_is_not_ours(lanes: Lanes, database: Database) -> None:
    leader = opened(lanes)
    leader.begin()
    database.row = (6, "another")
    with pytest.raises(Deposed, match="6 of another"):
        open_lane(lanes, database)
    assert leader.commit(encode(Progress(6, OURS.incarnation, (1,)))) is TransactionOutcome.DONE


def test_a_term_that_ends_while_the_lane_is_fenced_is_noticed_after_that(lanes: Lanes, database: Database) -> None:
    """P20: else a zombie would go on with a producer that has just fenced the one that leads."""
    database.rows = iter([(OURS.term, OURS.holder), (6, "another")])
    with pytest.raises(Deposed, match="6 of another"):
        open_lane(lanes, database)
    assert next(database.rows, None) is None


def test_the_progress_of_a_higher_term_says_that_the_term_row_has_gone_back(lanes: Lanes, database: Database) -> None:
    """P9: the rows are those of then, and are rather repeated than lost; the row being another's would be noticed."""
    commit(lanes, Progress(6, OURS.incarnation, (3,)))
    database.rows = iter([(OURS.term, OURS.holder), (OURS.term, OURS.holder), (6, "another")])
    with pytest.raises(Deposed, match="6 of another"):
        open_lane(lanes, database)
    database.rows = None
    assert open_lane(lanes, database) == [[]]
    assert database.deleted == []
    assert lanes.progress(0, 5.0) == Progress(OURS.term, OURS.incarnation)


def test_a_lane_that_is_fenced_meanwhile_is_opened_again(lanes: Lanes, database: Database) -> None:
    commit(lanes, Progress(4, OURS.incarnation, (3,)))
    stolen: list[object] = []

    def steal() -> None:
        if not stolen:
            stolen.append(opened(lanes))

    database.then = steal
    assert open_lane(lanes, database)[-1] == [3]
    assert database.troubles[-1] is None
    assert len(database.troubles) > 1
    assert lanes.progress(0, 5.0) == Progress(OURS.term, OURS.incarnation)


@pytest.mark.parametrize("named", [Progress(4, OURS.incarnation, (3,)), NAMED], ids=["by ids", "by sums"])
def test_opening_ends_when_nobody_wants_the_lane(lanes: Lanes, database: Database, named: Progress) -> None:
    def supersede() -> None:
        database.over = True

    database.then = supersede
    database.found = ROWS
    commit(lanes, named)
    database.ends = True
    with pytest.raises(Superseded):
        open_lane(lanes, database)
    left = lanes.progress(0, 5.0)
    assert left is not None
    assert (left.incarnation, left.ids, left.sums) == (named.incarnation, named.ids, named.sums)
