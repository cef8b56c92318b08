"""The processed prefix, and whether a consumer keeps up."""

from __future__ import annotations

import pytest

from harvester.coordination.core.partition_buffer import Health, PartitionProgress


def progress(*delivered: int) -> PartitionProgress:
    made = PartitionProgress(9)
    for offset in delivered:
        made.deliver(offset)
    return made


def test_the_prefix_waits_for_the_record_that_is_not_done() -> None:
    made = progress(10, 11, 12)
    assert not made.finish(11)
    assert (made.last_offset, made.open_records) == (9, 3)
    assert made.finish(10)
    assert (made.last_offset, made.open_records) == (11, 1)


def test_offsets_that_were_never_delivered_are_no_holes() -> None:
    made = progress(10, 14, 20)
    assert made.finish(10)
    assert made.finish(14)
    assert made.last_offset == 14


@pytest.mark.parametrize("offset", [9, 11, 13])
def test_what_was_not_delivered_cannot_be_finished(offset: int) -> None:
    made = progress(10, 12)
    assert not made.finish(offset)
    assert made.open_records == 2


def test_a_record_is_finished_once() -> None:
    made = progress(10)
    assert made.finish(10)
    assert not made.finish(10)


def looked(*looks: tuple[int, int]) -> bool:
    health = Health(samples=3)
    for position, end in looks:
        health.look(position, end)
    return health.falls_behind


def test_a_lag_that_grows_and_grows_beyond_what_is_done_in_that_time() -> None:
    assert looked((0, 100), (10, 200), (20, 300))


@pytest.mark.parametrize("looks", [
    ((0, 100), (10, 200)),  # too few looks
    ((0, 100), (10, 200), (150, 300)),  # it caught up once
    ((0, 10), (1000, 1020), (2000, 2030)),  # the lag grows, and is nothing
    ((0, 0), (0, 0), (0, 0)),
])  # fmt: skip
def test_anything_else_is_no_reason_to_let_go(looks: tuple[tuple[int, int], ...]) -> None:
    assert not looked(*looks)


def test_a_trend_takes_two() -> None:
    with pytest.raises(ValueError, match="two samples"):
        Health(samples=1)
