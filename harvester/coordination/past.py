"""What stands in the coordination log before the tail that is read: where places were that are silent for long. Thin.

A claim that wins by silence does not bring its position along (see `rationalizer`). It stands in the log further back,
and is found by reading the partition from the first record on; in a thread of its own, since heartbeats do not wait.
What was read is kept: a claim that has run out meanwhile, and the other places of the partition, are answered at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from harvester.clock import clock_s
from harvester.coordination.consumer_settings import ConsumerSettings
from harvester.coordination.log import CoordinationLog
from harvester.coordination.messages import Place
from harvester.coordination.rationalizer import read
from harvester.coordination.signals import Found
from harvester.coordination.world import World
from harvester.errors import HarvesterError

_LOGGER = logging.getLogger("harvester.coordination")
_POLL_S = 0.1
_LONGEST_S = 600.0
Answer = Callable[[Place, Found], None]


class Past:
    """See the module's text. `answer` is called from the thread; a question that fails has no answer."""

    def __init__(self, settings: ConsumerSettings, answer: Answer) -> None:
        self._settings, self._answer = settings, answer
        self._worlds: dict[int, World] = {}
        self._questions: queue.SimpleQueue[tuple[int, Place, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def find(self, partition: int, place: Place, generation: int) -> None:
        """Ask for the position under which the claim at this offset was won."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordination-past", daemon=True)
            self._thread.start()
        self._questions.put((partition, place, generation))

    def close(self) -> None:
        """End; nothing is answered any more."""
        self._closed = True
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (question := self._questions.get()) is not None and not self._closed:
            partition, place, generation = question
            try:
                world = self._read(partition, generation)
            except HarvesterError as error:  # the claim runs out, and is tried again
                _LOGGER.warning("the position of %s is not found: %s", place, error)
                continue
            if world.next_offset > generation and not self._closed:
                claim = world.claim(place)
                self._answer(place, Found(generation, claim.last_offset, claim.positioned))

    def _read(self, partition: int, generation: int) -> World:
        world = self._worlds.setdefault(partition, World.begin(self._settings.timing))
        if world.next_offset > generation:
            return world
        log = CoordinationLog(self._settings.coordination_topic, self._settings.kafka, lambda place, number: None)
        try:
            log.begin({partition: world})
            deadline = clock_s() + _LONGEST_S
            while world.next_offset <= generation and not self._closed and clock_s() < deadline:
                for _, offset, at_ms, value in log.poll(_POLL_S):
                    read(world, offset, at_ms, value)
        finally:
            log.close(0)
        return world
