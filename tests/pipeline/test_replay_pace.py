"""What needs no Spark of a replay: its pace, what it is asked for and the file that says how far it came."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from harvester_cli.main import app
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from harvester.errors import ExitCode
from harvester.pipeline.errors import CheckpointMismatch, PipelineError
from harvester.pipeline.replay_plan import (
    WITHOUT_RATE,
    By,
    Destination,
    ReplayProgress,
    ReplayRate,
    ReplayRequest,
    Selection,
    from_text,
    to_text,
)

REPLAY = ("pipeline", "replay", "--lake", "lake", "--bootstrap", "127.0.0.1:1")
STORED = ReplayProgress(
    "an id",
    ReplayRequest(
        Selection(datetime(2026, 3, 1, tzinfo=UTC), None, By.CREATED, ("orders",), (b"\xff", b"")),
        Destination(suffix="-again"),
        as_new=True,
    ),
    7,
    12,
    {("orders", 0): 5, ("orders", 11): 2**40},
)


def test_a_slice_is_what_a_second_may_have() -> None:
    assert [ReplayRate(rate).size for rate in (None, 0.2, 1, 99.9, 1e6)] == [WITHOUT_RATE, 1, 1, 99, 1_000_000]
    assert ReplayRate(5, slice_records=70).size == ReplayRate(slice_records=70).size == 70


@given(
    rate=st.floats(0.1, 1e6),
    slices=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 30)), min_size=1, max_size=40),
)
def test_in_no_time_more_begins_than_the_rate_and_one_slice(rate: float, slices: list[tuple[float, float]]) -> None:
    pace = ReplayRate(rate)
    now = due = 0.0
    begun: list[tuple[float, int]] = []
    for full, took_s in slices:
        records = max(1, round(full * pace.size))  # the last one of a task is smaller
        now = max(now, due)
        begun.append((now, records))
        due = pace.next_s(now, records)
        now += took_s
    for at, (since_s, _) in enumerate(begun):
        records = 0
        for until_s, more in begun[at:]:
            records += more
            assert records <= (until_s - since_s) * rate * (1 + 1e-9) + pace.size + 1e-6


def test_without_a_rate_nothing_waits() -> None:
    assert ReplayRate().next_s(5.0, WITHOUT_RATE) == 5.0
    assert ReplayRate(100).next_s(5.0, 50) == 5.5


def test_what_is_stored_is_read_again() -> None:
    assert from_text(to_text(STORED), "there") == STORED
    bare = ReplayProgress("id", ReplayRequest(Selection(), Destination(topic="all")), 0, finished=True)
    assert from_text(to_text(bare), "there") == bare


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 2}', to_text(STORED)[:-9]])
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(CheckpointMismatch, match="there"):
        from_text(text, "there")


def test_no_record_goes_back_unless_that_is_said() -> None:
    topics = ("orders", "payments")
    assert Destination(topic="all").targets(topics) == {"orders": "all", "payments": "all"}
    assert Destination(suffix="-2").targets(topics) == {"orders": "orders-2", "payments": "payments-2"}
    assert Destination(original=True).targets(topics) == {"orders": "orders", "payments": "payments"}
    for destination, found in ((Destination(topic="orders"), topics), (Destination(suffix="-2"), ("a", "a-2"))):
        with pytest.raises(PipelineError, match="written back"):
            destination.targets(found)


def test_the_command_line_says_what_is_missing_or_contradicts_itself() -> None:
    for extra, said in (
        ((), "--into-original"),
        (("--to-topic", "a", "--suffix", "b"), "--suffix"),
        (("--to-topic", "a", "--topic", "a"), "--into-original"),
        (("--suffix", "b", "--from", "yesterday"), "--from"),
        (("--suffix", "b", "--from", "2026-03-02", "--until", "2026-03-01"), "--until"),
        (("--suffix", "b", "--rate", "0"), "--rate"),
        (("--suffix", "b", "--by", "luck"), "'published', 'created'"),
        (("--suffix", "b", "--key-base64", "?"), "--key-base64"),
        (("--resume", "id", "--suffix", "b"), "--resume"),
    ):
        done = CliRunner().invoke(app, [*REPLAY, *extra])
        assert (done.exit_code, said in done.output) == (ExitCode.USAGE, True), done.output


def test_positions_grow() -> None:
    later = dataclasses.replace(STORED, done={**STORED.done, ("orders", 0): 9})
    assert from_text(to_text(later), "there").done[("orders", 0)] == 9
