"""CPU and memory out of /proc: this process, one that ended, and texts as the kernel writes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harvester.telemetry.process import ProcessSample, ProcessWatch, cpu_percent, parse_stat, sample

STAT = (
    "4242 (a (odd) name) S 1 4242 4242 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 987654 1000000 2500 "
    "18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0"
)
TICKS = os.sysconf("SC_CLK_TCK")


def test_a_name_with_blanks_and_parentheses_shifts_no_field() -> None:
    assert parse_stat(STAT) == ProcessSample(
        started_ticks=987654, cpu_s=300 / TICKS, rss_bytes=2500 * os.sysconf("SC_PAGE_SIZE")
    )


@pytest.mark.parametrize("text", ["", "nonsense", "1 (x) S 1 2", STAT.replace(") S ", ") Z ")])
def test_a_zombie_or_another_text_has_no_figures(text: str) -> None:
    assert parse_stat(text) is None


def test_cpu_is_of_one_core() -> None:
    earlier, later = ProcessSample(1, 10.0, 0), ProcessSample(1, 13.0, 0)
    assert cpu_percent(earlier, later, 2.0) == 150.0


def test_two_processes_with_one_pid_are_not_compared() -> None:
    assert cpu_percent(ProcessSample(1, 10.0, 0), ProcessSample(2, 13.0, 0), 2.0) is None
    assert cpu_percent(ProcessSample(1, 10.0, 0), ProcessSample(1, 13.0, 0), 0.0) is None


def test_this_process_uses_memory_and_at_the_second_look_cpu() -> None:
    watch = ProcessWatch()
    first = watch.look([os.getpid()], 10.0)[os.getpid()]
    assert first.rss_bytes > 1_000_000
    assert first.cpu_percent is None
    assert watch.look([os.getpid()], 11.0)[os.getpid()].cpu_percent is not None


def test_a_process_that_ended_is_left_out_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ProcessWatch()
    assert set(watch.look([child.pid, os.getpid()], 1.0)) == {child.pid, os.getpid()}
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert sample(child.pid) is None
    child.wait()
    assert set(watch.look([child.pid, os.getpid()], 2.0)) == {os.getpid()}
