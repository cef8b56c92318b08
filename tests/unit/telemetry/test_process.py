"""CPU out of /proc: this process, one that ended, and texts as the kernel writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harvester.telemetry.process import ProcessWatch, parse_stat

STAT = (
    "4242 (a (odd) name) S 1 4242 4242 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 987654 1000000 2500 "
    "18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0"
)
TICKS = os.sysconf("SC_CLK_TCK")


def test_a_name_with_blanks_and_parentheses_shifts_no_field() -> None:
    assert parse_stat(STAT) == (987654, 300)


@pytest.mark.parametrize("text", ["", "nonsense", "1 (x) S 1 2", STAT.replace(") S ", ") Z ")])
def test_a_zombie_or_another_text_has_no_figures(text: str) -> None:
    assert parse_stat(text) is None


def stat(monkeypatch: pytest.MonkeyPatch, *, started: int, used: int) -> None:
    text = STAT.replace("987654", str(started)).replace("250 50", f"{used} 0")
    monkeypatch.setattr(Path, "read_text", lambda _path, **_kwargs: text)


def test_cpu_is_of_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ProcessWatch()
    stat(monkeypatch, started=1, used=10 * TICKS)
    assert watch.look([4242], 1.0) == {}
    stat(monkeypatch, started=1, used=13 * TICKS)
    assert watch.look([4242], 3.0) == {4242: 150.0}
    assert watch.look([4242], 3.0) == {}  # no time has passed


def test_two_processes_with_one_pid_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ProcessWatch()
    stat(monkeypatch, started=1, used=10 * TICKS)
    watch.look([4242], 1.0)
    stat(monkeypatch, started=2, used=13 * TICKS)
    assert watch.look([4242], 3.0) == {}


def test_this_process_has_a_figure_from_the_second_look_on() -> None:
    watch = ProcessWatch()
    assert watch.look([os.getpid()], 10.0) == {}
    assert set(watch.look([os.getpid()], 11.0)) == {os.getpid()}


def test_a_process_that_ended_is_left_out_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ProcessWatch()
    both = [child.pid, os.getpid()]
    watch.look(both, 1.0)
    assert set(watch.look(both, 2.0)) == set(both)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert set(watch.look(both, 3.0)) == {os.getpid()}
    child.wait()
    assert set(watch.look(both, 4.0)) == {os.getpid()}
