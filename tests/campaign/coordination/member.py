"""A consumer of a campaign, as a process: `python -m tests.campaign.coordination.member JSON`. SIGTERM ends it."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from harvester.clock import clock_s
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.events import Event, GivenUp, Lost
from harvester.coordination.settings import ConsumerSettings
from harvester.errors import BrokerUnavailable

from .notes import Notebook

_POLL_S = 0.02
_LOOK_S = 0.01
_AGAIN_S = 0.2
_WORK_S = 0.01
_HANDLED_S = 0.002
_TWICE_EACH, _POISON_EACH = 11, 97
_HELD_BACK_EACH = 50  # so many records of a partition


class Watch:
    """Notes what is held, on a thread of its own: the one that consumes may wait for a broker that is away."""

    def __init__(self, consumer: CoordinatedConsumer, notes: Notebook) -> None:
        self.generations: dict[int, int] = {}  # of all that was ever held
        self._consumer, self._notes = consumer, notes
        self._held: dict[int, int] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Note what has changed."""
        with self._lock:
            held = {partition: generation for (_, partition), generation in self._consumer.claims().items()}
            if held != self._held:
                self.generations |= held
                self._held = held
                self._notes.holds(held)

    def end(self) -> None:
        """Nothing is held any more."""
        self._ended.set()
        self._thread.join()
        self._notes.holds({})

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.look()


class Work:
    """What is done with a record. At most once that takes a moment, so that batches wait; at least once some records
    are committed long after those behind them.
    """

    def __init__(self, consumer: CoordinatedConsumer, stop: threading.Event, held_back_s: float) -> None:
        self._consumer, self._stop, self._held_back_s = consumer, stop, held_back_s
        self._held_back: deque[tuple[float, Any]] = deque()

    def do(self, record: Any) -> None:
        """Process it."""
        if self._consumer.settings.at_most_once:
            self._stop.wait(_WORK_S)
        elif self._held_back_s and record.offset() % _HELD_BACK_EACH == 0:
            self._held_back.append((clock_s() + self._held_back_s, record))
            return
        self._consumer.commit(record)

    def catch_up(self) -> None:
        """Commit what is due."""
        while self._held_back and self._held_back[0][0] <= clock_s():
            self._consumer.commit(self._held_back.popleft()[1])


class Handler:
    """What is done with a record by several threads: it takes a moment, is tried twice at times, or never succeeds."""

    def __init__(self, watch: Watch, notes: Notebook) -> None:
        self._watch, self._notes = watch, notes
        self._tried: set[tuple[int, int, int]] = set()

    def __call__(self, record: Any) -> None:
        """Raises what `on_error` is for."""
        self._watch.look()
        partition, offset = record.partition(), record.offset()
        generation = self._watch.generations.get(partition, -1)
        if is_poison(offset):
            raise ValueError("poison")
        if offset % _TWICE_EACH == 0 and (partition, offset, generation) not in self._tried:
            self._tried.add((partition, offset, generation))
            raise ConnectionError("not now")
        self._notes.has(partition, offset, generation)
        time.sleep(_HANDLED_S)
        self._notes.done(partition, offset)


def is_poison(offset: int) -> bool:
    """Whether no handler takes it."""
    return offset % _POISON_EACH == _POISON_EACH - 1


def handle(settings: ConsumerSettings, notes: Notebook, stop: threading.Event) -> None:
    """With handlers in threads, until told to stop."""
    consumer = _begin(settings, notes, stop)
    notes.begins()
    watch = Watch(consumer, notes)

    def await_stop() -> None:
        stop.wait()
        consumer.stop()

    threading.Thread(target=await_stop, daemon=True).start()
    try:
        consumer.run(Handler(watch, notes))
    finally:
        watch.end()
    notes.ends()


def consume(settings: ConsumerSettings, notes: Notebook, stop: threading.Event, held_back_s: float) -> None:
    """Until told to stop."""
    with _begin(settings, notes, stop) as consumer:
        notes.begins()
        watch, work = Watch(consumer, notes), Work(consumer, stop, held_back_s)
        while not stop.is_set():
            work.catch_up()
            record = consumer.poll(_POLL_S)
            if record is not None:
                watch.look()
                # At most once, a record may be ours when the claim is not any more.
                notes.has(record.partition(), record.offset(), watch.generations.get(record.partition(), -1))
                work.do(record)
        watch.end()  # nothing is done any more; what is left is to tell the others
    notes.ends()


def _begin(settings: ConsumerSettings, notes: Notebook, stop: threading.Event) -> CoordinatedConsumer:
    """As whoever runs it would: tried again while the broker is away."""

    def note(event: Event) -> None:
        if isinstance(event, Lost):
            notes.loses(event.partition, event.generation)
        if isinstance(event, GivenUp):
            notes.done(event.record.partition(), event.record.offset())

    while True:
        try:
            return CoordinatedConsumer(settings, on_event=note)
        except BrokerUnavailable:
            if stop.wait(_AGAIN_S):
                raise


def _main() -> None:
    faulthandler.register(signal.SIGUSR1)
    given: dict[str, Any] = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = ConsumerSettings(**{**given["settings"], "topics": tuple(given["settings"]["topics"])})
    notes = Notebook(Path(given["notes"]))
    if settings.workers > 1:
        handle(settings, notes, stop)
    else:
        consume(settings, notes, stop, given["held_back_s"])


if __name__ == "__main__":
    _main()
