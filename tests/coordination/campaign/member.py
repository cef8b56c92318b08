"""A consumer of a campaign, as a process: `python -m tests.coordination.campaign.member JSON`. SIGTERM ends it."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.errors import BrokerUnavailable

from .notes import Notebook

_POLL_S = 0.02
_LOOK_S = 0.01
_AGAIN_S = 0.2


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


def consume(settings: ConsumerSettings, notes: Notebook, stop: threading.Event) -> None:
    """Until told to stop."""
    with _begin(settings, stop) as consumer:
        notes.begins()
        watch = Watch(consumer, notes)
        while not stop.is_set():
            record = consumer.poll(_POLL_S)
            if record is not None:
                watch.look()
                # At most once, a record may be ours when the claim is not any more.
                notes.has(record.partition(), record.offset(), watch.generations.get(record.partition(), -1))
                consumer.commit(record)
        watch.end()  # nothing is done any more; what is left is to tell the others
    notes.ends()


def _begin(settings: ConsumerSettings, stop: threading.Event) -> CoordinatedConsumer:
    """As whoever runs it would: tried again while the broker is away."""
    while True:
        try:
            return CoordinatedConsumer(settings)
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
    consume(settings, Notebook(Path(given["notes"])), stop)


if __name__ == "__main__":
    _main()
