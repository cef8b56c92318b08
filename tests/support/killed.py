"""A consumer that kills itself at a named step: python -m tests.support.killed SETTINGS STEP TAKEN

SETTINGS is JSON. Each value that its handler takes is a line of the file TAKEN, written before the handler returns.
A step: `handling` (its tenth record is in hand), `handled` (it is taken, and not committed) or `parked` (a record waits
for its retry), each two heartbeats later, so that the topic says what it believes; `before` or `after` a `dead letter`;
`before` or `after` the kind of a message to the coordination topic.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.dead_letters import DeadLetter, DeadLetterWriter
from harvester.coordination.log import CoordinationLog
from harvester.coordination.settings import ConsumerSettings
from tests.support.coordinated import heartbeats
from tests.support.wait import eventually

POISON = "3-4"
NTH = 10
LOG_PARTITIONS = 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Handler:
    """Takes records, but for the poison; stops the consumer where that leads to the step, which may be in a batch."""

    def __init__(self, step: str, taken: Path) -> None:
        self.step, self.taken = step, taken
        self.count = 0
        self.has_failed = False
        self.consumer: CoordinatedConsumer

    def __call__(self, record: Any) -> None:
        value = record.value().decode()
        if value == POISON:
            if not self.has_failed and self.step == "parked":
                threading.Thread(target=self.die_later).start()  # it may be the last record of all
            self.has_failed = True
            raise ValueError(value)
        self.count += 1
        if self.count == NTH and self.step == "handling":
            self.die_later()
        with self.taken.open("a") as file:
            file.write(f"{value}\n")
        if self.count == NTH and self.step == "handled":
            self.die_later()
        leaves = self.step.endswith("ReleasingPartition") or (
            self.step.endswith("ReturningMessages") and self.consumer._batch.rest
        )
        if leaves and self.count >= NTH:
            self.consumer.stop()

    def die_later(self) -> None:
        later = heartbeats(self.consumer) + 2 * LOG_PARTITIONS
        eventually(lambda: heartbeats(self.consumer) >= later, what="two heartbeats")
        die()


def die_at_a_message(moment: str, kind: str) -> None:
    """Once the handler may have taken something: the first heartbeat of a claim comes before any record."""
    inner = CoordinationLog.append
    seen = 0

    def append(self: CoordinationLog, partition: int, message: Any, arrived: Future[bool] | None = None) -> int:
        nonlocal seen
        is_it = type(message).__name__ == kind and (kind != "Heartbeat" or message.last_offset is not None)
        seen += is_it
        if is_it and moment == "before":
            die()
        size = inner(self, partition, message, arrived)
        if is_it:
            self._writer.flush(10)
            die()
        return size

    CoordinationLog.append = append  # type: ignore[method-assign]


def die_at_a_dead_letter(moment: str) -> None:
    inner = DeadLetterWriter.send

    def send(self: DeadLetterWriter, letter: DeadLetter) -> None:
        if moment == "after":
            inner(self, letter)
        die()

    DeadLetterWriter.send = send  # type: ignore[method-assign]


def main() -> None:
    given, step, taken = sys.argv[1:]
    moment, _, what = step.partition(" ")
    if what == "dead letter":
        die_at_a_dead_letter(moment)
    elif what:
        die_at_a_message(moment, what)
    handler = Handler(step, Path(taken))
    handler.consumer = CoordinatedConsumer(ConsumerSettings(**json.loads(given)))
    handler.consumer.run(handler)


if __name__ == "__main__":
    main()
