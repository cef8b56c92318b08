"""Decides which cuts through the ids of an incarnation a lake has in full. Pure.

A record's low watermark W says that when the relay stamped it, every id below W was settled: published and acknowledged
in whichever topic, or given up, and none could appear there any more. A *cut* at W is a claim about the lake: of all
ids below W, it has every record that there is.

*Theory.* That the lake has read a record with W does not make W a cut, although every id below W was in Kafka before.
The ends of a batch are not read at one moment: brokers are asked one after the other.

    end of p is read: 7 │ 5 is appended to p at 7, and acknowledged │ 6 is stamped with W = 6, appended to q at 3
                        │                                           │ end of q is read: 4

The batch has the record with W = 6, and lacks 5. Nor do ends that were read at one moment suffice. A batch reads up to
the last *stable* offset, before the first transaction that is open; 5 may be committed behind a transaction of another
lane. And a batch may end earlier, at its maximum number of records.

So the high watermarks of all partitions are read once more, after the batch's ends were fixed. Each record with an id
below W is below them: it was acknowledged by all replicas before W was stamped, and W before the batch's ends. A high
watermark does not recede. (The last stable offset would not do, by the same example.) Once a batch, this one or a later
one, ends at or above all of these offsets, the lake has every record below W that Kafka had. Clocks play no part. The
brokers are those to which the relay publishes: a mirror has records in another order.

One such candidate waits at a time. It says something about Kafka, and not about the batch in which it arose; so it
stays true if that batch is repeated, and may be proven again.

If the topics that are read have changed since, the candidate is dropped: a topic that was added may have older ids.
So is one that waits for offsets which a partition no longer has, as it was recreated or has lost its end: it might wait
for ever. That is only possible at a start, since a recreated topic ends the job, so the first batch of each run asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

Offsets = Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class LowMark:
    """A low watermark: every id below `id` was settled. `at_us`: when a record sent with it was created."""

    id: int
    at_us: int


Marks = Mapping[str, LowMark]
"""By incarnation."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """All ids below these watermarks are below these offsets in Kafka."""

    marks: Marks
    ends: Offsets


@dataclass(frozen=True, slots=True)
class CutState:
    """The cuts up to some batch. `proven`: the highest id by incarnation."""

    proven: Mapping[str, int] = field(default_factory=dict)
    waiting: Candidate | None = None

    def after(self, marks: Marks, read: Offsets, ends: Offsets) -> tuple[CutState, dict[str, LowMark]]:
        """The state after a batch, and the cuts that the lake has since.

        `marks`: the highest low watermarks of its records. `read`: its ends. `ends`: the high watermarks of all
        partitions of the topics, read after the batch's ends were fixed.
        """
        state, found = self._released(read)
        if state.waiting is not None and ends and not _reaches(ends, state.waiting.ends):
            state = replace(state, waiting=None)
        higher = state._higher(marks)
        if _covers(read, ends):
            found |= higher
            return CutState({**state.proven, **_ids(higher)}), found
        if state.waiting is None and higher:
            state = replace(state, waiting=Candidate(higher, ends))
        return state, found

    def needs_ends(self, marks: Marks, read: Offsets, *, started: bool = False) -> bool:
        """Whether `ends` can change what `after` decides: not while an earlier candidate waits, nor without marks.

        `started`: this is the first batch of a run; a candidate may be void since the last one.
        """
        state, _ = self._released(read)
        return bool(state._higher(marks)) if state.waiting is None else started

    def _released(self, read: Offsets) -> tuple[CutState, dict[str, LowMark]]:
        """The state without a candidate that is proven or void, and what it proves."""
        waiting = self.waiting
        if waiting is None or (_topics(waiting.ends) == _topics(read) and not _covers(read, waiting.ends)):
            return self, {}
        found = self._higher(waiting.marks) if _covers(read, waiting.ends) else {}
        return CutState({**self.proven, **_ids(found)}), found

    def _higher(self, marks: Marks) -> dict[str, LowMark]:
        known = self.proven
        return {name: mark for name, mark in marks.items() if name not in known or mark.id > known[name]}

    def to_json(self) -> Any:
        """The stored form; `proven` is in the table `cuts`."""
        if self.waiting is None:
            return None
        marks = {name: [mark.id, mark.at_us] for name, mark in self.waiting.marks.items()}
        return {"marks": marks, "ends": [[*place, end] for place, end in self.waiting.ends.items()]}

    @classmethod
    def restored(cls, text: str | None, proven: Mapping[str, int]) -> CutState:
        """From the text of a file that has `to_json` as `cuts`; without a candidate if it has none."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(text or "")["cuts"]
            marks = {str(name): LowMark(int(low), int(at_us)) for name, (low, at_us) in stored["marks"].items()}
            ends = {(str(topic), int(partition)): int(end) for topic, partition, end in stored["ends"]}
            return cls(proven, Candidate(marks, ends))
        return cls(proven)


def _ids(marks: Marks) -> dict[str, int]:
    return {name: mark.id for name, mark in marks.items()}


def _covers(read: Offsets, ends: Offsets) -> bool:
    """Whether a lake that has read up to `read` has everything below `ends`. A new partition was empty before."""
    return _topics(read) == _topics(ends) and _reaches(read, ends)


def _reaches(offsets: Offsets, ends: Offsets) -> bool:
    return all(offsets.get(place, 0) >= end for place, end in ends.items())


def _topics(offsets: Offsets) -> set[str]:
    return {topic for topic, _ in offsets}
