"""Handlers of signals.

The handler of a signal runs in the main thread, between any two steps of whatever that was doing. So it must take no
lock: the code below it may hold the same one, and would never go on to give it back. `threading.Event.set` takes one,
and so does the start of a `threading.Thread`.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def aside(call: Callable[[], object]) -> None:
    """Run it in a thread of its own, and return at once: for handlers of signals."""
    _thread.start_new_thread(call, ())


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second acts as ever."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        aside(stop.set)
        restore()

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
