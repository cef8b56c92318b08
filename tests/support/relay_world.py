"""A small world around the relay's decisions, driven by a string of bytes: same bytes, same history.

Real are the machine (`Relay`), its ledger, and each shard's `Sender` with its `Barrier`. Simulated are the pipes (first
in, first out, with any delay), the outbox, the marker, the purgers, Kafka, the group, and death. A byte chooses what
happens next; fewer and smaller bytes make a shorter and calmer history, so hypothesis can shrink a failure. After the
last byte the faults end and the world has to become calm (`World.calm`).

What it checks, at every step unless said otherwise:

- I1: in the end every committed row was appended to the log or stands in quarantine, and the outbox is empty;
- I2: a record is first appended after all earlier ones of its key, and never after a later one;
- I3: the producers of a harvester never hold more unsettled records than allowed;
- I8: a record is repeated only where a shard died, trust was lost, or its fate was unknown;
- P5: when a mark is commanded, the ledger knows all that any shard holds;
- P8: the term is found lost only when somebody else has taken it;
- Drained and Emptied are true when they are said; leader ids are never used twice; no count is negative.

A writer inserts the rows of one key one transaction after the other; rows of different keys commit in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from harvester.relay.commands import Mark
from harvester.relay.machine import Settings
from tests.support.relay_actors import SimHarvester
from tests.support.relay_shard import Action, Note, SimShard

FAULTS = (
    "shard death",
    "kafka",
    "trust",
    "hand over",
    "usurper",
    "marker",
    "congestion",
    "timeouts",
    "scale",
    "poison",
)
_CALM_STEPS = 4000


class Broken(AssertionError):
    """An invariant does not hold; the message ends with the history."""


class Script:
    """The bytes that decide; beyond the end all are 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def next(self, below: int = 256) -> int:
        """A number in [0, below)."""
        value = 0 if self.over else self._data[self._at]
        self._at += 1
        return value % below


@dataclass(slots=True, eq=False)
class Row:
    """A row of the outbox. `refused`: the broker never takes it; `undecodable`: no record can be made of it."""

    id: int
    key: bytes | None
    leader_id: UUID | None = None
    visible: bool = False
    gone: bool = False
    refused: bool = False
    undecodable: bool = False


@dataclass(slots=True)
class Table:
    """The outbox, its term row, and the transactions that are open."""

    rows: dict[int, Row] = field(default_factory=dict)
    open: list[list[Row]] = field(default_factory=list)
    term: int = 0
    holder: UUID | None = None
    quarantined: set[int] = field(default_factory=set)

    def holders(self) -> list[str]:
        """Who holds a RowExclusiveLock: the open transactions, each named by its first id."""
        return [str(rows[0].id) for rows in self.open]

    def visible(self) -> list[Row]:
        """What a snapshot taken now shows, by id."""
        return [row for row in self.rows.values() if row.visible and not row.gone]


