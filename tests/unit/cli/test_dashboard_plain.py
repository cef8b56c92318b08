"""The lines where there is no terminal, and the choice between the two."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harvester_cli import main
from harvester_cli.dashboard import live

from harvester.errors import SchemaError
from harvester.status import State, Status
from harvester.telemetry.logging import LOGGER, configure, logger_for
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


@pytest.fixture
def own_logger() -> Iterator[None]:
    """The handlers and the level of the process's logger are as before."""
    logger = logging.getLogger(LOGGER)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.mark.usefixtures("own_logger")
def test_where_all_goes_to_one_place_the_figures_are_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    assert live.one_output()
    out, log, until = io.StringIO(), io.StringIO(), threading.Event()
    until.set()
    logger = logger_for(configure("info", json=True, name="billing-1", stream=log), "billing-1")
    waiting = replace(fenced(), problem='no "broker"', waits_for="the leader is silent")
    live.run_plain(lambda: waiting, until=until, stream=out, log=logger)
    assert out.getvalue() == ""
    line = json.loads(log.getvalue())
    assert (line["level"], line["message"], line["shards"]) == ("info", "status: fenced", "8/8")
    assert (line["problem"], line["waits_for"]) == ('no "broker"', "the leader is silent")


@pytest.mark.usefixtures("own_logger")
def test_a_start_that_fails_under_a_service_manager_says_so_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    main._print_error(SchemaError("there is no outbox", hint="run `harvester init`"))
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"], line["hint"]) == ("error", "there is no outbox", "run `harvester init`")


def test_files_are_one_place_where_they_are_the_same(tmp_path: Path) -> None:
    program = "import sys; from harvester_cli.dashboard.live import one_output; print(one_output(), file=sys.stderr)"
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    for same in (True, False):
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            log = out if same else err
            subprocess.run([sys.executable, "-c", program], stdout=out, stderr=log, env=environment, check=True)
        assert (tmp_path / ("out" if same else "err")).read_text() == f"{same}\n"


def test_lines_that_cannot_be_written_end_nothing() -> None:
    shown: list[int] = []
    until = threading.Event()
    with Path("/dev/full").open("w") as full:

        def show() -> None:
            shown.append(1)
            print("a line", file=full, flush=True)

        thread = threading.Thread(target=live.run_lines, args=(show, full), kwargs={"every_s": 0.0, "until": until})
        thread.start()
        thread.join(0.5)
        assert thread.is_alive(), "the run goes on"
        until.set()
        thread.join(10)
    assert not thread.is_alive()
    assert shown == [1]
