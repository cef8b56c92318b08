"""Decides which record a handler is given next, and what becomes of one that the handler raised on. Pure.

Records wait in *lanes*: those of a key (or of a partition, or each alone) in a lane of their own, in the order in which
they came. Only the head of a lane is handled, so the order of a key is kept whatever happens to its records:

    add ──▶ waiting ──▶ ready ──take──▶ in hand ──settle──▶ gone: the next of the lane is ready
                          ▲                │
                          └── at its time ─┴─retry──▶ parked: its lane waits, others go on

A record belongs to the claim under which it was handed out. When the claim ends, `drop` forgets what is not in hand:
the next holder begins with the first record that is not committed, so nothing is lost. What is in hand keeps its lane
until it is settled, also against records of a later claim.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

OnError = Literal["retry", "dead-letter", "skip", "stop"]
RecordOrder = Literal["key", "partition", "none"]
C = TypeVar("C", bound=Hashable)


class Verdict(Enum):
    """What is done with a record that its handler raised on."""

    RETRY = "it is tried again"
    DEAD_LETTER = "it goes to the dead-letter topic"
    SKIP = "it counts as processed"
    STOP = "the consumer ends"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """`attempts` tries of a record before `on_error` decides; None: it is tried for ever."""

    on_error: OnError
    attempts: int | None
    backoff_s: float
    longest_backoff_s: float

    def judge(self, attempts: int) -> Verdict:
        """After so many tries."""
        if self.attempts is None or attempts < self.attempts:
            return Verdict.RETRY
        return {"dead-letter": Verdict.DEAD_LETTER, "skip": Verdict.SKIP}.get(self.on_error, Verdict.STOP)

    def wait_s(self, attempts: int) -> float:
        """Until the next try: doubled with each one."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(attempts - 1, 60))


@dataclass(slots=True, eq=False)
class QueuedRecord(Generic[C]):
    """A record on its way to the handler; `attempts` is how many tries have failed."""

    claim: C
    lane: Hashable
    record: Any
    attempts: int = 0
    dropped: bool = False


class RecordQueues(Generic[C]):
    """The records of all claims of a consumer that were handed out and are not settled."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[QueuedRecord[C]]] = {}
        self._ready: deque[QueuedRecord[C]] = deque()  # heads of lanes
        self._parked: list[tuple[float, int, QueuedRecord[C]]] = []  # heads that wait for a moment, a heap
        self._parkings = 0
        self.in_hand: set[QueuedRecord[C]] = set()

    def add(self, claim: C, lane: Hashable, record: Any, *, in_hand: bool = False) -> QueuedRecord[C]:
        """It was handed out, behind all others of its lane; `in_hand`: it is handled, and there are no others."""
        queued = QueuedRecord(claim, lane, record)
        others = self._lanes.setdefault(lane, deque())
        others.append(queued)
        if in_hand:
            self.in_hand.add(queued)
        elif len(others) == 1:
            self._ready.append(queued)
        return queued

    def take(self, now: float, may_handle: Callable[[C], bool]) -> QueuedRecord[C] | None:
        """The next to be handled: it is in hand until `settle` or `retry`. None: there is none now."""
        self._wake(now)
        for _ in range(len(self._ready)):
            queued = self._ready.popleft()
            if may_handle(queued.claim):
                self.in_hand.add(queued)
                return queued
            self._ready.append(queued)
        return None

    def settle(self, queued: QueuedRecord[C]) -> None:
        """The handler is done with it, or it has been given up: the next of its lane comes."""
        self.in_hand.remove(queued)
        lane = self._lanes[queued.lane]
        lane.popleft()
        self._advance(queued.lane)

    def retry(self, queued: QueuedRecord[C], at: float) -> None:
        """Try it again then, and nothing of its lane before."""
        self.in_hand.remove(queued)
        queued.attempts += 1
        if queued.dropped:
            self._lanes[queued.lane].popleft()
            self._advance(queued.lane)
            return
        self._parkings += 1
        heapq.heappush(self._parked, (at, self._parkings, queued))

    def drop(self, claim: C) -> None:
        """The claim has ended: forget its records, but for those in hand, which are only not tried again."""
        for lane in self._lanes.values():
            for queued in lane:
                queued.dropped |= queued.claim == claim
        self._ready = deque(queued for queued in self._ready if not queued.dropped)
        self._parked = [parked for parked in self._parked if not parked[2].dropped]
        heapq.heapify(self._parked)
        for name, lane in tuple(self._lanes.items()):
            head = lane[0]
            kept = [queued for queued in lane if not queued.dropped or queued in self.in_hand]
            lane.clear()
            lane.extend(kept)
            if not kept or kept[0] is not head:
                self._advance(name)

    def wait_s(self, now: float, longest_s: float) -> float:
        """Until a parked record is due, at most so long."""
        return max(0.0, min(longest_s, self._parked[0][0] - now)) if self._parked else longest_s

    def holds(self, claim: C) -> bool:
        """Whether a record of it is in hand."""
        return any(queued.claim == claim for queued in self.in_hand)

    def waits(self, lane: Hashable) -> bool:
        """Whether a record of this lane is here."""
        return lane in self._lanes

    @property
    def is_empty(self) -> bool:
        return not self._lanes

    @property
    def ready(self) -> int:
        """How many could be handled at once, as far as their claims allow it."""
        return len(self._ready)

    @property
    def parked(self) -> int:
        """How many lanes wait for a retry."""
        return len(self._parked)

    def _advance(self, name: Hashable) -> None:
        lane = self._lanes[name]
        if lane:
            self._ready.append(lane[0])
        else:
            del self._lanes[name]

    def _wake(self, now: float) -> None:
        while self._parked and self._parked[0][0] <= now:
            self._ready.append(heapq.heappop(self._parked)[2])
