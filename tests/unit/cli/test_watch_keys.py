"""What the keys of `harvester watch` do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harvester_cli.dashboard.lines import OneKey
from harvester_cli.dashboard.render import OneShard, QuarantineMeter
from harvester_cli.dashboard.watching import Ask, Quit, View, chosen, press, prompt, split
from hypothesis import given
from hypothesis import strategies as st

from harvester.control.protocol import Glimpse
from harvester.status import State
from tests.support.statuses import AT, leading

ONE = Glimpse(Path("/r/one.sock"), leading(4))
TWO = Glimpse(Path("/r/two.sock"), replace(leading(2), name="two"))
SILENT = Glimpse(Path("/r/x.sock"))


def test_keys_as_a_terminal_sends_them() -> None:
    assert split(b"p+\x1b[B\x1b[C3\t\x1b[Zq") == ["p", "+", "down", "right", "3", "down", "up", "q"]
    assert split(b"\x1b") == ["esc"]
    assert split(b"\x03") == ["quit"]
    assert split(b"") == []


@given(st.binary(max_size=30))
def test_any_bytes_are_keys_that_do_no_harm(data: bytes) -> None:
    view = View()
    for key in split(data):
        view, _ = press(view, key, [ONE, TWO, SILENT])
        assert chosen(view, [ONE, TWO, SILENT]) is not None
        press(view, key, [])
        press(view, key, [SILENT])


def test_p_pauses_what_runs_and_resumes_what_is_paused() -> None:
    assert press(View(), "p", [ONE])[1] == Ask(ONE.path, "pause", "pausing")
    paused = Glimpse(ONE.path, replace(leading(4), state=State.PAUSED, paused_since_at=AT))
    assert press(View(), "p", [paused])[1] == Ask(ONE.path, "resume", "resuming")


@pytest.mark.parametrize(("key", "shards", "wanted"), [("+", 4, 5), ("=", 4, 5), ("-", 4, 3), ("-", 1, None)])
def test_plus_and_minus_change_the_number_of_shards(key: str, shards: int, wanted: int | None) -> None:
    action = press(View(), key, [Glimpse(Path("/s"), leading(shards))])[1]
    if wanted is None:
        assert action is None
    else:
        assert isinstance(action, Ask)
        assert (action.command, action.arguments["shards"]) == ("scale", wanted)


def test_a_digit_shows_one_shard_and_the_same_one_or_escape_all_of_them() -> None:
    view, _ = press(View(), "3", [ONE])
    assert view.detail == OneShard(3)
    assert press(view, "3", [ONE])[0].detail is None
    assert press(view, "esc", [ONE])[0].detail is None
    assert press(view, "right", [ONE])[0].detail == OneShard(0)
    assert press(view, "left", [ONE])[0].detail == OneShard(2)
    assert press(view, "7", [ONE])[0] == View(detail=OneShard(3), message="there is no shard 7")


def test_d_shows_the_quarantine() -> None:
    view, _ = press(View(), "d", [ONE])
    assert view.detail == QuarantineMeter()
    assert press(view, "d", [ONE])[0].detail is None


def test_tab_goes_round_the_harvesters_and_requests_go_to_the_chosen_one() -> None:
    both = [ONE, TWO]
    view, _ = press(View(detail=OneShard(3)), "down", both)
    assert view == View(chosen=TWO.path)
    action = press(view, "p", both)[1]
    assert isinstance(action, Ask)
    assert action.socket == TWO.path
    assert press(view, "down", both)[0].chosen == ONE.path
    assert press(View(), "up", both)[0].chosen == TWO.path


def test_who_is_gone_is_chosen_no_more() -> None:
    assert chosen(View(chosen=TWO.path), [ONE]) is ONE
    assert chosen(View(chosen=TWO.path), []) is None


def test_q_ends_it_whatever_there_is() -> None:
    for seen in ([], [SILENT], [ONE]):
        assert isinstance(press(View(), "q", seen)[1], Quit)


def test_a_message_is_gone_with_the_next_key() -> None:
    assert press(View(message="done"), "x", [ONE])[0].message == ""


def typing(data: bytes, view: View) -> View:
    for key in split(data):
        view, action = press(view, key, [ONE, TWO])
        assert action is None
    return view


def test_k_takes_a_line_and_shows_that_key() -> None:
    view = typing("kq+3 öß".encode(), View(detail=OneShard(3)))
    assert prompt(view) == "key: q+3 öß_  (Return shows it, Esc cancels)"
    assert view.detail == OneShard(3)
    view = typing(b"\x7f\x7f\x7f!\r", view)
    assert view == View(detail=OneKey("q+3!"))
    assert prompt(view) is None
    assert press(view, "esc", [ONE])[0] == View()
    assert typing(b"k\r", View()).detail == OneKey("")


@pytest.mark.parametrize("leave", [b"\x1b", b"\x03"])
def test_a_line_that_is_given_up_changes_nothing(leave: bytes) -> None:
    view = View(detail=QuarantineMeter())
    assert typing(b"kab\xc3" + b"\x1b[A\t\x00" + leave, view) == view


def test_a_line_has_an_end() -> None:
    view = typing(b"k" + b"x" * 5_000 + b"\r", View())
    assert view.detail == OneKey("x" * 1_000)
