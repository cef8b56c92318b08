"""Records of one place that are handed out one after the other, while one moment has not come. Pure.

The claim is asked immediately before each record, and that must not cost more than the record does. So what it answers
is kept as a moment, `until`: the consumer's thread sets it when it opens the lot, and a record is handed out if it is
earlier now. The coordination's thread can only end it (`end`). A claim that is renewed meanwhile is seen when the lot
is opened again, which is often (`consumer`).

*Two threads.* `given` is raised before `until` is looked at, and `until` is ended before `given` is looked at. So
either the record is held back, or whoever gives the claim up sees that it is in hand.

*What is done* is a number, too, as long as records are finished in the order in which they were given: the first `done`
of them. Any other order goes by `progress`, record by record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from harvester.coordination.messages import Place
from harvester.coordination.progress import Progress

_NOT_COUNTED = -2  # one less than any number of records that were given


class Lot:
    """See the module's text. `in_order`: nothing that was handed out before is still open."""

    __slots__ = ("done", "given", "place", "records", "told", "until")

    def __init__(self, place: Place, records: list[Any], *, in_order: bool = True) -> None:
        self.place, self.records = place, records
        self.until = -math.inf
        self.given = 0
        self.done = 0 if in_order else _NOT_COUNTED
        self.told = 0  # how many of them progress knows

    def take(self, now: float) -> Any:
        """The next record, or None: there is none, or it must not be handed out now."""
        given = self.given
        if given < len(self.records):
            self.given = given + 1
            if now < self.until:
                return self.records[given]
            self.given = given
        return None

    def handed_out(self, clock: Callable[[], float]) -> Iterator[Any]:
        """The same for one after the other, which is quicker."""
        records, count = self.records, len(self.records)
        given = self.given
        while given < count:
            self.given = given + 1
            if clock() >= self.until:
                self.given = given
                return
            yield records[given]
            given = self.given  # some may have been taken meanwhile

    def finish(self, record: Any) -> bool:
        """Processed; whether that was all there is to note: it is the one that was given last, and none is open."""
        last = self.given - 1
        if self.done == last and self.records[last] is record:
            self.done = last + 1
            return True
        return False

    def end(self) -> None:
        """Nothing more is handed out."""
        self.until = -math.inf

    def give_back(self) -> None:
        """Nothing more ever is."""
        self.end()
        del self.records[self.given :]

    def tell(self, progress: Progress) -> None:
        """Let progress know what was handed out since, and what of it is done; it is not counted here any more."""
        given = self.given
        if self.done > self.told:
            progress.last_offset = self.records[self.done - 1].offset()
            self.told = self.done
        if self.told < given:
            for record in self.records[self.told : given]:
                progress.deliver(record.offset())
            self.told, self.done = given, _NOT_COUNTED

    def count_again(self) -> None:
        """Progress has nothing open."""
        self.done = self.told

    @property
    def rest(self) -> list[Any]:
        """What was not handed out."""
        return self.records[self.given :]


NOTHING = Lot(Place("", "", 0), [])
