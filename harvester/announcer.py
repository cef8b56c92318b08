"""Delivers events to the host: one at a time, in order, on one thread; a handler's exception is logged and ignored."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter

from harvester.events import Event, EventHandler

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Announcer(threading.Thread):
    """Queues events without limit, so that announcing an event never waits for a handler."""

    def __init__(self, handler: EventHandler | None, log: Log) -> None:
        super().__init__(name="harvester-events", daemon=True)
        self.handler = handler
        self._log = log
        self._queue: queue.SimpleQueue[tuple[Event | None, threading.Event]] = queue.SimpleQueue()
        self.counts: Counter[type[Event]] = Counter()  # of announced events, by kind

    def announce(self, event: Event) -> threading.Event:
        """Queue the event; the returned `threading.Event` is set when its handler has returned."""
        done = threading.Event()
        self.counts[type(event)] += 1
        self._queue.put((event, done))
        return done

    def stop(self, timeout_s: float) -> None:
        """Deliver the queued events, then end the thread; a hanging handler is abandoned."""
        done = threading.Event()
        self._queue.put((None, done))
        if threading.current_thread() is not self:
            done.wait(timeout_s)

    def run(self) -> None:
        while True:
            event, done = self._queue.get()
            try:
                if event is not None and self.handler is not None:
                    self.handler(event)
            except Exception:  # noqa: BLE001 - a handler is the host's code: this is its top frame
                self._log.exception("the event handler failed on %s", type(event).__name__)
            finally:
                done.set()
            if event is None:
                return
