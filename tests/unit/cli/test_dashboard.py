"""What the dashboard shows, character by character, in files under golden/.

To accept a change: HARVESTER_REWRITE_GOLDEN=1 pytest tests/unit/cli/test_dashboard.py, then read the diff.
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from harvester_cli.dashboard.lines import in_ascii
from harvester_cli.dashboard.render import OffScreenOutput, render
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from harvester.status import Backlog, LastEvent, ShardState, State, Status
from tests.support.statuses import AT, a_shard, failed, fenced, leading, standby

GOLDEN = Path(__file__).parent / "golden"
REWRITE = "HARVESTER_REWRITE_GOLDEN"

WITH_A_DEAD_SHARD = replace(
    leading(16),
    shards=tuple(a_shard(index, state=ShardState.DEAD if index == 14 else ShardState.READY) for index in range(16)),
)
SCREENS: dict[str, tuple[Status, int, int]] = {
    "leading-80x24": (leading(), 80, 24),
    "leading-120x40": (leading(), 120, 40),
    "leading-60x20": (leading(), 60, 20),
    "leading-200x50": (leading(), 200, 50),
    "sixteen-shards-80x24": (WITH_A_DEAD_SHARD, 80, 24),
    "standby-80x24": (standby(), 80, 24),
    "fenced-80x24": (fenced(), 80, 24),
    "failed-80x24": (failed(), 80, 24),
    "tiny-30x10": (leading(), 30, 10),
}


def drawn(status: Status, width: int, height: int, *, kept: OffScreenOutput | None = None) -> list[str]:
    """The lines as a terminal of that size gets them, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(render(status, width, height, kept=kept), end="")
    return out.getvalue().split("\n")


@pytest.mark.parametrize("name", SCREENS)
def test_the_screen_is_the_golden_one(name: str) -> None:
    lines = drawn(*SCREENS[name])
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    path = GOLDEN / f"dashboard-{name}.txt"
    if os.environ.get(REWRITE):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_without_unicode_only_ascii_is_drawn() -> None:
    for status, width, height in SCREENS.values():
        lines = in_ascii(render(status, width, height)).plain.split("\n")
        assert all(line.isascii() for line in lines)
        assert [len(line) for line in lines] == [cell_len(line) for line in drawn(status, width, height)]


def test_kept_log_lines_are_announced_with_their_file() -> None:
    assert "12 log lines in /tmp/x.log" in "\n".join(drawn(leading(), 80, 24, kept=OffScreenOutput(12, "/tmp/x.log")))
    assert "12 log lines kept" in "\n".join(drawn(leading(), 40, 24, kept=OffScreenOutput(12, "/tmp/long/x.log")))
    assert "1 log line in /tmp/x.log" in "\n".join(drawn(leading(), 80, 24, kept=OffScreenOutput(1, "/tmp/x.log")))
    assert "log line" not in "\n".join(drawn(leading(), 80, 24, kept=OffScreenOutput(0, "/tmp/x.log")))


def test_text_from_outside_cannot_move_the_cursor() -> None:
    nasty = "a\x1b[2Jb\nc\td\u202ee"
    status = replace(leading(), name=nasty, outbox=nasty, problem=nasty, events=(LastEvent(at=AT, text=nasty),))
    lines = drawn(status, 80, 24)
    assert len(lines) == 24
    assert not {"\x1b", "\t", "\u202e"} & set("".join(lines))


def test_markup_in_a_name_is_text() -> None:
    assert "[red]x[/red]" in drawn(replace(leading(), name="[red]x[/red]"), 80, 24)[0]


def test_every_state_is_named_and_explained_in_words() -> None:
    for state in State:
        first, _, third = drawn(replace(leading(), state=state), 80, 24)[:3]
        assert state.value.upper() in first
        assert third.strip()


def test_a_problem_takes_the_place_of_the_explanation() -> None:
    assert drawn(replace(leading(), problem="waiting for PostgreSQL at db:5432"), 80, 24)[2].startswith(
        "! waiting for PostgreSQL at db:5432"
    )


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    status = replace(leading(), at=AT - timedelta(hours=1))
    assert "-" not in drawn(status, 80, 24)[0].replace("billing-1", "")


TEXTS = st.text(max_size=120)
COUNTS = st.integers(0, 10**12)
RATES = st.floats(0, 1e9)
STATUSES = st.builds(
    replace,
    st.builds(leading, st.integers(0, 40)),
    name=TEXTS,
    outbox=TEXTS,
    state=st.sampled_from(State),
    term=st.none() | COUNTS,
    leader_id=st.none() | st.uuids(),
    in_flight=COUNTS,
    max_in_flight=COUNTS,
    queued=COUNTS,
    delivered=COUNTS,
    quarantined=COUNTS,
    rate_per_s=RATES,
    rate_history=st.lists(RATES, max_size=60).map(tuple),
    p50_ms=st.none() | RATES,
    p99_ms=st.none() | RATES,
    backlog=st.none() | st.builds(Backlog, COUNTS, st.booleans(), st.none() | RATES),
    problem=st.none() | TEXTS,
    events=st.lists(st.builds(LastEvent, st.just(AT), TEXTS), max_size=20).map(tuple),
)


@given(STATUSES, st.integers(1, 220), st.integers(1, 70))
def test_any_status_fits_any_terminal(status: Status, width: int, height: int) -> None:
    lines = drawn(status, width, height, kept=OffScreenOutput(3, "/tmp/harvester-x.log"))
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width


@given(st.integers(0, 40), st.integers(24, 60))
def test_every_shard_is_shown_or_counted(shards: int, height: int) -> None:
    lines = drawn(leading(shards), 80, height)
    shown = [line for line in lines if line[3:8] == "ready"]
    hidden = [int(line.split()[1]) for line in lines if line.startswith("…")]
    assert len(shown) + sum(hidden) == shards
    assert bool(hidden) == (shards > height - 12)


def test_a_dead_shard_is_shown_even_where_others_are_not() -> None:
    lines = drawn(WITH_A_DEAD_SHARD, 80, 24)
    assert any(line.startswith("14 DEAD") for line in lines)
