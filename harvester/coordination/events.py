"""What a coordinated consumer tells its application.

Events are delivered one at a time and in order, in the thread that iterates, polls or closes, while it does: so a
handler may use what the records are used with, and the consumer too, but for closing it (`stop` does). `Claimed` comes
before the first record of the claim. The others come when the thread returns to the consumer, at the latest a tenth of
a second and one record after that; nothing waits for them. What a handler raises comes out of the call during which it
was told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claimed:
    """The partition is ours. `generation` fences the writes of whoever held it before (`Inbox.open`): it grows with
    each claim, also over a new coordination topic.
    """

    topic: str
    partition: int
    generation: int


@dataclass(frozen=True, slots=True)
class Released:
    """It was given up in good order: what was committed is where the next holder begins."""

    topic: str
    partition: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """It is another's, or may be. What is in hand may be processed twice, at least once."""

    topic: str
    partition: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing of it is handed out. Without a topic: of anything."""

    topic: str | None
    partition: int | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The end of `Paused`."""

    topic: str | None
    partition: int | None


@dataclass(frozen=True, slots=True)
class Blocked:
    """`max_open_records` are handed out from `offset` on, which is not committed: nothing more is, until it is.

    `age_s`: how long ago the record at `offset` was handed out.
    """

    topic: str
    partition: int
    offset: int
    open_records: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Unblocked:
    """The end of `Blocked`: the partition goes on."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Kafka no longer has the record at `offset`; the partition goes from `first` to before `end`.

    Consuming goes on at `resumed_at`: what lies between is never handed out. None: the consumer ends with an error.
    """

    topic: str
    partition: int
    offset: int
    first: int
    end: int
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The handler raised `error` on the record for the last of `attempts` times; told before the record is committed.

    `dead_letter`: whether it stands in the dead-letter topic; else it is skipped.
    """

    record: Any
    error: BaseException
    attempts: int
    dead_letter: bool


Event = Claimed | Released | Lost | Paused | Resumed | Blocked | Unblocked | OutOfRange | GivenUp
EventHandler = Callable[[Event], None]
