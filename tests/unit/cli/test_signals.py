"""Handlers of signals, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys
from harvester_cli.signals import stop_on_signal

number = int(sys.argv[1])
with stop_on_signal() as stop:
    with stop._cond:  # the lock of the event, which `wait` holds at times
        signal.raise_signal(number)
    print(stop.wait(20), flush=True)
    signal.raise_signal(number)
print("not reached")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_whatever_it_interrupts_and_the_second_ends_the_process(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number))], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (-number, "True\n"), done.stderr
