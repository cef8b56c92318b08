"""Decides which record a handler gets next, and what happens to one on which the handler raised. Pure.

Records wait in *lanes*: those of a key (or of a partition, or each record alone) have their own lane, in order of
arrival. Only the head of a lane is handled, so the order of a key is kept whatever happens to its records:

    add ──▶ waiting ──▶ ready ──take──▶ in hand ──settle──▶ gone: the next of the lane is ready
                          ▲                │
                          └── at its time ─┴─retry──▶ parked: its lane waits, others go on

Of the ready heads, the one that arrived first is next, whatever its lane. So the lowest open record advances as fast as
possible, and with one worker nothing is done behind a record that is not: stopping then repeats nothing. A head that
was parked goes behind all others that are ready when its time comes: otherwise a handler that is slow to fail would
have time for nothing else.

A record belongs to the claim under which it was handed out. When the claim ends, `drop` forgets what is not in hand:
the next holder begins with the first uncommitted record, so nothing is lost. What is in hand keeps its lane until it is
settled, even against records of a later claim.
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


class FailureAction(Enum):
    """The fate of a record on which its handler raised."""

    RETRY = "it is tried again"
    DEAD_LETTER = "it goes to the dead-letter topic"
    SKIP = "it counts as processed"
    STOP = "the consumer ends"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """`attempts` tries of a record before `on_error` decides; None: it is tried forever."""

    on_error: OnError
    attempts: int | None
    backoff_s: float
    longest_backoff_s: float

    def judge(self, attempts: int) -> FailureAction:
        """The action after this many tries."""
        if self.attempts is None or attempts < self.attempts:
            return FailureAction.RETRY
        return {"dead-letter": FailureAction.DEAD_LETTER, "skip": FailureAction.SKIP}.get(
            self.on_error, FailureAction.STOP
        )

    def wait_s(self, attempts: int) -> float:
        """The delay until the next try: doubles each time."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(attempts - 1, 60))


@dataclass(slots=True, eq=False)
class PendingRecord(Generic[C]):
    """A record on its way to the handler: `number` is its order of arrival; `attempts` counts failed tries."""

    claim: C
    lane: Hashable
    record: Any
    number: int
    attempts: int = 0
    dropped: bool = False


class RecordQueues(Generic[C]):
    """The records of all claims of a consumer that were handed out and are not settled."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[PendingRecord[C]]] = {}
        self._count = 0
        self._ready: list[tuple[int, PendingRecord[C]]] = []  # a heap of lane heads
        self._barred = 0  # how many of them, as of the last `take`
        self._parked: list[tuple[float, int, PendingRecord[C]]] = []  # a heap of lane heads that wait for a time
        self.in_hand: set[PendingRecord[C]] = set()

    def add(self, claim: C, lane: Hashable, record: Any, *, in_hand: bool = False) -> PendingRecord[C]:
        """A record was handed out, behind all others of its lane; `in_hand`: it is being handled, and there are no
        others.
        """
        queued = PendingRecord(claim, lane, record, self._next_number())
        others = self._lanes.setdefault(lane, deque())
        others.append(queued)
        if in_hand:
            self.in_hand.add(queued)
        elif len(others) == 1:
            heapq.heappush(self._ready, (queued.number, queued))
        return queued

    def take(self, now: float, may_handle: Callable[[C], bool]) -> PendingRecord[C] | None:
        """The next record to handle: it is in hand until `settle` or `retry`. None if there is none now."""
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

    def settle(self, queued: PendingRecord[C]) -> None:
        """The handler is done with the record, or it has been given up: the next of its lane follows."""
        self.in_hand.remove(queued)
        lane = self._lanes[queued.lane]
        lane.popleft()
        self._advance(queued.lane)

    def retry(self, queued: PendingRecord[C], at: float, *, counts: bool = True) -> None:
        """Try the record again at that time, and nothing of its lane before; `counts`: as a failed try."""
        self.in_hand.remove(queued)
        queued.attempts += counts
        if queued.dropped:
            self._lanes[queued.lane].popleft()
            self._advance(queued.lane)
            return
        heapq.heappush(self._parked, (at, self._next_number(), queued))

    def drop(self, claim: C) -> None:
        """The claim has ended: forget its records, except those in hand, which are just not retried."""
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
        """Time until a parked record is due, at most `longest_s`."""
        return max(0.0, min(longest_s, self._parked[0][0] - now)) if self._parked else longest_s

    def holds(self, claim: C) -> bool:
        """Whether a record of the claim is in hand."""
        return any(queued.claim == claim for queued in self.in_hand)

    def waits(self, lane: Hashable) -> bool:
        """Whether the lane has any record."""
        return lane in self._lanes

    @property
    def is_empty(self) -> bool:
        return not self._lanes

    @property
    def ready(self) -> int:
        """The number of records that could be handled at once, without those that `take` had to skip."""
        return len(self._ready) - self._barred

    @property
    def parked(self) -> int:
        """The number of lanes waiting for a retry."""
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
