"""The events that a coordinated consumer reports to its application.

Events are delivered one at a time and in order, in the thread that iterates, polls or closes, while it does so: a
handler may therefore use the same objects as the records' processing, and the consumer too, except for closing it
(`stop` is allowed). `Claimed` comes before the first record of the claim. The others come when the thread returns to
the consumer, at the latest a tenth of a second and one record later; nothing waits for them. What a handler raises is
raised by the call during which the event was delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claimed:
    """The partition is ours. `generation` fences the writes of its previous holder (`Inbox.open`): it grows with each
    claim, even across a new coordination topic.
    """

    topic: str
    partition: int
    generation: int


@dataclass(frozen=True, slots=True)
class Released:
    """It was given up in an orderly way: the next holder begins after what was committed."""

    topic: str
    partition: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """It belongs to another, or may. At least once, what is in hand may be processed twice."""

    topic: str
    partition: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing of it is handed out. Without a topic: nothing at all."""

    topic: str | None
    partition: int | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The end of `Paused`."""

    topic: str | None
    partition: int | None


@dataclass(frozen=True, slots=True)
class Blocked:
    """`max_open_records` are handed out from `offset` on, which is not committed: nothing more is handed out until it
    is.

    `age_s`: how long ago the record at `offset` was handed out.
    """

    topic: str
    partition: int
    offset: int
    open_records: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Unblocked:
    """The end of `Blocked`: the partition continues."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Kafka no longer has the record at `offset`; the partition now extends from `first` to just before `end`.

    Consuming continues at `resumed_at`: what is between is never handed out. None: the consumer ends with an error.
    """

    topic: str
    partition: int
    offset: int
    first: int
    end: int
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The handler raised `error` on the record in the last of `attempts` tries; delivered before the record is
    committed.

    `dead_letter`: whether it was written to the dead-letter topic; otherwise it is skipped.
    """

    record: Any
    error: BaseException
    attempts: int
    dead_letter: bool


Event = Claimed | Released | Lost | Paused | Resumed | Blocked | Unblocked | OutOfRange | GivenUp
EventHandler = Callable[[Event], None]
