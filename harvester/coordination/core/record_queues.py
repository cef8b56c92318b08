"""Decides which record a handler is given next, and what becomes of one that the handler raised on. Pure.

Records wait in *lanes*: those of a key (or of a partition, or each alone) in a lane of their own, in the order in which
they came. Only the head of a lane is handled, so the order of a key is kept whatever happens to its records:

    add ──▶ waiting ──▶ ready ──take──▶ in hand ──settle──▶ gone: the next of the lane is ready
                          ▲                │
                          └── at its time ─┴─retry──▶ parked: its lane waits, others go on

Of the heads that are ready the one that came first is next, whichever lane it is in. So the lowest record that is open
moves on as fast as it can, and with one worker nothing is done behind a record that is not: whoever stops then has
nothing done twice. A head that was parked comes behind all that are there when its time has come: a handler that is
slow to fail would otherwise have time for nothing else.

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
    """A record on its way to the handler: `number` by when it came; `attempts` is how many tries have failed."""

    claim: C
    lane: Hashable
    record: Any
    number: int
    attempts: int = 0
    dropped: bool = False


class RecordQueues(Generic[C]):
    """The records of all claims of a consumer that were handed out and are not settled."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[QueuedRecord[C]]] = {}
        self._count = 0
        self._ready: list[tuple[int, QueuedRecord[C]]] = []  # heads of lanes, a heap
        self._barred = 0  # of them, as of the last `take`
        self._parked: list[tuple[float, int, QueuedRecord[C]]] = []  # heads that wait for a moment, a heap
        self.in_hand: set[QueuedRecord[C]] = set()

    def add(self, claim: C, lane: Hashable, record: Any, *, in_hand: bool = False) -> QueuedRecord[C]:
        """It was handed out, behind all others of its lane; `in_hand`: it is handled, and there are no others."""
        queued = QueuedRecord(claim, lane, record, self._next_number())
        others = self._lanes.setdefault(lane, deque())
        others.append(queued)
        if in_hand:
            self.in_hand.add(queued)
        elif len(others) == 1:
            heapq.heappush(self._ready, (queued.number, queued))
        return queued

    def take(self, now: float, may_handle: Callable[[C], bool]) -> QueuedRecord[C] | None:
        """The next to be handled: it is in hand until `settle` or `retry`. None: there is none now."""
        self._wake(now)
        passed = []
        found = None
        while self._ready and found is None:
            _, queued = head = heapq.heappop(self._ready)
            if may_handle(queued.claim):
                self.in_hand.add(found := queued)
            else:
                passed.append(head)
        for head in passed:
            heapq.heappush(self._ready, head)
        self._barred = len(passed)
        return found

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
        heapq.heappush(self._parked, (at, self._next_number(), queued))

    def drop(self, claim: C) -> None:
        """The claim has ended: forget its records, but for those in hand, which are only not tried again."""
        for lane in self._lanes.values():
            for queued in lane:
                queued.dropped |= queued.claim == claim
        self._ready = [head for head in self._ready if not head[1].dropped]
        heapq.heapify(self._ready)
        self._barred = 0
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
        """The number that could be handled at once, without those that `take` was told to leave."""
        return len(self._ready) - self._barred

    @property
    def parked(self) -> int:
        """How many lanes wait for a retry."""
        return len(self._parked)

    def _advance(self, name: Hashable) -> None:
        lane = self._lanes[name]
        if lane:
            heapq.heappush(self._ready, (lane[0].number, lane[0]))
        else:
            del self._lanes[name]

    def _wake(self, now: float) -> None:
        while self._parked and self._parked[0][0] <= now:
            heapq.heappush(self._ready, (self._next_number(), heapq.heappop(self._parked)[2]))

    def _next_number(self) -> int:
        self._count += 1
        return self._count
