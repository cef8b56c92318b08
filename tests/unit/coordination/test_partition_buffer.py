"""What is on its way to the application, and in its hands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from harvester.coordination.settings import Open


@dataclass
class Message:
    number: int

    def offset(self) -> int:
        return self.number


def buffer(*fetched: int, last_offset: int | None = None) -> PartitionBuffer:
    made = PartitionBuffer(GroupPartition("g", "t", 0), 7, last_offset)
    if fetched:
        made.fetch([Message(offset) for offset in fetched])
    return made


def opened(*fetched: int) -> PartitionBuffer:
    made = buffer(*fetched)
    made.open_batch().until = 1.0
    return made


def given(made: PartitionBuffer, count: int) -> list[Message]:
    assert made.batch is not None
    return [made.batch.take(0.0) for _ in range(count)]


def finish(made: PartitionBuffer, record: Message) -> None:
    """As the consumer does."""
    assert made.batch is not None
    if not made.batch.finish(record):
        made.finish(record.offset())


def test_what_counts_as_processed_is_dropped() -> None:
    assert [message.offset() for message in buffer(3, 4, 5, last_offset=4).fetched] == [5]


def test_what_was_fetched_is_not_taken_again() -> None:
    made = buffer(3, 4, 5)
    made.fetch([Message(4), Message(5), Message(6)])
    assert [message.offset() for message in made.fetched] == [3, 4, 5, 6]


def test_records_are_handed_out_in_order_and_wait_for_the_commit() -> None:
    made = opened(3, 4)
    (record,) = given(made, 1)
    assert (record.offset(), made.open_records, made.last_offset) == (3, 1, None)
    finish(made, record)
    assert (made.open_records, made.last_offset) == (0, 3)


def test_nothing_is_handed_out_from_the_moment_on_which_is_set_for_it() -> None:
    made = buffer(3)
    batch = made.open_batch()
    batch.until = 1.0
    assert batch.take(1.0) is None
    assert made.open_records == 0
    assert batch.take(0.99) is not None


def test_nothing_is_handed_out_after_the_end() -> None:
    made = opened(3)
    assert made.batch is not None
    made.batch.end()
    assert given(made, 1) == [None]


def test_what_was_not_handed_out_is_there_for_the_next_batch() -> None:
    made = opened(3, 4, 5)
    given(made, 1)
    made.fetch([Message(6)])
    made.close_batch()
    assert [message.offset() for message in made.fetched] == [4, 5, 6]
    assert made.open_records == 1


def test_a_record_in_hand_is_finished_after_its_batch() -> None:
    made = opened(3, 4)
    (first,) = given(made, 1)
    batch = made.open_batch()
    batch.until = 1.0
    (second,) = given(made, 1)
    finish(made, second)
    assert [made.last_offset, made.open_records] == [None, 2]
    finish(made, first)
    assert [made.last_offset, made.open_records] == [4, 0]


def test_records_are_counted_again_when_none_is_open() -> None:
    made = opened(3, 4, 5)
    first, second = given(made, 2)
    finish(made, second)
    finish(made, first)
    (third,) = given(made, 1)
    assert made.batch is not None
    assert made.batch.finish(third)
    assert [made.last_offset, made.open_records] == [5, 0]


def test_an_older_record_that_is_finished_again_changes_nothing() -> None:
    made = opened(3, 4, 5)
    for record in (first := given(made, 1)[0], given(made, 1)[0]):
        finish(made, record)
    (last,) = given(made, 1)
    finish(made, first)
    assert (made.last_offset, made.open_records) == (4, 1)
    finish(made, last)
    assert (made.last_offset, made.open_records) == (5, 0)


def test_a_record_that_is_committed_late_does_not_look_like_falling_behind() -> None:
    made = opened()
    lag = 0
    for first in range(0, 60, 10):  # an interval each
        made.close_batch()
        made.fetch([Message(offset) for offset in range(first, first + 10)])
        made.open_batch().until = 1.0
        for record in given(made, 10):
            if record.offset() != 0:
                finish(made, record)
        lag += 10
        assert made.last_offset is None
        assert not made.falls_behind(lag)


def test_a_consumer_falls_behind_when_more_and_more_waits_to_be_handed_out() -> None:
    made = opened(*range(60))
    told = []
    for interval in range(1, 5):
        (record,) = given(made, 1)
        finish(made, record)
        told.append(made.falls_behind(lag=9 * interval))
    assert told == [False, False, False, True]


def test_a_batch_is_what_was_proposed_not_what_came_since() -> None:
    made = buffer(3, 4, 5)
    assert made.propose(2) == 4
    made.fetch([Message(6)])
    batch = made.own()
    assert [message.offset() for message in batch.records] == [3, 4]
    assert made.last_offset is None
    assert made.propose(9) == 6


def owning(*fetched: int) -> PartitionBuffer:
    """At most once: all of it is a batch that is ours, and in hand."""
    made = buffer(*fetched, last_offset=2)
    made.propose(9)
    made.batch = made.own()
    made.batch.until = 1.0
    return made


def test_at_most_once_a_record_counts_when_it_is_handed_out() -> None:
    made = owning(3, 4, 5)
    assert made.last_offset == 2
    given(made, 2)
    assert (made.last_offset, made.open_records) == (4, 2)
    left = made.lay_down()
    assert left is not None
    assert [message.offset() for message in left.records] == [5]
    assert (made.last_offset, made.open_records, made.owned) == (4, 0, [left])


def test_at_most_once_what_was_given_back_is_not_handed_out() -> None:
    made = owning(3, 4, 5)
    made.fetch([Message(6)])
    made.propose(9)
    waiting = made.own()
    given(made, 1)
    assert made.give_back() == 3
    assert given(made, 1) == [None]
    assert made.lay_down() is None
    assert waiting.rest == []


def test_at_most_once_where_nothing_was_handed_out_the_first_record_comes_next() -> None:
    made = buffer(3, 4)
    made.propose(9)
    made.own()
    assert made.give_back() == 2


def test_at_most_once_the_last_lot_leaves_nothing() -> None:
    made = owning(3, 4)
    given(made, 2)
    assert made.lay_down() is None
    assert (made.last_offset, made.owned) == (4, [])
    assert made.give_back() == 4


def test_what_comes_next_is_found_while_the_application_takes_it() -> None:
    class Taken(list[Any]):
        """Of which the rest is taken between two looks."""

        def __len__(self) -> int:
            count = super().__len__()
            made.batch.given = count
            return count

    made: Any = opened(3, 4)
    made.batch.records = Taken(made.batch.records)
    assert made.next_record.offset() == 3
    assert made.next_record is None


def test_nothing_fetched_is_no_batch() -> None:
    assert buffer().propose(10) is None
    assert buffer().own().records == []


def test_a_lot_has_no_more_than_there_is_room_for() -> None:
    made = buffer(3, 4, 5)
    assert [message.offset() for message in made.open_batch(2).records] == [3, 4]
    assert [message.offset() for message in made.fetched] == [5]


def test_how_long_the_first_record_is_open_and_since_when_there_is_no_room() -> None:
    made = opened(3, 4, 5)
    made.look(2, 10.0)
    assert (made.open(11.0), made.full_since) == (None, None)
    first, second = given(made, 2)
    assert made.open(11.5) == Open(2, 3, 0.0)
    made.look(2, 12.0)
    assert (made.open(15.0), made.full_since) == (Open(2, 3, 3.0), 12.0)
    finish(made, second)
    made.look(2, 16.0)
    assert (made.open(17.0), made.full_since) == (Open(2, 3, 5.0), 12.0)
    given(made, 1)
    finish(made, first)
    assert made.open(17.5) == Open(1, 5, 0.0), "the records and their offset are of one point in time"
    made.look(2, 18.0)
    assert (made.open(19.0), made.full_since) == (Open(1, 5, 1.0), None)


def test_what_is_not_for_the_application_is_passed_over_when_nothing_else_is_left() -> None:
    made = opened(3, 4)
    for record in given(made, 2):
        assert not made.is_empty
        finish(made, record)
    assert made.is_empty
    made.pass_over(6)
    assert (made.last_offset, made.fetched_to) == (5, 5)
    made.pass_over(2)  # never back
    made.pass_over(-1001)  # the client does not know
    assert made.last_offset == 5
    made.fetch([Message(5), Message(6)])
    assert [message.offset() for message in made.fetched] == [6]
    assert not made.is_empty


def test_at_most_once_what_is_ours_is_not_passed_over() -> None:
    made = owning(3, 4)
    given(made, 2)
    empty = [made.is_empty]
    made.lay_down()
    empty.append(made.is_empty)
    made.fetch([Message(9)])
    empty.append(made.is_empty)
    assert empty == [False, True, False]


def turn(made: PartitionBuffer) -> None:
    """As the coordination's thread does."""
    if made.last_offset is not None:
        made.reported = made.last_offset
    made.look(10, 0.0)
    made.note_idle()


def test_it_is_busy_from_a_record_that_comes_until_all_is_finished_and_told() -> None:
    made = buffer(last_offset=2)
    seen = [made.busy]
    turn(made)
    seen.append(made.busy)
    made.fetch([Message(3)])
    seen.append(made.busy)
    turn(made)
    made.open_batch().until = 1.0
    (record,) = given(made, 1)
    turn(made)
    seen.append(made.busy)
    finish(made, record)
    turn(made)  # the application may take another one meanwhile
    seen.append(made.busy)
    made.close_batch()
    made.reported = 2
    made.note_idle()  # not told yet
    seen.append(made.busy)
    turn(made)
    seen.append(made.busy)
    assert seen == [True, False, True, True, True, True, False]


def test_a_partition_that_was_set_to_its_start_is_idle_until_a_record_comes() -> None:
    made = buffer(last_offset=-1)
    made.begin(None)
    made.note_idle()
    assert not made.busy


def test_it_is_busy_when_its_position_has_moved_without_a_record() -> None:
    made = buffer(last_offset=2)
    turn(made)
    made.pass_over(9)  # markers of transactions
    assert made.busy
    turn(made)
    made.begin(20)
    assert made.busy
