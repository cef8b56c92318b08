"""What `harvester claims` makes of the log: rows, and how they are shown."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from harvester_cli.claims import as_json, screen, summary, table
from rich.console import Console

from harvester.coordination.admin import PartitionRow, positions, rows
from harvester.coordination.core.messages import (
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    SettingPosition,
    encode,
)
from harvester.coordination.core.world import Freshness, LogTiming, World
from harvester.coordination.errors import CoordinationError

A, B = Client("a", "1"), Client("b", "1")
P0, P1, P2 = (GroupPartition("g", "orders", partition) for partition in range(3))
NOW_MS = 10_000


def world(*said: tuple[int, Message], start: int = 0) -> World:
    """After these messages, each with its time."""
    made = World.begin(LogTiming(1000, 250), start)
    for at_ms, message in said:
        made.read(made.next_offset, at_ms, encode(message))
    return made


HELD = (
    (9_000, ClaimingPartition(P0, A, 1, None, None)),
    (9_500, Heartbeat(P0, A, 2, 0, 0, 41)),
    (9_500, ClaimingPartition(P1, B, 1, None, None)),
    (9_600, ReleasingPartition(P1, B, 2, 2, 2, 7)),
)
BOUNDS = {("orders", 0): (0, 50), ("orders", 1): (10, 30), ("orders", 2): (5, 9), ("other", 0): (0, 3)}


def test_rows_of_a_log() -> None:
    found = rows([world(*HELD)], BOUNDS, NOW_MS)
    assert found == [
        PartitionRow(P0, A, Freshness.FRESH, 0, 41, 0.5, 8, certain=True),
        PartitionRow(
            P1, None, Freshness.FREE, 2, 7, None, 20, certain=True
        ),  # what retention removed is not waited for
        PartitionRow(P2, None, Freshness.FREE, None, None, None, 4, certain=True),
    ]


@pytest.mark.parametrize(
    ("now_ms", "freshness"),
    [
        (9_000, Freshness.FRESH),  # a clock that is behind: the log is newer
        (10_400, Freshness.FRESH),
        (10_600, Freshness.UNKNOWN),
        (11_600, Freshness.STALE),  # the log stands still, and a claim would win
    ],
)
def test_a_log_that_stands_still_grows_old(now_ms: int, freshness: Freshness) -> None:
    assert rows([world(*HELD)], BOUNDS, now_ms)[0].freshness is freshness


def test_only_one_group_and_topics_that_are_gone() -> None:
    other = world((9_000, ClaimingPartition(GroupPartition("h", "gone", 0), A, 1, None, None)))
    both = [world(*HELD), other]
    assert [row.place.group for row in rows(both, BOUNDS, NOW_MS)] == ["g", "g", "g", "h"]
    [row] = rows(both, BOUNDS, NOW_MS, "h")
    assert (row.lag, row.freshness) == (None, Freshness.UNKNOWN)


def test_a_log_without_its_beginning_is_not_certain() -> None:
    late = world((9_500, Heartbeat(P0, A, 2, 0, 0, 41)), start=900)
    assert [row.certain for row in rows([late], {}, NOW_MS)] == [False]


def test_a_release_in_the_holders_name_takes_nothing_back() -> None:
    """What the holder said before it counts, what it says afterwards is refused; a position that is set would not."""
    behind = ReleasingPartition(P0, A, 0, 0, 0, 41)
    late = (Heartbeat(P0, A, 3, 0, 1, 60), Heartbeat(P0, A, 4, 0, 1, 70))
    after = world(*HELD[:2], (9_600, late[0]), (9_600, behind), (9_600, late[1]))
    assert (after.claim(P0).holder, after.claim(P0).last_offset) == (None, 60)
    setting = SettingPosition(P0, Client("admin", "1"), 1, None, None, 41)
    assert world(*HELD[:2], (9_600, late[0]), (9_600, setting)).claim(P0).last_offset == 41


# -- positions


def test_positions_of_all_partitions_or_some() -> None:
    assert positions(BOUNDS, "orders", (), "earliest") == {("orders", 0): 0, ("orders", 1): 10, ("orders", 2): 5}
    assert positions(BOUNDS, "orders", (2, 1), "latest") == {("orders", 1): 30, ("orders", 2): 9}
    assert positions(BOUNDS, "orders", (0,), "50") == {("orders", 0): 50}


@pytest.mark.parametrize(
    ("topic", "partitions", "offset", "said"),
    [
        ("nowhere", (), "0", "there is no topic"),
        ("orders", (3,), "0", "has no partition 3"),
        ("orders", (0,), "51", "holds offsets 0 to 50, not 51"),
        ("orders", (), "7", "orders\\[1\\] holds offsets 10 to 30"),
        ("orders", (0,), "-1", "is not an offset"),
    ],
)
def test_positions_that_there_are_not(topic: str, partitions: tuple[int, ...], offset: str, said: str) -> None:
    with pytest.raises(CoordinationError, match=said):
        positions(BOUNDS, topic, partitions, offset)


# -- for the eye


def shown(found: list[PartitionRow], width: int = 80, height: int = 8) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(screen(found, "claims of g", "12:00:00 UTC", width, height), end="")
    return [line.rstrip() for line in out.getvalue().split("\n")]


def test_the_screen() -> None:
    assert shown(rows([world(*HELD)], BOUNDS, NOW_MS)) == [
        "── claims of g ───────────────────────────────────────────────── 12:00:00 UTC ──",
        "3 partitions, 1 client (1 each); 1 fresh, 2 free; lag 32",
        "topic   #  state    age  last offset  lag  generation  client",
        "orders  0  fresh  0.5 s           41    8           0  a",
        "orders  1  free       -            7   20           2  -",
        "orders  2  free       -            -    4           -  -",
        "",
        "",
    ]


def test_where_not_all_fit_what_is_not_fresh_stays() -> None:
    fresh = rows([world(*HELD)], BOUNDS, NOW_MS)[0]
    many = [replace(fresh, place=GroupPartition("g", "orders", number)) for number in range(20)]
    many[13] = replace(many[13], freshness=Freshness.STALE)
    lines = shown(many, width=40, height=6)
    assert len(lines) == 6
    assert [line.split()[:3] for line in lines[3:5]] == [["orders", "0", "fresh"], ["orders", "13", "stale"]]
    assert lines[5] == "and 18 more"
    assert all(len(line) <= 40 for line in lines)


def test_names_cannot_move_the_cursor_and_groups_are_told_apart() -> None:
    row = rows([world(*HELD)], BOUNDS, NOW_MS)[0]
    odd = replace(row, place=GroupPartition("h", "or\x1b[2Jders", 0), holder=Client("c\n", "1"))
    lines = [line.plain for line in table([row, odd], 120)]
    assert lines[0].split()[:2] == ["group", "topic"]
    assert all("\x1b" not in line and "\n" not in line for line in lines)


def test_what_is_not_certain_says_so() -> None:
    row = replace(rows([world(*HELD)], BOUNDS, NOW_MS)[0], certain=False)
    assert "fresh?" in table([row], 120)[1].plain
    assert as_json(row)["certain"] is False
    assert summary([]) == "nothing has ever been claimed"
