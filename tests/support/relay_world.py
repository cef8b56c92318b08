"""A small world around the relay's decisions, driven by a string of bytes: same bytes, same history.

Real are the machine (`StateMachine`) with its ledger, planner and deferred rows, the marker's `Scan`, and each shard's
`Sender` with its `Barrier`. Simulated are the pipes (first in, first out, with any delay), the outbox, the marker's
session, the purgers, Kafka, the group, time, and death. A byte chooses what happens next; fewer and smaller bytes make
a shorter and calmer history, so hypothesis can shrink a failure. After the last byte the faults end and the world has
to become calm (`World.calm`): first around the records that the broker still refuses, then, when it takes them,
altogether.

What it checks, at every step unless said otherwise:

- I1: in the end every committed row was appended to the log or stands in quarantine, and the outbox is empty;
- I2: a record is first appended after all earlier ones of its key, and never after a later one;
- I3: the producers of a harvester never hold more unsettled records than allowed;
- I5: no row is purged that was not appended;
- I7: while records are refused for ever and their keys held, every row of every other key arrives;
- I8: a record is repeated only where a shard died, trust was lost, its fate was unknown, or the server was replaced;
- P5: when a mark is commanded, the ledger knows all that any shard holds;
- P8: the term is found lost only when somebody else has taken it;
- P18: a parked record is not fetched before its time; in the end no lane is left;
- nothing is read from the outbox for a harvester that is paused, nor is the outbox said to be empty;
- Drained and Emptied are true when they are said; leader ids are never used twice; no count is negative.

A writer inserts the rows of one key one transaction after the other; rows of different keys commit in any order, or
roll back. Some rows without a key carry an id far above the sequence, or one that was fetched before the table was
locked, which only a look at the whole table is sure to find.

The fault "server" (P9) replaces the database by an older copy of itself: the last events are undone, open
transactions are gone, and the sequence gives out ids again. Rows of the copy are repeated and start their keys' order
anew; rows that only the old server had are nobody's any more. Where the server does not tell who it is, the copy
lacks the last term.

The fault "crash" (P34) kills the server with writers that do not wait for their commits: its log of events is durable
up to the last one that somebody has flushed, and what lies behind that is undone. Server and term stay the same, and
the sequence gives out the ids of undone rows again. Nothing of them may have been published.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any
from uuid import UUID

from harvester.relay.core.leadership import RelaySettings
from harvester.relay.core.messages import Mark
from harvester.relay.core.scan import Bookmark
from tests.support.relay_actors import SimHarvester
from tests.support.relay_shard import Action, Note, SimProcess, SimShard

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
    "server",
    "crash",
    "pause",
    "loan",
)
_CALM_STEPS = 6000
POLICIES = ("quarantine", "hold", "stop")


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
    """A row of the outbox. `uid` tells it from others that had its id on another server.

    `refused`: the broker does not take it; `undecodable`: no record can be made of it; `early`: its id was fetched
    before the table was locked; `hasty`: its writer does not wait until its commit is durable.
    """

    id: int
    key: bytes | None
    uid: int
    leader_id: UUID | None = None
    visible: bool = False
    gone: bool = False
    refused: bool = False
    undecodable: bool = False
    early: bool = False
    hasty: bool = False


@dataclass(slots=True)
class Table:
    """The outbox of one server, its sequence, its term row, and the transactions that are open.

    `events` is what was committed, in order: ("visible" | "gone" | "quarantined", row) or ("term", (term, holder)).
    The first `flushed` of them survive a crash, with the sequence as it was then. The bookmark belongs to one
    incarnation, so another server has none.
    """

    server: int = 1
    rows: dict[int, Row] = field(default_factory=dict)
    open: list[list[Row]] = field(default_factory=list)
    term: int = 0
    holder: UUID | None = None
    bookmark: Bookmark | None = None
    quarantined: set[int] = field(default_factory=set)  # uids
    events: list[tuple[str, Any]] = field(default_factory=list)
    last_value: int = 0  # of the sequence
    flushed: int = 0
    flushed_value: int = 0

    def holders(self) -> dict[str, int | None]:
        """Who holds a RowExclusiveLock: the open transactions, each named by its first row. Some have no number yet."""
        return {f"t{rows[0].uid}": rows[0].uid if rows[0].uid % 4 else None for rows in self.open if not rows[0].early}

    def running(self) -> set[int]:
        """The numbers of the open transactions."""
        return {rows[0].uid for rows in self.open}

    def save(self, bookmark: Bookmark) -> None:
        """Where a scan may begin."""
        self.bookmark = bookmark
        self.flush()

    def visible(self) -> list[Row]:
        """What a snapshot taken now shows, by id."""
        return sorted((row for row in self.rows.values() if row.visible and not row.gone), key=attrgetter("id"))

    def show(self, row: Row) -> None:
        """Its transaction commits."""
        row.visible = True
        self.events.append(("visible", row))

    def delete(self, row: Row) -> None:
        """It leaves the outbox."""
        row.gone = True
        self.events.append(("gone", row))
        self.flush()

    def quarantine(self, row: Row) -> None:
        """It leaves the outbox for quarantine."""
        row.gone = True
        self.quarantined.add(row.uid)
        self.events.append(("quarantined", row))
        self.flush()

    def set_term(self, term: int, holder: UUID) -> None:
        """Somebody takes the term."""
        self.term, self.holder = term, holder
        self.events.append(("term", (term, holder)))
        self.flush()

    def flush(self) -> None:
        """All that has happened is durable; every commit of a harvester does this."""
        self.flushed, self.flushed_value = len(self.events), self.last_value

    def crash(self) -> list[Row]:
        """What is not durable is undone, and open transactions are gone; returns the rows that could be seen."""
        undone = [row for _, row in self.events[self.flushed :]]
        del self.events[self.flushed :]
        for row in [*undone, *(row for rows in self.open for row in rows)]:
            row.gone = True
            del self.rows[row.id]
        self.open.clear()
        self.last_value = self.flushed_value
        return undone

    def copy(self, events: int) -> Table:
        """Another server with the first so many events."""
        copy = Table(self.server + 1)
        for kind, what in self.events[:events]:
            if kind == "term":
                copy.set_term(*what)
                continue
            if kind == "visible":
                copy.rows[what.id] = replace(what, gone=False)
            row = copy.rows[what.id]
            row.gone = kind != "visible"
            if kind == "quarantined":
                copy.quarantined.add(row.uid)
            copy.events.append((kind, row))
        copy.last_value = max((i for i in copy.rows if i <= self.last_value), default=0)
        copy.flush()
        return copy


class World:
    """A harvester, its shards, outbox and log, driven by random choices. `faults`: which may occur."""

    def __init__(self, data: bytes, faults: tuple[str, ...] = FAULTS) -> None:
        self.script = Script(data)
        self.trace: list[Note] = []
        self.complaint = ""  # of a producer: what it raised would be taken for a record's fault
        self.now = 0.0
        self.table = Table()
        self.appended: Counter[int] = Counter()
        self.excused: Counter[int] = Counter()
        self.leader: SimHarvester | None = None
        self.leader_ids: set[UUID] = set()
        self.uids: dict[int, Row] = {}
        self.heard_term = 0  # the highest in the leader topic
        self._made = 0
        self._led_on = 1
        self._has_lost = False  # a server that was replaced, and nobody has led on its successor yet
        self._newest: dict[bytes, int] = {}  # uids, as in the next two
        self.undone: set[int] = set()  # by crashes; uids
        self._let_go: set[int] = set()  # quarantined on a server that has been replaced since
        self._by_key: dict[bytes, list[int]] = {}
        self.faults = frozenset(faults)
        draw = self.script.next
        self.keys: list[bytes | None] = [*(f"k{n}".encode() for n in range(1 + draw(4))), None]
        shards, in_flight, batch = 1 + draw(3), 1 + draw(5), 1 + draw(5)
        settings = RelaySettings(
            shards=shards,
            max_in_flight_records=in_flight,
            max_unsettled_records=(2 if batch % 2 else 6) * in_flight,
            mark_query_records=batch,
            send_buffer=1 + draw(3),
            max_queued_per_key=1 + draw(6),
            records_per_shard=in_flight % 3,
            most_shards=1 + batch % 3,
            answer_timeout_s=500,
            silence_timeout_s=900,
            look_interval_s=500,
        )
        self.writes = bool(draw(2))
        self.pipe_frames = 1 + draw(4)
        self.policy = POLICIES[draw(3)]
        deposed = {"trust", "hand over", "usurper"} & self.faults  # then a term alone proves nothing
        self.tells_server = bool(deposed) or not draw(2)
        settings = self.adjusted(settings)
        self.harvesters = [self.make_harvester(name, settings) for name in ("A", "B")]
        if "hand over" not in faults:
            del self.harvesters[1]

    # -- what the kinds of world differ in

    def adjusted(self, settings: RelaySettings) -> RelaySettings:
        """As this world needs them."""
        return settings

    def make_harvester(self, name: str, settings: RelaySettings) -> SimHarvester:
        """Called twice."""
        return SimHarvester(self, name, settings)

    def make_shard(self, owner: SimHarvester, index: int) -> SimProcess:
        """A new process."""
        return SimShard(owner, index)

    def check_low_water(self, low_water: int | None) -> None:
        """A record is sent with this one."""

    def check_release(self, name: str) -> None:
        """This harvester's term is being released."""

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
        for rows in [rows for rows in self.table.open if not rows[0].early]:
            self._commit(self.table.open.index(rows))
        for harvester in self.harvesters:
            harvester.fuse = None
        fair = random.Random(0)
        if self.policy == "hold":
            self._until(self._all_others_are_gone, fair, "I7: not all rows of other keys arrive while some are held")
            for row in self.table.visible():
                self.repair(row)
        self._until(self._is_calm, fair, "it does not become calm")
        if self.table.open:  # the gaps that these ids left are closed by now
            while self.table.open:
                self._commit(0)
            for row in self.table.visible():
                self.repair(row)
            self._until(self._is_calm, fair, "it does not become calm again")
        self._check_end()

    def _until(self, reached: Callable[[], bool], fair: random.Random, complaint: str) -> None:
        for _ in range(_CALM_STEPS):
            if reached():
                return
            self.now += 0.01
            leader = self.leader
            if leader is not None and leader.leads and not len(leader.machine.ledger) and not fair.randrange(20):
                leader.pass_time(600.0)
                continue
            actions = self._ordinary()
            if not actions:
                self.fail("nothing can happen any more")
            note, action = fair.choice(actions)
            self.trace.append((round(self.now, 2), *note))
            action()
            self._check_bounds()
        self.fail(complaint)

    def _all_others_are_gone(self) -> bool:
        rows = self.table.visible()
        stuck = [row for row in rows if row.refused or row.undecodable]
        keys = {row.key for row in stuck if row.key is not None}
        return all(row in stuck or row.key in keys for row in rows)

    def repair(self, row: Row) -> None:
        """Whoever operates this sees to a record that nobody takes."""
        row.refused = False
        if row.undecodable:
            self.table.quarantine(row)

    def _is_calm(self) -> bool:
        return (
            self.leader is not None
            and self.leader.leads
            and all(harvester.is_calm for harvester in self.harvesters)
            and not self.table.visible()
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
            actions += [((h.name, "elected"), h.elect) for h in self.harvesters if self.may_be_elected(h)]
        return actions

    def may_be_elected(self, harvester: SimHarvester) -> bool:
        """At least once: when nothing of another one is still on its way."""
        return all(other.has_let_go for other in self.harvesters if other is not harvester)

    def _faults(self) -> list[tuple[Note, Action]]:
        actions: list[tuple[Note, Action]] = []
        for harvester in self.harvesters:
            actions += [(note, action) for fault, note, action in harvester.mishaps() if fault in self.faults]
        if "usurper" in self.faults and self.leader is not None:
            actions.append((("somebody takes the term",), self._usurp))
        if "server" in self.faults and self.leader is not None:
            actions.append((("the server is replaced",), self._replace_server))
        if "crash" in self.faults and self.leader is not None:
            actions.append((("the server crashes",), self._crash_server))
        return actions

    def _usurp(self) -> None:
        term = self.table.term + 1
        self.table.set_term(term, UUID(int=10**12 + self.table.server * 10**6 + term))

    @property
    def server(self) -> str | None:
        """As the server tells who it is."""
        return f"server {self.table.server}" if self.tells_server else None

    def _replace_server(self) -> None:
        self.replace_server(self.script.next(12))

    def replace_server(self, lost: int) -> None:
        """By one that lacks so many of the last events."""
        events = self.table.events
        kept = max(0, len(events) - lost)
        if not self.tells_server:
            terms = [at for at, (kind, _) in enumerate(events) if kind == "term"]
            if not terms:
                return
            kept = min(kept, terms[-1])
        self._has_lost |= kept < len(events)
        self._let_go |= self.table.quarantined  # what stood behind them may be on the wire by now
        self.table = self.table.copy(kept)
        self._by_key.clear()
        for row in self.table.rows.values():
            self.uids[row.uid] = row
            self._note_key(row)
        for harvester in self.harvesters:
            harvester.disconnect()

    def _crash_server(self) -> None:
        for row in self.table.crash():
            self.undone.add(row.uid)
            if row.key is not None:
                self._by_key[row.key].remove(row.uid)
        for harvester in self.harvesters:
            harvester.disconnect()

    def begin_anew(self) -> None:
        """The term is taken on a server for the first time: what it has may be repeated, in its order."""
        if self._led_on != self.table.server:
            self._led_on = self.table.server
            self._newest.clear()
            self._let_go.clear()
            for row in self.table.visible():
                self.excused[row.uid] += 1

    # -- the application

    def _insert(self) -> None:
        key = self.keys[self.script.next(len(self.keys))]
        if key is not None and any(row.key == key for rows in self.table.open for row in rows):
            return
        kind = self.script.next(24)
        if kind == 1:  # by hand
            rows = [self._new_row(self.table.last_value + 2 + self.script.next(30), None)]
        else:
            early = 2 <= kind < 6 and key is None
            rows = [self._new_row(self._next_id(), key) for _ in range(1 if early else 1 + self.script.next(3))]
            rows[0].early = early
        if rows[0].id in self.table.rows:
            return
        for row in rows:
            self.table.rows[row.id] = self.uids[row.uid] = row
        if "poison" in self.faults:
            fate = self.script.next(16)
            rows[0].refused, rows[0].undecodable = fate == 1, fate == 2
        rows[0].hasty = "crash" in self.faults and bool(self.script.next(2))
        self.table.open.append(rows)
        self.trace.append((round(self.now, 2), "insert", [row.id for row in rows], "of", key))

    def _next_id(self) -> int:
        self.table.last_value += 1
        while self.table.last_value in self.table.rows:  # written by hand: an INSERT failed
            self.table.last_value += 1
        return self.table.last_value

    def _new_row(self, record_id: int, key: bytes | None) -> Row:
        self._made += 1
        return Row(record_id, key, self._made)

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
                self.table.show(row)
                self._note_key(row)
            if not rows[0].hasty:
                self.table.flush()

    def _note_key(self, row: Row) -> None:
        if row.key is not None:
            self._by_key.setdefault(row.key, []).append(row.uid)

    # -- the log

    def append(self, uid: int) -> None:
        """The broker appends a record: I2 and I8."""
        row = self.uids[uid]
        self.trace.append(("    log:", row.id, "of", row.key))
        first = uid not in self.appended
        self.appended[uid] += 1
        if not first:
            if not self.excused[uid]:
                self.fail(f"I8: record {row.id} is repeated without a reason")
            self.excused[uid] -= 1
        if row.key is None:
            return
        newest = self._newest.get(row.key, 0)
        if uid < newest:
            self.fail(f"I2: record {row.id} comes after {self.uids[newest].id} of its key")
        self._newest[row.key] = uid
        if first:
            for earlier in self._by_key.get(row.key, ()):
                if earlier >= uid:
                    break
                if earlier not in self.appended and earlier not in self.table.quarantined | self._let_go:
                    self.fail(f"I2: record {row.id} overtakes {self.uids[earlier].id} of its key")

    def excuse(self, shard: SimProcess) -> None:
        """What this shard has on the wire or unpurged may be repeated once."""
        for uid in shard.unsettled_uids:
            self.excused[uid] += 1

    # -- checks

    def _check_bounds(self) -> None:
        if self.complaint:
            self.fail(self.complaint)
        for harvester in self.harvesters:
            machine = harvester.machine
            most = machine.settings.max_in_flight_records
            held = sum(shard.held for shard in harvester.shards if shard.alive)
            if held > most:
                self.fail(f"I3: {held} records at the producers of {harvester.name}, {most} are allowed")
            ledger = machine.ledger
            if min(ledger.in_flight, ledger.queued, *ledger._per_shard.values()) < 0:
                self.fail("a count of the ledger is negative")

    def _check_end(self) -> None:
        for row in self.table.rows.values():
            if row.uid not in self.appended and row.uid not in self.table.quarantined:
                self.fail(f"I1: record {row.id} is lost")
        for uid in self.undone & self.appended.keys():
            self.fail(f"I1: record {self.uids[uid].id} is published, and a crash has undone it")
        for harvester in self.harvesters:
            harvester.check_end()


def _is_idle(note: Note) -> bool:
    """Empty marks would fill the history."""
    return isinstance(note[-1], Mark) or note[-1] == ("marked", [])
