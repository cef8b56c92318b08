"""At which offset a place is consumed."""

from __future__ import annotations

import pytest

from harvester.coordination.core.partition_buffer import resume, start
from harvester.coordination.core.world import SET_TO_START
from harvester.coordination.settings import OutOfRangePolicy


@pytest.mark.parametrize(("committed", "last_offset", "begins"), [
    (None, None, None),
    (7, None, 7),
    (None, 6, 7),
    (9, 6, 7),
    (5, 6, 7),
    (0, None, 0),
    (9, SET_TO_START, 0),
])  # fmt: skip
def test_what_the_log_knows_counts_or_else_the_group_offset(
    committed: int | None, last_offset: int | None, begins: int | None
) -> None:
    assert start(committed, last_offset) == begins


@pytest.mark.parametrize(("committed", "last_offset", "begins"), [(9, 6, 9), (5, 6, 7), (None, 6, 7), (5, None, 5)])
def test_where_the_log_is_not_certain_the_further_one_counts(
    committed: int | None, last_offset: int | None, begins: int
) -> None:
    assert start(committed, last_offset, positioned=False) == begins


@pytest.mark.parametrize(("offset", "policy", "resumed_at"), [
    (9, "earliest", 10),
    (9, "latest", 20),
    (9, "error", None),
    (10, "error", 10),
    (20, "error", 20),
    (21, "earliest", None),
    (21, "latest", None),
    (21, "error", None),
])  # fmt: skip
def test_where_to_go_on(offset: int, policy: OutOfRangePolicy, resumed_at: int | None) -> None:
    assert resume(offset, 10, 20, policy) == resumed_at