class World:
    """See the module's text. `faults` names what may go wrong; all by default."""

    def __init__(self, data: bytes, faults: tuple[str, ...] = FAULTS) -> None:
        self.script = Script(data)
        self.trace: list[Note] = []
        self.now = 0.0
        self.table = Table()
        self.appended: Counter[int] = Counter()
        self.excused: Counter[int] = Counter()
        self.leader: SimHarvester | None = None
        self.leader_ids: set[UUID] = set()
        self._ids = 0
        self._newest: dict[bytes, int] = {}
        self._by_key: dict[bytes, list[int]] = {}
        self.faults = frozenset(faults)
        draw = self.script.next
        self.keys: list[bytes | None] = [*(f"k{n}".encode() for n in range(1 + draw(4))), None]
        settings = Settings(
            shards=1 + draw(3),
            max_in_flight_records=1 + draw(5),
            mark_query_records=1 + draw(5),
            send_buffer=1 + draw(3),
            max_queued_per_key=1 + draw(3),
            answer_timeout_s=50,
            silence_timeout_s=90,
            look_interval_s=50,
        )
        self.writes = bool(draw(2))
        self.pipe_frames = 1 + draw(4)
        self.harvesters = [SimHarvester(self, name, settings) for name in ("A", "B")]
        if "hand over" not in faults:
            del self.harvesters[1]

    # -- running

    def run(self) -> World:
        """All that the bytes say, then calm."""
        while not self.script.over:
            self._step()
        self.calm()
        return self

    def _step(self) -> None:
        self.now += 0.01
        kind = self.script.next(32)
        if kind < 18:
            self._choose(self._ordinary())
        elif kind < 23:
            self._insert()
        elif kind < 26:
            self._commit(self.script.next())
        else:
            self._choose(self._faults())
        self._check_bounds()

    def _choose(self, actions: list[tuple[Note, Action]]) -> None:
        if actions:
            note, action = actions[self.script.next(len(actions))]
            self.trace.append((round(self.now, 2), *note))
            action()

    def calm(self) -> None:
        """No faults any more: everything has to arrive."""
        self.trace.append(("-- calm",))
        while self.table.open:
            self._commit(0)
        for harvester in self.harvesters:
            harvester.fuse = None
        fair = random.Random(0)
        for _ in range(_CALM_STEPS):
            if self._is_calm():
                self._check_end()
                return
            self.now += 0.01
            actions = self._ordinary()
            if not actions:
                self.fail("nothing can happen any more")
            note, action = fair.choice(actions)
            self.trace.append((round(self.now, 2), *note))
            action()
            self._check_bounds()
        self.fail("it does not become calm")

    def _is_calm(self) -> bool:
        return (
            self.leader is not None
            and self.leader.leads
            and not self.table.visible()
            and all(harvester.is_calm for harvester in self.harvesters)
        )

    def fail(self, what: str) -> None:
        """Raise, with the history."""
        shown = [" ".join(map(str, note)) for note in self.trace if not _is_idle(note)][-300:]
        raise Broken("\n".join([what, "history:", *shown, what]))

    # -- what can happen

    def _ordinary(self) -> list[tuple[Note, Action]]:
        actions: list[tuple[Note, Action]] = []
        for harvester in self.harvesters:
            actions += harvester.actions()
        if self.leader is None:
            actions += [
                ((h.name, "elected"), h.elect)
                for h in self.harvesters
                if all(other.has_let_go for other in self.harvesters if other is not h)
            ]
        return actions

    def _faults(self) -> list[tuple[Note, Action]]:
        actions: list[tuple[Note, Action]] = []
        for harvester in self.harvesters:
            actions += [(note, action) for fault, note, action in harvester.mishaps() if fault in self.faults]
        if "usurper" in self.faults and self.leader is not None:
            actions.append((("somebody takes the term",), self._usurp))
        return actions

    def _usurp(self) -> None:
        self.table.term += 1
        self.table.holder = UUID(int=10**12 + self.table.term)

    # -- the application

    def _insert(self) -> None:
        key = self.keys[self.script.next(len(self.keys))]
        if key is not None and any(row.key == key for rows in self.table.open for row in rows):
            return
        rows = []
        for _ in range(1 + self.script.next(3)):
            self._ids += 1
            row = self.table.rows[self._ids] = Row(self._ids, key)
            rows.append(row)
        if "poison" in self.faults:
            fate = self.script.next(16)
            rows[0].refused, rows[0].undecodable = fate == 1, fate == 2
        self.table.open.append(rows)
        self.trace.append((round(self.now, 2), "insert", [row.id for row in rows], "of", key))

    @property
    def last_value(self) -> int:
        """Of the sequence."""
        return self._ids

    def _commit(self, which: int) -> None:
        if self.table.open:
            rows = self.table.open.pop(which % len(self.table.open))
            if which >= 224:  # rolled back: its ids are never seen
                self.trace.append((round(self.now, 2), "roll back", [row.id for row in rows]))
                for row in rows:
                    del self.table.rows[row.id]
                return
            self.trace.append((round(self.now, 2), "commit", [row.id for row in rows]))
            for row in rows:
                row.visible = True
                if row.key is not None:
                    self._by_key.setdefault(row.key, []).append(row.id)

    # -- the log

    def append(self, record_id: int) -> None:
        """The broker appends a record: I2 and I8."""
        row = self.table.rows[record_id]
        self.trace.append(("    log:", record_id, "of", row.key))
        first = record_id not in self.appended
        self.appended[record_id] += 1
        if not first:
            if not self.excused[record_id]:
                self.fail(f"I8: record {record_id} is repeated without a reason")
            self.excused[record_id] -= 1
        if row.key is None:
            return
        newest = self._newest.get(row.key, 0)
        if record_id < newest:
            self.fail(f"I2: record {record_id} comes after {newest} of its key")
        self._newest[row.key] = record_id
        if first:
            for earlier in self._by_key[row.key]:
                if earlier >= record_id:
                    break
                if earlier not in self.appended and earlier not in self.table.quarantined:
                    self.fail(f"I2: record {record_id} overtakes {earlier} of its key")

    def excuse(self, shard: SimShard) -> None:
        """What this shard has on the wire or unpurged may be repeated once."""
        for record_id in shard.unsettled:
            self.excused[record_id] += 1

    # -- checks

    def _check_bounds(self) -> None:
        for harvester in self.harvesters:
            relay = harvester.relay
            most = relay.settings.max_in_flight_records
            held = sum(len(shard.unsettled) for shard in harvester.living)
            if held > most:
                self.fail(f"I3: {held} records at the producers of {harvester.name}, {most} are allowed")
            ledger = relay.ledger
            if min(ledger.in_flight, ledger.queued, *map(ledger.unsettled_of, range(8))) < 0:
                self.fail("a count of the ledger is negative")

    def _check_end(self) -> None:
        for row in self.table.rows.values():
            if row.id not in self.appended and row.id not in self.table.quarantined:
                self.fail(f"I1: record {row.id} is lost")
        for harvester in self.harvesters:
            harvester.check_end()


def _is_idle(note: Note) -> bool:
    """Empty marks would fill the history."""
    return isinstance(note[-1], Mark) or note[-1] == ("marked", [])
