"""Opening a lane: what its last owner committed is known and purged before anything is sent on it (P19, P20).

Theory. The term row must be ours; `init_transactions` ends what was open under the lane, after which a predecessor can
commit nothing; the term row must still be ours, otherwise a zombie has just fenced the shard that leads; the topic must
be the one that the term row records, since another tells nothing of what was committed (P22); the lane's progress is
read up to its end; what it names is purged; an empty progress record is committed. Whatever fails on the way is retried
with a new producer until it succeeds or the lane is no longer wanted.

*While Kafka cannot end the last transaction*, since a partition of it has no leader or too few replicas, it answers
"concurrent", and opening waits. A spare transactional id would not help: that answer fences nobody, so the last owner,
if it still lives, could commit under the old id as soon as the marker is written.

*After a change of server* (P49), or after ids have started again, the progress is of another incarnation, and its ids
may have been given to other rows. Then only rows with matching sums, which are unchanged, are purged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from harvester.delivery.lane import Lane, Lanes, TransactionOutcome
from harvester.delivery.progress import Progress, encode, same_rows
from harvester.errors import HarvesterError
from harvester.record import RowVersions

_READ_S = 10.0
_INIT_CALLS = 20
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Leadership:
    """The term, its holder, and the incarnation of the outbox."""

    term: int
    holder: str
    incarnation: UUID


_Row = tuple[int, bytes | None, bytes]  # id, key, row as the server sent it


class LaneHost(Protocol):
    """The caller for whom a lane is opened. Database requests block; they return None or False when the process
    ends.
    """

    def term_row(self) -> tuple[int, str | None] | None: ...  # term and holder in the term row
    def progress_topic(self) -> str | None: ...  # the id that the progress topic must have; see `check_recorded`
    def delete(self, rows: RowVersions) -> bool: ...  # purge these rows
    # Purge the rows that `same` chooses, except those that an older row of their key stays ahead of; returns their ids.
    # `incarnation`: the one of their records.
    def delete_same(
        self, ids: Sequence[int], same: Callable[[list[_Row]], RowVersions], incarnation: UUID
    ) -> list[int] | None: ...
    def is_over(self) -> bool: ...  # the lane is no longer wanted
    def pause(self, seconds: float) -> None: ...  # before the next attempt
    def trouble(self, text: str | None) -> None: ...  # why the lane cannot be opened; None when that is over
    def fenced(self, lane: int) -> None: ...  # this lane's predecessor can no longer commit


class Superseded(Exception):
    """The lane is no longer wanted."""


class Deposed(Exception):
    """The term row, or the lane's progress, belongs to another leader."""


class Opener:
    """Opens lanes for a host: fences, checks the term, purges what the last owner committed. One thread only."""

    def __init__(self, lanes: Lanes, host: LaneHost) -> None:
        self._lanes, self._host = lanes, host

    def open(self, number: int, under: Leadership, published: Callable[[list[int]], None]) -> Lane:
        """`published` receives exactly the ids that were committed, once they are purged.

        Raises Superseded or Deposed.
        """
        in_trouble = False
        try:
            while True:
                self._check(under)
                lane = self._lanes.open(number)
                try:
                    failure = self._try(lane, under, published)
                except BaseException:
                    lane.close()
                    raise
                if failure is None:
                    return lane
                lane.close()
                in_trouble = True
                self._host.trouble(f"lane {number} cannot be opened: {failure}")
                self._host.pause(_AGAIN_S)
        finally:
            if in_trouble:  # also if the lane is no longer wanted: its next opener may succeed at once
                self._host.trouble(None)

    def _try(self, lane: Lane, under: Leadership, published: Callable[[list[int]], None]) -> str | None:
        """One attempt; returns why it failed."""
        failure = self._fence(lane)
        if failure is not None:
            return failure
        self._check(under)
        self._host.fenced(lane.number)
        recorded = self._host.progress_topic()
        try:
            self._lanes.check_topic(recorded)
            progress = self._lanes.progress(lane.number, _READ_S)
            if progress is None:
                self._lanes.check_topic(recorded)  # it may have been recreated just before it was read
            lane.room = self._lanes.room()
        except HarvesterError as error:
            return f"{error.message}; {error.hint}" if error.hint else error.message
        if progress is None or not progress.ids:
            published([])
            return None
        if progress.term > under.term:
            self._check(under)  # the term row is still ours, so it has gone back in time
        published(self._purge(progress, under))
        empty = encode(Progress(under.term, under.incarnation))
        if lane.begin() is TransactionOutcome.DONE and lane.commit(empty) is TransactionOutcome.DONE:
            return None
        return self._lanes.explain(lane) or "it is unclear whether an empty progress record was committed"

    def _purge(self, progress: Progress, under: Leadership) -> list[int]:
        """Purge the rows that the lane has committed; returns their ids. Raises Superseded."""
        ids = list(progress.ids)
        if progress.incarnation == under.incarnation and progress.term <= under.term:
            if not self._host.delete(progress.rows):
                raise Superseded
            return ids
        if not progress.sums:
            return []  # the ids may mean other rows (P9); repeat rather than lose
        same = self._host.delete_same(ids, partial(same_rows, progress), progress.incarnation)
        if same is None:
            raise Superseded
        return same

    def _fence(self, lane: Lane) -> str | None:
        for _ in range(_INIT_CALLS):
            outcome = lane.init()
            if outcome is TransactionOutcome.DONE:
                return None
            if self._host.is_over():
                raise Superseded
            if outcome is not TransactionOutcome.AGAIN:
                break
        return self._lanes.explain(lane)

    def _check(self, under: Leadership) -> None:
        row: Any = None if self._host.is_over() else self._host.term_row()
        if row is None or self._host.is_over():
            raise Superseded
        if row != (under.term, under.holder):
            raise Deposed(f"the term row has term {row[0]} of {row[1]}, not {under.term} of {under.holder}")
