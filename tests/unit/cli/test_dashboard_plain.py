"""The lines where there is no terminal, and the choice between the two."""

from __future__ import annotations

import io
import os
import threading
from dataclasses import replace

import pytest
from harvester_cli.dashboard import live

from harvester.status import State, Status
from tests.support.statuses import failed, fenced, leading, standby


def test_a_leaders_line() -> None:
    assert live.status_line(leading()) == (
        "2025-03-14T15:09:26Z billing-1 leading term=7 rate_per_s=12600 delivered=1234567 queued=4000"
        " in_flight=812/1000 backlog=10000+ oldest_s=3.2 quarantined=1 p50_ms=12.8 p99_ms=227.1 shards=8/8"
    )


def test_a_standbys_line_leaves_out_what_is_unknown() -> None:
    assert live.status_line(standby()) == (
        "2025-03-14T15:09:26Z billing-1 standby rate_per_s=0 delivered=0 queued=0 in_flight=0/1000"
        " quarantined=0 shards=0/0"
    )


def test_a_problem_is_quoted_and_stays_on_its_line() -> None:
    line = live.status_line(replace(fenced(), problem='no "broker"\nat all'))
    assert line.endswith(r' problem="no \"broker\" at all"')
    assert "shards=7/8" in live.status_line(failed())


def test_a_line_at_once_and_one_at_the_end() -> None:
    states = iter([State.LEADING, State.STOPPED])
    until = threading.Event()

    def status() -> Status:
        state = next(states)
        if state is State.LEADING:
            until.set()
        return replace(leading(), state=state)

    out = io.StringIO()
    live.run_plain(status, every_s=3_600, until=until, stream=out)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["leading", "stopped"]


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    until, asked = threading.Event(), threading.Event()

    def status() -> Status:
        asked.set()
        return leading()

    with os.fdopen(writing, "w") as stream:
        runner = threading.Thread(
            target=live.run_plain, args=(status,), kwargs={"every_s": 0.001, "until": until, "stream": stream}
        )
        runner.start()
        assert asked.wait(30)
        assert runner.is_alive()
        until.set()
        runner.join(30)
        assert not runner.is_alive()


class _Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("mode", "terminal", "term", "shown"),
    [
        ("auto", True, "xterm-256color", True),
        ("auto", True, "dumb", False),
        ("auto", True, None, False),
        ("auto", False, "xterm-256color", False),
        ("on", False, "dumb", True),
        ("off", True, "xterm-256color", False),
    ],
)
def test_should_show(mode: str, terminal: bool, term: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert live.should_show(mode, _Stream(terminal=terminal)) is shown  # type: ignore[arg-type]
