"""Opening a lane: fence whoever had it, find out what was committed on it, purge that, and have it ready. Thin.

In this order, for one lane (rules P19, P20): the term row must be ours; `init_transactions` ends what was open under
the lane, and from here on nothing of a predecessor can be committed; the term row must be ours still, or it was a
zombie that has just fenced the shard that leads; the lane's progress is read up to the end; what it names is purged,
unless ids have started again since (another incarnation); an empty progress record is committed.

Whatever fails on the way is tried again, with a new producer, for as long as it takes, or until nobody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from harvester.delivery.lane import Lane, Lanes, Outcome
from harvester.delivery.progress import Progress, encode
from harvester.errors import BrokerError

_READ_S = 10.0
_INIT_CALLS = 20
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Leadership:
    """Under which term, held by whom, and in which incarnation of the outbox."""

    term: int
    holder: str
    incarnation: UUID


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What opening needs besides Kafka. Those of the database wait until they are done; None when the process ends."""

    term: Callable[[], tuple[int, str | None] | None]  # that the term row names, and its holder
    delete: Callable[[Sequence[int]], bool | None]
    is_over: Callable[[], bool]  # nobody wants it any more
    pause: Callable[[float], None]
    trouble: Callable[[str | None], None]
    hit: Callable[..., None]


class Superseded(Exception):
    """Nobody wants the lane any more."""


class Deposed(Exception):
    """The term row, or the lane's progress, is of somebody else."""


class Opener:
    """See the module's text. One thread only."""

    def __init__(self, lanes: Lanes, around: Surroundings) -> None:
        self._lanes, self._around = lanes, around

    def open(self, number: int, under: Leadership, published: Callable[[list[int]], None]) -> Lane:
        """`published` gets the ids that were committed, when they are purged; no others were.

        Raises Superseded or Deposed.
        """
        reason: str | None = None
        while True:
            self._check(under)
            lane = self._lanes.open(number)
            try:
                failure = self._try(lane, under, published)
            except BaseException:
                lane.close()
                raise
            if failure is None:
                if reason is not None:
                    self._around.trouble(None)
                return lane
            lane.close()
            reason = failure
            self._around.trouble(f"lane {number} cannot be opened: {reason}")
            self._around.pause(_AGAIN_S)

    def _try(self, lane: Lane, under: Leadership, published: Callable[[list[int]], None]) -> str | None:
        """One attempt; returns why it failed."""
        failure = self._fence(lane)
        if failure is not None:
            return failure
        self._check(under)
        self._around.hit("lane.fenced", lane=lane.number)
        try:
            progress = self._lanes.progress(lane.number, _READ_S)
            lane.room = self._lanes.room()
        except BrokerError as error:
            return error.message
        if progress is None or not progress.ids:
            published([])
            return None
        ids = list(progress.ids)
        if progress.incarnation != under.incarnation:
            ids = []  # they mean other rows (P9)
        elif progress.term > under.term:
            self._check(under)  # the term row is ours still: so it has gone back in time, and rather repeats than loses
            ids = []
        if ids and not self._around.delete(ids):
            raise Superseded
        published(ids)
        empty = encode(Progress(under.term, under.incarnation))
        if lane.begin() is Outcome.DONE and lane.commit(empty) is Outcome.DONE:
            return None
        return self._lanes.explain(lane) or "it is not clear whether an empty progress record was committed"

    def _fence(self, lane: Lane) -> str | None:
        for _ in range(_INIT_CALLS):
            outcome = lane.init()
            if outcome is Outcome.DONE:
                return None
            if self._around.is_over():
                raise Superseded
            if outcome is not Outcome.AGAIN:
                break
        return lane.error

    def _check(self, under: Leadership) -> None:
        if self._around.is_over():
            raise Superseded
        row: Any = self._around.term()
        if row is None or self._around.is_over():
            raise Superseded
        if row != (under.term, under.holder):
            raise Deposed(f"the term row says {row[0]} of {row[1]}, not {under.term} of {under.holder}")
