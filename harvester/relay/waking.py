"""A thing to wake a thread with that waits for descriptors."""

from __future__ import annotations

import os
import threading


class Waker:
    """An eventfd with an owner: `set` after `close` does nothing, and never reaches whoever got its number since."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        """Make `fd` readable; from any thread."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make `fd` unreadable; by the thread that waits for it."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
