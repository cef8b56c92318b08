"""What of a held place is on its way to the application, or in its hands. Thin data: no I/O.

Records come from Kafka in order and wait in `fetched`. They are handed out in lots: at least once all that is there, at
most once what was proposed and is ours since (`owned`). At most once a record is processed when it is handed out.
"""

from __future__ import annotations

from typing import Any

from harvester.coordination.figures import Open
from harvester.coordination.health import Health
from harvester.coordination.lot import Lot
from harvester.coordination.messages import Place
from harvester.coordination.progress import Progress


class Hands:
    """Of one place under one claim. `stopping_at`: when a release stops waiting for what is in hand."""

    def __init__(
        self, place: Place, generation: int, last_offset: int | None, *, token: int = 0, positioned: bool = True
    ) -> None:
        self.place, self.generation, self.token = place, generation, token
        self.positioned = positioned  # whether the log is certain of `last_offset`
        self.progress = Progress(last_offset)
        self.health = Health()
        self.reported = last_offset  # to the coordinator
        self.fetched: list[Any] = []
        self.fetched_to = last_offset
        self.lot: Lot | None = None  # the one that is being handed out
        self.owned: list[Lot] = []  # at most once: those of which something may still be handed out, in order
        self.proposed = 0  # records of the batch that is proposed: the first of `fetched`
        self.assigned = False  # what came before was fetched under an older claim
        self.full_since: float | None = None  # at least once: there is no room for more
        self.blocked = False  # that was said
        self.stopping_at: float | None = None
        self.reason = ""  # why it is given up
        self._first_open: int | None = None
        self._first_open_since = 0.0

    def fetch(self, records: list[Any]) -> None:
        """Records came, in order; those that the claim already counts as processed are dropped."""
        last = self.fetched_to
        if last is not None and records[0].offset() <= last:
            records = [record for record in records if record.offset() > last]
        if records:
            self.fetched += records
            self.fetched_to = records[-1].offset()

    @property
    def is_empty(self) -> bool:
        """Nothing waits, and nothing is in hand."""
        lot = self.lot
        return not (self.fetched or self.owned or self.open_records or (lot is not None and lot.rest))

    def pass_over(self, offset: int) -> None:
        """Count everything before this offset as processed: there is nothing else for the application."""
        self.close_lot()
        if offset > 0 and offset - 1 > (-1 if self.progress.last_offset is None else self.progress.last_offset):
            self.progress.last_offset = self.fetched_to = offset - 1

    # -- at least once

    def open_lot(self, room: int | None = None) -> Lot:
        """All that waits, to be handed out, or as much as there is room for."""
        self.close_lot()
        records, self.fetched = self.fetched, []
        if room is not None and len(records) > room:
            records, self.fetched = records[:room], records[room:]
        self.lot = Lot(self.place, records, in_order=not self.progress.open_records)
        return self.lot

    def close_lot(self) -> None:
        """Put back what was not handed out, and note the rest of the lot record by record."""
        lot = self.lot
        if lot is None:
            return
        lot.end()
        lot.tell(self.progress)
        self.fetched = lot.rest + self.fetched
        self.lot = None

    def finish(self, offset: int) -> None:
        """A record is processed that is not the next one to be (see `lot`)."""
        lot = self.lot
        if lot is not None:
            lot.tell(self.progress)
        self.progress.finish(offset)
        if lot is not None and not self.progress.open_records:
            lot.count_again()

    @property
    def last_offset(self) -> int | None:
        """Of the processed prefix; at most once, of what was handed out."""
        lot = self.lot
        if lot is not None and (done := lot.given if self.owned else lot.done) > lot.told:
            last: int = lot.records[done - 1].offset()
            return last
        return self.progress.last_offset

    @property
    def open_records(self) -> int:
        """Handed out, and not in the prefix; at most once, what the application has not come back from."""
        lot = self.lot
        known = self.progress.open_records
        return known if lot is None else known + lot.given - max(lot.done, lot.told)

    @property
    def first_open(self) -> int | None:
        """The offset of the first record that is handed out and not processed."""
        known, lot = self.progress.first_open, self.lot
        if known is not None or lot is None or self.owned:
            return known
        done = max(lot.done, lot.told)
        if done >= lot.given:
            return None
        offset: int = lot.records[done].offset()
        return offset

    def look(self, most: int, now: float) -> None:
        """Notice since when a record is open, and since when there is no room for more."""
        first = self.first_open
        if first != self._first_open:
            self._first_open, self._first_open_since = first, now
        if self.open_records < most:
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now

    def open(self, now: float) -> Open | None:
        """What is handed out and not processed, as of the last look."""
        if self._first_open is None:
            return None
        return Open(self.open_records, self._first_open, max(0.0, now - self._first_open_since))

    # -- at most once

    def propose(self, most: int) -> int | None:
        """Choose the next batch; returns the offset of its last record, None without any."""
        count = min(most, len(self.fetched))
        if not count:
            return None
        self.proposed = count
        last: int = self.fetched[count - 1].offset()
        return last

    def own(self) -> Lot:
        """The batch is ours."""
        lot = Lot(self.place, self.fetched[: self.proposed])
        del self.fetched[: self.proposed]
        self.proposed = 0
        self.owned.append(lot)
        return lot

    def lay_down(self) -> Lot | None:
        """The application came back from the lot in hand; returns what is left of it."""
        lot = self.lot
        assert lot is not None
        self.progress.last_offset = self.last_offset
        self.lot = None
        self.owned.remove(lot)
        if not lot.rest:
            return None
        left = Lot(self.place, lot.rest)
        self.owned.insert(0, left)
        return left

    def give_back(self) -> int | None:
        """Hand out nothing more of what is ours; returns the last offset that was handed out, or is not ours."""
        last_offset = self.last_offset
        if last_offset is None and self.owned:
            last_offset = self.owned[0].records[0].offset() - 1
        for lot in self.owned:
            lot.give_back()
        return last_offset
