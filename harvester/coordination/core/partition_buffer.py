"""Holds the records of a held partition on their way to the application, and tracks what is processed. Pure.

Records come from Kafka in order and wait in `fetched`. They are handed out in batches: at least once everything that
has arrived, at most once what was proposed and has become ours (`owned`). A record is processed when the application
finishes it, in any order; at most once, when it is handed out. What counts is the *prefix*: everything delivered up to
its end is processed, and a successor begins after it. Offsets that Kafka never delivers (transaction markers, compacted
records) leave no holes in it.

*Two threads.* The claim is checked immediately before each record, and that must not cost more than the record itself.
So the answer is stored as a point in time, `until`: the consumer's thread sets it when it opens a batch, and a record
is handed out if that time has not come; the coordination's thread can only end it. `given` is raised before `until` is
read, and `until` is ended before `given` is read. So either the record is held back, or the thread that gives the claim
up sees that it is in hand. It may see that of a record that is held back a moment later, too: `taken` follows `given`
only once it is handed out. At most once, what is given up is therefore counted only while both are equal: a record
counted as handed out would be nobody's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.settings import Open, OutOfRangePolicy


def start(committed: int | None, last_offset: int | None, *, positioned: bool = True) -> int | None:
    """The offset at which a claim begins; None for the first existing record.

    Kafka's group offset (`committed`) counts only if the log is not certain. With a certain position it must be
    ignored: a holder that was frozen may write its own at any time after an administrator has set the position back.
    """
    if positioned and last_offset is not None:
        return last_offset + 1
    known = [offset for offset in (committed, None if last_offset is None else last_offset + 1) if offset is not None]
    return max(known, default=None)


def resume(offset: int, first: int, end: int, policy: OutOfRangePolicy) -> int | None:
    """The offset to continue with instead of `offset`, which may be outside `first` to `end`; None is an error.

    A position beyond the end is an error under any policy: the topic was recreated, or lost acknowledged records, and
    beginning below it would mean rewinding.
    """
    if first <= offset <= end:
        return offset  # it exists after all
    if offset > end or policy == "error":
        return None
    return first if policy == "earliest" else end


class Health:
    """Whether a consumer keeps up with a held partition, from one sample per interval.

    It falls behind when more records have waited to be handed out at each of the last `samples` looks than at the
    previous one, and now more wait than were handed out in all that time: at this speed it does not catch up. Records
    handed out but not processed do not count as waiting: one late commit would look like a stalled consumer. If too
    many are open, no more are handed out, and those wait.
    """

    __slots__ = ("_looks",)

    def __init__(self, samples: int = 4) -> None:
        if samples < 2:
            raise ValueError("a trend requires two samples")
        self._looks: deque[tuple[int, int]] = deque(maxlen=samples)  # next offset to hand out, end of the partition

    def look(self, next_offset: int, end_offset: int) -> None:
        """To be called once an interval with the next offset to hand out, and the partition's end."""
        self._looks.append((next_offset, end_offset))

    @property
    def falls_behind(self) -> bool:
        if len(self._looks) < (self._looks.maxlen or 0):
            return False
        waiting = [end - position for position, end in self._looks]
        handed_out = self._looks[-1][0] - self._looks[0][0]
        return all(later > earlier for earlier, later in pairwise(waiting)) and waiting[-1] > handed_out


class PartitionProgress:
    """The processed prefix under one claim. `last_offset` is its end; None before the first record."""

    __slots__ = ("_done", "last_offset")

    def __init__(self, last_offset: int | None = None) -> None:
        self.last_offset = last_offset
        self._done: dict[int, bool] = {}  # records delivered behind the prefix, in order

    def deliver(self, offset: int, *, done: bool = False) -> None:
        """A record is given to the application; offsets come in order. `done`: it is processed although an earlier one
        is not.
        """
        self._done[offset] = done

    def finish(self, *offsets: int) -> bool:
        """Records are processed. Returns whether the prefix has grown; undelivered or finished records change
        nothing.
        """
        for offset in offsets:
            if offset in self._done:
                self._done[offset] = True
        before = self.last_offset
        for first in self._leading():
            self.last_offset = first
            del self._done[first]
        return self.last_offset != before

    def _leading(self) -> list[int]:
        leading = []
        for offset, done in self._done.items():
            if not done:
                break
            leading.append(offset)
        return leading

    @property
    def first_open(self) -> int | None:
        """The record that a successor would begin with, if it was delivered."""
        return next(iter(self._done), None)

    @property
    def last_delivered(self) -> int | None:
        """The last delivered offset; the end of the prefix if nothing was delivered behind it."""
        return next(reversed(self._done), self.last_offset)

    @property
    def open_records(self) -> int:
        """The number of records delivered but not in the prefix."""
        return len(self._done)


