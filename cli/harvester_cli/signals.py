"""Signal handlers.

A signal handler runs in the main thread, between any two steps of whatever that was doing. So it must take no lock: the
interrupted code may hold the same one, and would never continue to release it. `threading.Event.set` takes one, and so
does starting a `threading.Thread`.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def aside(call: Callable[[], object]) -> None:
    """Run it in a separate thread, and return at once: for signal handlers."""
    _thread.start_new_thread(call, ())


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second has its usual effect."""
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
