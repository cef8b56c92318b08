"""Finds missing records from the sequence numbers of all others, without the database.

A *stream* is what one producer of one lane sent under one term. It numbers its records 1, 2, 3, … when each is sent for
the first time; a retried record keeps its number. So a number missing below the highest one seen is a record that was
given a number and is not in the log. Such a *hole* is

    given up     a quarantine notice names it
    handed over  the stream has ended: a later term, or a later producer of the same lane and term, sends what it left
    open         the stream is the last of its lane: the record is still under way, or lost

Producers are distinguished by a number that does not reflect their order; the one whose records have the latest time in
the log is the last.

Only the last kind indicates loss, and only once the harvester has stopped with its outbox empty. Two ids under one
number (a *clash*) are never right for a reader of committed records; one id under several numbers is a repeat.

The topics must be complete: what retention or compaction removed looks like a hole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from harvester.idempotence.intervals import Intervals
from harvester.idempotence.seen import SeenIds
from harvester.origin import Origin
from harvester.verify.verdict import MAX_FINDINGS


class Stream(NamedTuple):
    """The scope of a sequence."""

    incarnation: UUID
    term: int
    lane: int
    producer: int

    @classmethod
    def of(cls, origin: Origin) -> Stream:
        """The stream to which this record's number belongs."""
        return cls(origin.incarnation, origin.term, origin.lane, origin.producer)

    def __str__(self) -> str:
        return f"term {self.term}, lane {self.lane}, producer {self.producer} of {self.incarnation}"


class Hole(StrEnum):
    """Why a number is missing."""

    GIVEN_UP = "given up"
    HANDED_OVER = "left to a successor"
    OPEN = "under way or lost"


@dataclass(frozen=True, slots=True)
class Gap:
    """Numbers first … last of a stream, all missing for the same reason."""

    stream: Stream
    first: int
    last: int
    hole: Hole

    def __str__(self) -> str:
        numbers = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.stream}: number {numbers} {self.hole}"


@dataclass(frozen=True, slots=True)
class Sequenced:
    """Counts of records. `repeats`: beyond the first of an id. `holes` counts numbers; all kinds are present.

    `clashes` counts ids beyond the first of a number; `examples` are up to MAX_FINDINGS clashes and open gaps as text.
    """

    streams: int
    records: int
    repeats: int
    clashes: int
    holes: Mapping[Hole, int]
    examples: tuple[str, ...] = ()

    @property
    def open(self) -> int:
        """Numbers that nothing explains."""
        return self.holes[Hole.OPEN]

    @property
    def holds(self) -> bool:
        """Whether every number is accounted for, by one record. False while records are under way."""
        return not (self.clashes or self.open)

    def details(self) -> dict[str, object]:
        """The figures, for scripts."""
        return {
            "streams": self.streams,
            "records": self.records,
            "repeats": self.repeats,
            "clashes": self.clashes,
            **{hole.name.lower(): count for hole, count in self.holes.items()},
            "examples": list(self.examples),
        }


class _Log:
    """One stream: numbers and ids in parallel, 16 bytes per record, and the time of the last one."""

    __slots__ = ("ids", "last_ms", "numbers")

    def __init__(self) -> None:
        self.last_ms = -1
        self.numbers = array("q")
        self.ids = array("q")


class Sequences:
    """Filled with `add` for each record that has an origin, in any order."""

    def __init__(self) -> None:
        self._logs: dict[Stream, _Log] = {}
        self._seen = SeenIds()
        self._repeats = 0

    def add(self, origin: Origin, timestamp_ms: int) -> None:
        """Add one record, with its time in the log."""
        stream = Stream.of(origin)
        log = self._logs.get(stream)
        if log is None:
            log = self._logs[stream] = _Log()
        log.numbers.append(origin.sequence)
        log.ids.append(origin.id)
        log.last_ms = max(log.last_ms, timestamp_ms)
        if not self._seen.add(origin.incarnation, origin.id):
            self._repeats += 1

    def judge(self, given_up: Iterable[tuple[Stream, int]] = ()) -> Sequenced:
        """`given_up`: numbers in quarantine notices."""
        counts = dict.fromkeys(Hole, 0)
        clashes = 0
        examples: list[str] = []
        named: dict[Stream, set[int]] = {}
        for stream, number in given_up:
            named.setdefault(stream, set()).add(number)
        last = self._last()
        for stream, log in sorted(self._logs.items()):
            found, clashing = _numbers(log)
            clashes += len(clashing)
            examples += [f"{stream}: number {number} has several ids" for number in clashing]
            unexplained = Hole.OPEN if stream in last else Hole.HANDED_OVER
            for gap in _gaps(stream, found, sorted(named.get(stream, ())), unexplained):
                counts[gap.hole] += gap.last - gap.first + 1
                if gap.hole is Hole.OPEN:
                    examples.append(str(gap))
            del examples[MAX_FINDINGS:]
        return Sequenced(
            streams=len(self._logs),
            records=sum(len(log.ids) for log in self._logs.values()),
            repeats=self._repeats,
            clashes=clashes,
            holes=counts,
            examples=tuple(examples),
        )

    def _last(self) -> set[Stream]:
        """For each lane of an incarnation's last term, the stream that nothing followed."""
        terms: dict[UUID, int] = {}
        for stream in self._logs:
            terms[stream.incarnation] = max(stream.term, terms.get(stream.incarnation, stream.term))
        last: dict[tuple[UUID, int], tuple[int, Stream]] = {}
        for stream, log in self._logs.items():
            if stream.term == terms[stream.incarnation]:
                lane, found = (stream.incarnation, stream.lane), (log.last_ms, stream)
                last[lane] = max(found, last.get(lane, found))
        return {stream for _, stream in last.values()}


def _gaps(stream: Stream, found: Intervals, given_up: Sequence[int], unexplained: Hole) -> Iterator[Gap]:
    """The holes of one stream; numbers that were given up, ascending, split a gap."""
    for first, last in found.gaps():
        begin = first
        for number in given_up[bisect_left(given_up, first) : bisect_right(given_up, last)]:
            if begin < number:
                yield Gap(stream, begin, number - 1, unexplained)
            yield Gap(stream, number, number, Hole.GIVEN_UP)
            begin = number + 1
        if begin <= last:
            yield Gap(stream, begin, last, unexplained)


def _numbers(log: _Log) -> tuple[Intervals, list[int]]:
    """The numbers that occur, with 0 so that a hole at the beginning shows, and those with several ids."""
    found = Intervals([(0, 0)])
    clashing: list[int] = []
    before: tuple[int, int] | None = None
    for number, record_id in sorted(zip(log.numbers, log.ids, strict=True)):
        if not found.add(number) and before is not None and before[1] != record_id:
            clashing.append(number)
        before = number, record_id
    return found, clashing