_NOT_COUNTED = -2  # below `given` - 1, whatever `given` is


class RecordBatch:
    """Records of one partition that are handed out one after the other, until a point in time.

    `done` counts the first records that are processed, as long as they are finished in the order in which they were
    given; any other order is recorded in the partition's progress, record by record. `behind`: an earlier record is
    still open in progress, so these are not part of the processed prefix yet.
    """

    __slots__ = ("behind", "done", "ended", "given", "place", "records", "taken", "told", "until", "withdrawn")

    def __init__(self, place: GroupPartition, records: list[Any], *, behind: bool = False) -> None:
        self.place, self.records, self.behind = place, records, behind
        self.until = -math.inf
        self.ended = self.withdrawn = False
        self.given = self.taken = self.done = 0
        self.told = 0  # how many of them are recorded in progress

    def take(self, now: float) -> Any:
        """The next record, or None if there is none or it must not be handed out now."""
        given = self.given
        if given < len(self.records):
            self.given = given + 1
            if now < self.until:
                self.taken = given + 1
                return self.records[given]
            self.given = given
        return None

    def take_some(self, most: int, now: float) -> list[Any]:
        """Up to `most` next records, in equal parts of the rest; none if they must not be handed out now."""
        given, left = self.given, len(self.records) - self.given
        if not left or not most:
            return []
        parts = -(-left // most)
        self.given = end = given - (-left // parts)
        if now < self.until:
            self.taken = end
            return self.records[given:end]
        self.given = given
        return []

    def handed_out(self, clock: Callable[[], float]) -> Iterator[Any]:
        """Hands out one record after the other, which is faster."""
        records, count = self.records, len(self.records)
        given = self.given
        while given < count:
            self.given = given + 1
            if clock() >= self.until:
                self.given = given
                return
            self.taken = given + 1
            yield records[given]
            given = self.given  # some may have been taken in the meantime

    def finish(self, record: Any) -> bool:
        """A record is processed; True if nothing else needs recording: it was given last, and none is open."""
        last = self.given - 1
        if self.done == last and self.records[last] is record:
            self.done = last + 1
            return True
        return False

    def finish_some(self, records: list[Any]) -> bool:
        """The same for several: they are all the open ones."""
        done, given = self.done, self.given
        if 0 <= done == given - len(records) and self.records[done:given] == records:
            self.done = given
            return True
        return False

    def finish_offsets(self, offsets: Sequence[int]) -> bool:
        """The same by their offsets."""
        done, given = self.done, self.given
        if 0 <= done == given - len(offsets) and [each.offset() for each in self.records[done:given]] == [*offsets]:
            self.done = given
            return True
        return False

    @property
    def is_taking(self) -> bool:
        """True while the consumer's thread decides: a record is handed out next, or held back."""
        return self.taken != self.given

    def is_open(self, now: float) -> bool:
        """Whether a record of it may be handed out now."""
        return now < self.until and self.given < len(self.records)

    def begin(self, until: float) -> None:
        """Hand it out until then, unless any thread has already ended it."""
        self.until = until
        if self.ended:
            self.until = -math.inf

    def end(self) -> None:
        self.ended = True
        self.until = -math.inf

    def withdraw(self) -> None:
        """At most once: the rest will never be handed out, although it is ours."""
        self.withdrawn = True
        self.end()

    def give_back(self) -> None:
        """Nothing more of it will be handed out."""
        self.end()
        del self.records[self.given :]

    def tell(self, progress: PartitionProgress) -> None:
        """Record in progress what was handed out since, and what of it is done; it is no longer counted here."""
        given = self.given
        if self.done > self.told:
            if self.behind:
                for record in self.records[self.told : self.done]:
                    progress.deliver(record.offset(), done=True)
            else:
                progress.last_offset = self.records[self.done - 1].offset()
            self.told = self.done
        if self.told < given:
            for record in self.records[self.told : given]:
                progress.deliver(record.offset())
            self.told, self.done = given, _NOT_COUNTED

    def count_again(self, *, behind: bool) -> None:
        """Start counting at the record given next; progress knows all before it."""
        self.done, self.behind = self.told, behind

    @property
    def rest(self) -> list[Any]:
        return self.records[self.given :]


NOTHING = RecordBatch(GroupPartition("", "", 0), [])


class PartitionBuffer:
    """The records of one partition under one claim. `stopping_at`: when a release stops waiting for what is in hand."""

    def __init__(
        self,
        place: GroupPartition,
        generation: int,
        last_offset: int | None,
        *,
        token: int = 0,
        positioned: bool = True,
    ) -> None:
        self.place, self.generation, self.token = place, generation, token
        self.positioned = positioned  # whether the log is certain of `last_offset`
        self.progress = PartitionProgress(last_offset)
        self.health = Health()
        self.reported = last_offset  # last offset reported to the coordinator
        self.fetched: list[Any] = []
        self.fetched_to = last_offset
        self._begun_at: int | None = None
        self.batch: RecordBatch | None = None  # the one being handed out
        self.owned: list[RecordBatch] = []  # at most once: those that are not completely handed out, in order
        self.proposed = 0  # number of records in the proposed batch: the first of `fetched`
        self.busy = True  # something may wait, be open, or be unreported to the coordinator (`note_idle`)
        self.assigned = False  # what arrives before was fetched under an older claim
        self.full_since: float | None = None  # at least once: there is no room for more
        self.blocked = False  # this was reported
        self.stopping_at: float | None = None
        self.laid_down = False  # given up, and no handler has anything of it
        self.reason = ""  # why it is given up
        self._first_open: int | None = None
        self._first_open_since = 0.0

    def fetch(self, records: list[Any]) -> None:
        """Records arrived, in order; those that the claim already counts as processed are dropped."""
        last = self.fetched_to
        if last is not None and records[0].offset() <= last:
            records = [record for record in records if record.offset() > last]
        if records:
            self.busy = True
            self.fetched += records
            self.fetched_to = records[-1].offset()

    @property
    def is_placed(self) -> bool:
        """Whether the log alone determines where the claim begins."""
        return self.positioned and self.progress.last_offset is not None

    def begin(self, committed: int | None) -> int | None:
        """The claim is assigned to the fetching client; returns the offset to assign, None for the first record."""
        offset = start(committed, self.progress.last_offset, positioned=self.positioned)
        if offset is not None:
            self.progress.last_offset = self.fetched_to = offset - 1 if offset > 0 else None
        self.assigned = self.busy = True
        self._begun_at = offset
        return offset

    @property
    def fetched_from(self) -> int | None:
        """The offset at which the client continues fetching; None stands for the first existing record."""
        return self._begun_at if self.fetched_to is None else self.fetched_to + 1

    @property
    def next_offset(self) -> int:
        return 0 if self.fetched_to is None else self.fetched_to + 1

    @property
    def next_record(self) -> Any:
        """The next record to be handed out; None if none has arrived."""
        for batch in self.owned or ([] if self.batch is None else [self.batch]):
            given = batch.given  # the application's thread may take more meanwhile
            if given < len(batch.records):
                return batch.records[given]
        return next(iter(self.fetched), None)

    @property
    def position(self) -> int:
        """The offset of the next record to be handed out."""
        waiting = self.next_record
        return self.next_offset if waiting is None else int(waiting.offset())

    def skip_to(self, offset: int) -> None:
        """Nothing before this offset can be fetched any more."""
        self.fetched_to = offset - 1 if offset > 0 else None

    @property
    def is_empty(self) -> bool:
        batch = self.batch
        return not (self.fetched or self.owned or self.open_records or (batch is not None and batch.rest))

    def pass_over(self, offset: int) -> None:
        """Count everything before this offset as processed: there is nothing else for the application."""
        self.close_batch()
        if offset > 0 and offset - 1 > (-1 if self.progress.last_offset is None else self.progress.last_offset):
            self.progress.last_offset = self.fetched_to = offset - 1
            self.busy = True

    def note_idle(self) -> None:
        """Note whether there is nothing to do until something arrives: most of many partitions are idle.

        Never true with a batch, since the application takes and finishes records of it at the same time.
        """
        told = self.last_offset in (None, self.reported) and self.full_since is None and not self.blocked
        self.busy = not (self.batch is None and told and self._first_open is None and self.is_empty)

    # -- at least once

    def open_batch(self, room: int | None = None) -> RecordBatch:
        """A batch of everything that waits, or of as much as there is room for."""
        self.close_batch()
        records, self.fetched = self.fetched, []
        if room is not None and len(records) > room:
            records, self.fetched = records[:room], records[room:]
        self.batch = RecordBatch(self.place, records, behind=bool(self.progress.open_records))
        return self.batch

    def close_batch(self) -> None:
        """Put back what was not handed out, and record the rest of the batch record by record."""
        batch = self.batch
        if batch is None:
            return
        batch.end()
        batch.tell(self.progress)
        self.fetched = batch.rest + self.fetched
        self.batch = None

    def finish(self, *offsets: int) -> None:
        """Records are processed out of order (see `batch`)."""
        batch = self.batch
        if batch is not None:
            if batch.finish_offsets(offsets):
                return
            batch.tell(self.progress)
        self.progress.finish(*offsets)
        if batch is not None:
            batch.count_again(behind=bool(self.progress.open_records))

    @property
    def last_offset(self) -> int | None:
        """The end of the processed prefix; at most once, of what was handed out."""
        batch = self.batch
        if batch is None or batch.behind:
            return self.progress.last_offset
        if (done := batch.given if self.owned else batch.done) > batch.told:
            last: int = batch.records[done - 1].offset()
            return last
        return self.progress.last_offset

    @property
    def last_handed_out(self) -> int | None:
        """Its offset; includes what was processed or skipped before."""
        batch = self.batch
        if batch is not None and batch.given:
            last: int = batch.records[batch.given - 1].offset()
            return last
        return self.progress.last_delivered

    @property
    def open_records(self) -> int:
        """The number of records handed out but not in the prefix; at most once, those the application has not returned
        from.
        """
        batch = self.batch
        known = self.progress.open_records
        if batch is None:
            return known
        return known + batch.given - (batch.told if batch.behind else max(batch.done, batch.told))

    @property
    def first_open(self) -> int | None:
        """The offset of the first record that is handed out but not processed."""
        known, batch = self.progress.first_open, self.batch
        if known is not None or batch is None or self.owned:
            return known
        done = max(batch.done, batch.told)
        if done >= batch.given:
            return None
        offset: int = batch.records[done].offset()
        return offset

    def has_open(self, offset: int) -> bool:
        """Whether this record was handed out under this claim, and a successor would begin no later than with it."""
        first, last = self.first_open, self.last_handed_out
        return first is not None and last is not None and first <= offset <= last

    def falls_behind(self, lag: int) -> bool:
        """To be called once an interval, with the number of unprocessed records."""
        processed, handed_out = (
            0 if last_offset is None else last_offset + 1 for last_offset in (self.last_offset, self.last_handed_out)
        )
        self.health.look(handed_out, processed + lag)
        return self.health.falls_behind

    def look(self, most: int, now: float) -> None:
        """Update since when a record has been open, and since when there has been no room for more."""
        first = self.first_open
        if first != self._first_open:
            self._first_open, self._first_open_since = first, now
        if self.open_records < most:
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now

    def open(self, now: float) -> Open | None:
        """The records handed out and not processed; None if there are none. Their age is 0 until the next look."""
        first, records = self.first_open, self.open_records
        if first is None or not records:
            return None
        since = self._first_open_since if first == self._first_open else now
        return Open(records, first, max(0.0, now - since))

    # -- at most once

    def propose(self, most: int) -> int | None:
        """Choose the next batch; returns the offset of its last record, None if there is none."""
        count = min(most, len(self.fetched))
        if not count:
            return None
        self.proposed = count
        last: int = self.fetched[count - 1].offset()
        return last

    def own(self) -> RecordBatch:
        batch = RecordBatch(self.place, self.fetched[: self.proposed])
        del self.fetched[: self.proposed]
        self.proposed = 0
        self.owned.append(batch)
        return batch

    def lay_down(self) -> RecordBatch | None:
        """The application has returned from the current batch; returns what is left of it."""
        batch = self.batch
        assert batch is not None
        self.progress.last_offset = self.last_offset
        self.batch = None
        self.owned.remove(batch)
        if not batch.rest:
            return None
        left = RecordBatch(self.place, batch.rest)
        self.owned.insert(0, left)
        return left

    def give_back(self) -> int | None:
        """Hand out nothing more of what is ours; returns the last offset that was handed out, or is not ours."""
        last_offset = self.last_offset
        if last_offset is None and self.owned:
            last_offset = self.owned[0].records[0].offset() - 1
        for batch in self.owned:
            batch.give_back()
        return last_offset
