"""From the rows that were read to what is sent to which shard. Pure.

Theory. Two kinds of statement read rows, performed one after the other on one session. A *mark* goes on from where the
last one ended (`harvester.relay.scan`): it passes every row once under one leader id, in id order, late commits
included (P4). A *fetch* reads rows again by id, which had to wait (`harvester.relay.waiting`). A *look* reads all ids,
in case any was passed over. Three parts share the ledger, the lanes and what is under way: which statements are worth
asking for (`harvester.relay.asking`), how much they may bring (`harvester.relay.room`), and where a row goes that they
have brought (`harvester.relay.sorting`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from harvester.relay.asking import Asking
from harvester.relay.commands import Fetch, Look, Mark
from harvester.relay.ledger import Ledger, Row
from harvester.relay.room import Room
from harvester.relay.slices import Slices
from harvester.relay.sorting import Sorting, Taken
from harvester.relay.spread import Spread
from harvester.relay.statements import Statement, Statements
from harvester.relay.waiting import LaneName, Waiting


class Intake:
    """See the module's text. One thread only."""

    def __init__(self, batch: int, send_buffer: int, ledger: Ledger, shards: int, spread: Spread) -> None:
        self._ledger, self._spread = ledger, spread
        self.slices = Slices(shards, send_buffer)
        self.waiting = Waiting()
        self.statements = Statements()
        self._room = Room(batch, ledger, self.waiting, self.statements)
        self._asking = Asking(ledger, self.waiting, self.slices, self.statements, self._room)
        self._sorting = Sorting(ledger, self.waiting, self.slices, spread)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known that would have to be sent, and the last mark proves that there is nothing else."""
        return (
            self._asking.proven
            and not len(self._ledger)
            and not len(self.waiting)
            and not self._asking.found
            and not len(self.statements)
        )

    def lowest(self) -> int | None:
        """The lowest id that was read and is not settled; None: there is none."""
        parts = [part.ids[0] for part in self.statements.parts() if part.ids]
        return min([*self._ledger.ids, *self.waiting.firsts(), *self._asking.found[:1], *parts], default=None)

    def shard_of(self, key: bytes) -> int:
        """The shard that a row of this key would go to now."""
        return self._sorting.shard_of(key)

    # -- statements

    def begin(self) -> None:
        """A new leader id: what is marked from now on starts from the bookmark again."""
        self._asking.begin()
        self._forget_waiting()

    def next(self, term: int, holder: UUID, leader_id: UUID, now: float) -> list[Mark | Fetch | Look]:
        """The statements that are worth asking for now."""
        return self._asking.next(term, holder, leader_id, now)

    def look(self, term: int, holder: UUID) -> Look:
        """Read all ids of the table: nothing may have been passed over."""
        return self._asking.look(term, holder)

    def knows(self, number: int) -> bool:
        """Whether this statement is under way."""
        return number in self.statements.under_way

    def abandon(self) -> None:
        """The results of all statements under way are discarded whole (P4), and what waits is forgotten."""
        for number in self.statements.abandon():
            self._ledger.done(number)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._asking.forget()
        self._room.forget()
        self.waiting.clear()
        self._ledger.watched.clear()

    def watch(self, now: float) -> None:
        """Time has passed: see whether fewer shards would do, and whether the window is full of rows that stand."""
        if not self.waiting.shards:
            self._spread.shrink(len(self._ledger))
        self._room.watch(now)

    # -- results

    def marked(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a mark's rows, which come by id. Rows to be sent are in the ledger from here on."""
        mark = self._end(number, now).asked
        assert isinstance(mark, Mark)
        in_flight = self._ledger.in_flight
        taken = self._sorting.marked(rows)
        self._room.expected.learn(rows, self._ledger.in_flight - in_flight + self._sorting.crowded)
        self._ledger.done(number)  # not before: until then the ledger remembers what was settled meanwhile (P3)
        self._asking.marked(mark, len(rows))
        return taken

    def fetched(self, number: int, rows: Sequence[Row], now: float) -> Taken:
        """Sort a fetch's rows. What is missing has left the table, by whomever."""
        taken = self._sorting.fetched(self._end(number, now).parts, rows)
        self._ledger.done(number)
        self._asking.fetched()
        return taken

    def looked(self, number: int, ids: Iterable[int]) -> int:
        """Compare all ids of the table with what is known. Returns how many nobody knew of; they are fetched."""
        self.statements.end(number)
        waits = self.waiting.ids()
        for part in self.statements.parts():
            waits.update(part.ids)
        unknown = [i for i in ids if not self._ledger.knows(i) and i not in waits]
        self._asking.found = sorted({*self._asking.found, *unknown})
        self._ledger.done(number)
        return len(unknown)

    def _end(self, number: int, now: float) -> Statement:
        statement = self.statements.end(number)
        self._sorting.begin(now, self.statements.kept_for_fetches(), stalled=self._room.stalled)
        return statement

    # -- failures

    def park(self, name: LaneName, shard: int, ids: Sequence[int], not_before: float, held: bool) -> None:
        """A record failed and will be tried again then; `ids` are it and what stood behind it."""
        self._ledger.give_back(ids)
        if isinstance(name, bytes):
            self._ledger.watched.add(name)
        self.waiting.park(name, shard, ids, not_before, held)

    def is_parked(self, name: LaneName) -> bool:
        """Whether rows of this key may come back without having been sent."""
        return name in self.waiting.lanes

    def give_back(self, name: LaneName, ids: Iterable[int]) -> None:
        """Rows that reached their shard behind a parked one come back."""
        self.waiting.give_back(name, self._ledger.give_back(ids))

    # -- the number of shards

    def resize(self, shards: int) -> None:
        """There are this many shards now; nothing is unsettled and nothing under way."""
        self._spread.resize(shards)
        self.slices.resize(shards)
