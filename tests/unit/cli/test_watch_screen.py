"""What `harvester watch` shows: one harvester, several, a part of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harvester_cli.dashboard.lines import OneKey, in_ascii
from harvester_cli.dashboard.live import status_line
from harvester_cli.dashboard.render import Detail, OneShard, QuarantineMeter, render
from harvester_cli.dashboard.watching import HELP, HELP_FOR_NOBODY, HELP_FOR_SEVERAL, View, screen
from harvester_cli.watch_live import _Watch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from harvester.control.protocol import Glimpse
from harvester.status import Backlog, LastEvent, State, Status
from tests.support.statuses import AT, KEY, failed, fenced, leading, standby
from tests.unit.cli.test_dashboard import STATUSES

PAUSED = replace(leading(), state=State.PAUSED, paused_since_at=AT, queued=0)


def lines(view: View, *seen: Glimpse, width: int = 80, height: int = 24, keys: bool = True) -> list[str]:
    return screen(view, seen, width, height, keys=keys).plain.split("\n")


def a(name: str, status: Status | None = None, trouble: str | None = None) -> Glimpse:
    return Glimpse(Path(f"/run/harvester/{name}.sock"), replace(status, name=name) if status else None, trouble)


def test_one_harvester_is_shown_as_start_does_and_the_last_line_names_the_keys() -> None:
    drawn = lines(View(), Glimpse(Path("/s"), leading()))
    assert drawn[:23] == render(leading(), 80, 23).plain.split("\n")
    assert drawn[23] == HELP
    assert lines(View(), Glimpse(Path("/s"), leading()), keys=False) == render(leading(), 80, 24).plain.split("\n")


def test_no_keys_are_offered_for_a_harvester_that_has_ended() -> None:
    assert lines(View(), a("one", leading(), trouble="it has ended"))[23] == HELP_FOR_NOBODY
    assert lines(View())[23] == HELP_FOR_NOBODY


def test_all_is_not_well_while_records_are_in_quarantine() -> None:
    for count, words in ((1, "1 record is"), (17, "17 records are"), (0, None), (None, None)):
        status = replace(leading(), backlog=Backlog(5, False, 1.0, quarantine=count))
        expected = f"publishes; {words} in quarantine: harvester dead list" if words else "all is well"
        assert lines(View(), Glimpse(Path("/s"), status))[2] == expected


def test_who_leads_says_what_would_move_a_backlog_faster() -> None:
    status = replace(leading(), backlog=Backlog(5, False, 1.0, advice="few keys carry it"))
    assert lines(View(), Glimpse(Path("/s"), status))[2] == "publishes; few keys carry it"


def test_a_pause_is_said_in_words() -> None:
    first, _, third, *_ = lines(View(), Glimpse(Path("/s"), PAUSED))
    assert "PAUSED for 2m 13s" in first
    assert third == "leading, but marks nothing until resumed; what is on the wire is finished"
    waiting = replace(standby(), paused_since_at=AT)
    first, _, third, *_ = lines(View(), Glimpse(Path("/s"), waiting))
    assert "STANDBY for 2m 13s, paused for 0.0 s" in first
    assert third.startswith("another process leads; this one would take over, but mark nothing")
    assert " standby paused_since=2025-03-14T15:09:26Z " in status_line(waiting)


def test_several_are_listed_above_the_one_that_is_looked_at() -> None:
    seen = [a("one", leading()), a("two", standby()), a("three", PAUSED), a("four", trouble="gone"), a("five")]
    seen.append(a("six", replace(standby(), paused_since_at=AT)))
    drawn = lines(View(chosen=seen[1].path), *seen)
    assert drawn[0].startswith("── harvesters ──")
    assert drawn[0].endswith(" 6 ──")
    assert drawn[1].startswith("  one                      LEADING")
    assert drawn[1].endswith("12,600/s  backlog 10,000+  8 shards")
    assert drawn[2].startswith("> two                      STANDBY")
    assert drawn[3].startswith("  three                    PAUSED ")
    assert drawn[4].startswith("  /run/harvester/four.sock no answer")
    assert drawn[5].startswith("  /run/harvester/five.sock connecting")
    assert drawn[6].startswith("  six                      STANDBY, paused")
    assert drawn[7].startswith("two  STANDBY for")
    assert drawn[23] == HELP_FOR_SEVERAL


def test_of_many_those_around_the_chosen_one_are_listed() -> None:
    seen = [a(f"h{number}", leading()) for number in range(20)]
    for number in (0, 9, 19):
        drawn = lines(View(chosen=seen[number].path), *seen)
        assert "20, 14 not shown" in drawn[0]
        assert sum(line.startswith(">") for line in drawn[1:7]) == 1
        assert any(line.startswith(f"> h{number} ") for line in drawn[1:7])


def test_who_does_not_answer_keeps_the_last_figures() -> None:
    drawn = lines(View(), Glimpse(Path("/s"), leading(), "the harvester on /s does not answer"))
    assert drawn[2] == "! the harvester on /s does not answer"
    assert "12,600/s" in "\n".join(drawn)


def test_of_a_harvester_that_does_not_answer_neither_state_nor_clock_is_shown_as_if_they_went_on() -> None:
    first, _, third, *_ = lines(View(), a("billing-1", leading(), trouble="it is gone"))
    assert first == "billing-1  NO ANSWER since 15:09:26 UTC"
    assert third == "! it is gone"
    detail = OneKey("k", KEY, "it is gone")
    assert f"no answer since {KEY.at:%H:%M:%S} UTC: it is gone" in lines(View(detail=detail), a("billing-1", leading()))


def test_a_notice_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = _Watch(list, View())
    watch._say("pausing: done")
    now += 4.9
    watch.frame()
    assert watch._view.message == "pausing: done"
    now += 0.1
    watch.frame()
    assert watch._view.message == ""


def test_before_there_is_anything_to_show() -> None:
    assert lines(View())[0] == "no harvester is running; waiting for one"
    assert lines(View(), a("x"))[:2] == ["/run/harvester/x.sock", "connecting"]
    assert lines(View(), a("x", trouble="it is gone"))[1] == "it is gone"


def test_one_shard_has_all_its_figures_and_its_events() -> None:
    drawn = "\n".join(lines(View(detail=OneShard(3)), Glimpse(Path("/s"), leading())))
    assert "── shard 3 ──" in drawn
    assert "quarantined" in drawn
    assert "handles 12% of this harvester's records" in drawn
    assert "shard 3 died: marks again as 3f2a91c0" in drawn
    assert "shard 4" not in drawn
    assert " 0 ready" not in drawn
    other = replace(leading(), events=(LastEvent(AT, "shard 13 died"),))
    assert (
        "shard 13"
        not in "\n".join(lines(View(detail=OneShard(1)), Glimpse(Path("/s"), other))[:-3]).partition("events")[0]
    )
    assert "there is no shard 9" in "\n".join(lines(View(detail=OneShard(9)), Glimpse(Path("/s"), leading())))


def test_the_quarantine_says_what_is_known_and_where_the_rest_is() -> None:
    status = replace(leading(), backlog=Backlog(5, False, 1.0, quarantine=17))
    drawn = "\n".join(lines(View(detail=QuarantineMeter()), Glimpse(Path("/s"), status)))
    assert "in the quarantine table now: 17" in drawn
    assert "by this process since it started: 1" in drawn
    assert "shard 7: 1" in drawn
    assert "wait for a retry, and may follow: shard 1: 1, shard 2: 2" in drawn
    assert "harvester dead list" in drawn
    assert "now: unknown" in "\n".join(lines(View(detail=QuarantineMeter()), Glimpse(Path("/s"), leading())))


def test_a_message_takes_the_place_of_the_keys() -> None:
    assert lines(View(message="scaling: done"), Glimpse(Path("/s"), leading()))[23] == "scaling: done"


def test_one_key_has_what_the_relay_and_the_database_know() -> None:
    def drawn(detail: OneKey) -> str:
        return "\n".join(lines(View(detail=detail), Glimpse(Path("/s"), leading())))

    shown = drawn(OneKey("account-17", KEY))
    assert "── key ──" in shown
    assert "account-17" in shown
    assert "shard 3: 2 records under way, 41 waiting" in shown
    assert "its first record failed and will be retried; next attempt in 12 s" in shown
    assert "in the outbox: 43; the oldest is record 811, 1m 15s old" in shown
    assert "in quarantine: 1; the last: MSG_SIZE_TOO_LARGE" in shown

    assert "asking" in drawn(OneKey("k"))
    assert "(the empty key)" in drawn(OneKey(""))
    assert "it is gone" in drawn(OneKey("k", None, "it is gone"))
    standby = replace(KEY, leads=False, capped=True, newest_error=None)
    assert "does not lead: only the database has information" in drawn(OneKey("k", standby))
    assert "in the outbox: 43+; one of them is record 811" in drawn(OneKey("k", standby))
    assert "under way" not in drawn(OneKey("k", standby))
    assert "holds its key; next attempt now" in drawn(OneKey("k", replace(KEY, held=True, retry_in_s=0.0)))
    silent = replace(KEY, rows=None, oldest_id=None, oldest_age_s=None, quarantined=None, trouble="no server listens")
    assert "the database did not answer: no server listens" in drawn(OneKey("k", silent))


def test_the_line_that_a_key_is_entered_in_takes_the_place_of_the_keys() -> None:
    assert lines(View(typed="ab", message="before"), Glimpse(Path("/s"), leading()))[23].startswith("key: ab_")


KEYS = st.builds(
    OneKey, st.text(max_size=40), st.none() | st.just(KEY) | st.just(replace(KEY, rows=None)), st.none() | st.text()
)
DETAILS: st.SearchStrategy[Detail | None] = (
    st.none() | st.builds(OneShard, st.integers(0, 40)) | st.just(QuarantineMeter()) | KEYS
)
PATHS = st.builds(Path, st.text(max_size=40))
SEEN = st.builds(Glimpse, PATHS, st.none() | STATUSES, st.none() | st.text(max_size=100))
TYPED = st.none() | st.text(st.characters(max_codepoint=255), max_size=300)
VIEWS = st.builds(View, st.none() | PATHS, DETAILS, st.text(max_size=100), TYPED)


@given(VIEWS, st.lists(SEEN, max_size=8), st.integers(1, 220), st.integers(1, 60), st.booleans())
def test_anything_fits_any_terminal(view: View, seen: list[Glimpse], width: int, height: int, keys: bool) -> None:
    drawn = lines(view, *seen, width=width, height=height, keys=keys)
    assert len(drawn) == height
    assert max(map(cell_len, drawn)) <= width


def test_without_unicode_only_ascii_is_drawn() -> None:
    seen = [a("one", failed()), a("two", fenced())]
    for detail in (None, OneShard(1), QuarantineMeter()):
        assert in_ascii(screen(View(detail=detail), seen, 80, 24, keys=True)).plain.isascii()
