"""A harvester of `tests.support.relay_world`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from harvester.delivery.decode import decode
from harvester.events import LeaderRefreshed
from harvester.relay.core import frames as f
from harvester.relay.core import messages as c
from harvester.relay.core.leadership import RelaySettings
from harvester.relay.core.ledger import Row
from harvester.relay.core.scan import LOWEST, Bookmark, Scan
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from tests.support.relay_shard import Action, Note, SimProcess, row_bytes, uid_of, undecodable_topic

if TYPE_CHECKING:
    from tests.support import relay_world as w


class SimHarvester:
    """A supervisor with a real Relay; its marker and its place in the group are simulated."""

    def __init__(self, world: w.World, name: str, settings: RelaySettings) -> None:
        self.world, self.name = world, name
        self._made = 0
        self._begin_life(settings)

    def _begin_life(self, settings: RelaySettings) -> None:
        self.machine = StateMachine(settings, self._new_id)
        self.shards = [self.world.make_shard(self, index) for index in range(settings.shards)]
        self.inbox: deque[tuple[object, Callable[[], Sequence[c.Command]]]] = deque()
        self.marker: deque[c.Mark | c.Fetch | c.Look | c.SaveBookmark | c.TakeTerm] = deque()
        self._scan = Scan(ranges=3, awake=1, young=3)
        self._scan_of: UUID | None = None
        self._snapshot: list[w.Row] | None = None
        self._over: set[int] = set()  # transactions, for the snapshot
        self._seen_term: int | None = None
        self._processed: list[w.Row] = []  # what the mark that is being processed could see
        self._connected = self._checked = True
        self._term: tuple[int, UUID, str | None] | None = None  # term, holder, server: what was taken last
        self._due: dict[int, tuple[int, float]] = {}  # parked record -> (epoch, not to be fetched before)
        self.proven = self.word = self.revoking = self.paused = self.wanted = False
        self.fuse: int | None = None  # trust runs out after so many produces
        self.lapsed = False  # trust has run out, and no fence came: it may return
        self._saw_trust = True  # a tick, since rows were last dropped

    def _new_id(self) -> UUID:
        self._made += 1
        return UUID(int=ord(self.name) * 10**6 + self._made)

    # -- trust

    def is_trusted(self) -> bool:
        """A shard asks before it produces."""
        if self.word and self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.lose_trust("trust expired")
        return self.word

    def elect(self) -> None:
        """The group chooses this one."""
        self.world.leader, self.proven = self, True
        for other in self.world.harvesters:
            for shard in other.shards if other is not self else ():
                shard.late.clear()  # bytes that outlast a leader are a known limit

        def acquire() -> Sequence[c.Command]:
            self.wanted = self.machine.phase is LeadershipPhase.DRAINING
            return self.machine.acquire(self.world.now)

        self._post("acquire", acquire)

    def lose_trust(self, reason: str) -> None:
        """The election fences."""
        self.word = self.proven = self.lapsed = False
        self.fuse = None
        self._step_down()
        for shard in self.living:
            self.world.excuse(shard)

        def fence() -> Sequence[c.Command]:
            self.wanted = False
            return self.machine.fence(reason, self.world.now)

        self._post("fence", fence)

    def _lapse(self) -> None:
        """Trust runs out, and the fence does not come."""
        self.word, self.lapsed = False, True
        for shard in self.living:
            self.world.excuse(shard)

    def _renew(self) -> None:
        self.word, self.lapsed = True, False

    def _step_down(self) -> None:
        if self.world.leader is self:
            self.world.leader = None

    @property
    def has_let_go(self) -> bool:
        """Another one may lead: trust is over, and so is the delivery timeout of all that was produced under it."""
        return not self.proven and not any(shard.may_send for shard in self.living)

    def revoke(self) -> None:
        """The group takes leadership away and waits for the drain."""
        self.word, self.revoking, self.fuse, self.lapsed = False, True, None, False

        def drain() -> Sequence[c.Command]:
            self.wanted = False
            return self.machine.drain(self.world.now)

        self._post("drain", drain)

    def _lend(self) -> None:
        """Somebody asks for the term (P32): it is given up in good order, and taken again."""

        def lend() -> Sequence[c.Command]:
            if self.machine.phase not in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
                return []
            self.wanted = True
            return self.machine.drain(self.world.now, trusted=True)

        self._post("lend", lend)

    def _cut(self) -> None:
        """The drain takes too long."""
        for shard in self.living:
            if self.machine.ledger.unsettled_of(shard.index):
                shard.kill()

    # -- state

    @property
    def living(self) -> list[SimProcess]:
        return [shard for shard in self.shards if shard.alive]

    @property
    def leads(self) -> bool:
        return self.machine.phase is LeadershipPhase.LEADING

    @property
    def is_calm(self) -> bool:
        return (
            not len(self.machine.ledger)
            and not self.machine.planner.deferred.rows
            and all(shard.alive and shard.ready and not shard.unsettled for shard in self.shards)
            and not any(shard.to_shard or shard.to_supervisor for shard in self.shards)
            and not self.revoking
        )

    def check_end(self) -> None:
        """Nothing is left behind."""
        for shard in self.shards:
            shard.end()
        ledger = self.machine.ledger
        waiting = self.machine.planner.deferred
        kept = ledger.in_flight or ledger.queued or waiting.rows or waiting.by_key or waiting.by_shard or ledger.watched
        if kept or any(shard.keeps_something for shard in self.shards):
            self.world.fail(f"{self.name} keeps something in calm")

    # -- what can happen

    def actions(self) -> list[tuple[Note, Action]]:
        """Everything that goes on by itself."""
        found: list[tuple[Note, Action]] = []
        if self.inbox:
            found.append(((self.name, "hears", self.inbox[0][0]), self._hear))
        for shard in self.shards:
            name = shard.name
            if shard.to_supervisor:
                found.append(((name, "says", shard.to_supervisor[0]), partial(self._hear_shard, shard)))
            elif not shard.alive:
                found.append(((name, "is buried"), partial(self._bury, shard)))
            if shard.alive and shard.watched and len(shard.to_shard) <= self.world.pipe_frames:
                found.append(((name, "has room"), partial(self._uncongested, shard)))
            if shard.alive:
                found += shard.actions()
        timers = self.machine.planner.deferred._timers
        if timers and self.leads:
            wait_s = max(0.0, timers[0][0] - self.world.now)
            found.append(((self.name, "is patient"), lambda: self.pass_time(wait_s)))
        if self.paused:
            found.append(((self.name, "resumes"), self._resume))
        if self.lapsed:
            found.append(((self.name, "is trusted again"), self._renew))
        if self.machine.untrusted:
            found.append(((self.name, "looks at trust"), self._tick))
        if self.marker:
            begun = self._snapshot is not None or self._seen_term is not None
            step = self._finish if begun else self._begin
            found.append(((self.name, "ends" if begun else "begins", self.marker[0]), step))
        return found

    def mishaps(self) -> list[tuple[str, Note, Action]]:
        """(fault, name, action) of what may go wrong."""
        found = [mishap for shard in self.living for mishap in shard.mishaps()]
        if self.proven and not self.revoking:
            found.append(("trust", (self.name, "fenced"), lambda: self.lose_trust("fenced")))
            found.append(("trust", (self.name, "fuse"), self._light_fuse))
            if self.word:
                found.append(("trust", (self.name, "trust lapses"), self._lapse))
            found.append(("hand over", (self.name, "revoked"), self.revoke))
            found.append(("scale", (self.name, "scales"), self._scale))
            found.append(("loan", (self.name, "is asked for the term"), self._lend))
        if not self.paused:
            found.append(("pause", (self.name, "pauses"), self._pause))
        if self.revoking:
            found.append(("shard death", (self.name, "cut"), self._cut))
        if self.marker:
            found.append(("marker", (self.name, "the marker fails"), self._fail_marker))
        found.append(("timeouts", (self.name, "time passes"), lambda: self.pass_time(600.0)))
        found.append(("timeouts", (self.name, "ticks"), self._tick))
        return found

    def _light_fuse(self) -> None:
        self.fuse = self.world.script.next(3)

    def pass_time(self, time_s: float) -> None:
        """And the supervisor looks at the clock."""
        self.world.now += time_s
        self._tick()

    def _tick(self) -> None:
        self._saw_trust = self._saw_trust or self.word
        self._perform(self.machine.tick(self.world.now, self.word))

    def _stop_for(self, record_id: int) -> None:
        """Policy "stop": the harvester ends; whoever starts it again has seen to the record."""
        row = self.world.table.rows.get(record_id)
        if row is not None:
            self.world.repair(row)
        if self.proven and not self.revoking:
            self.revoke()

    def disconnect(self) -> None:
        """The server is gone, and with it every session."""
        self._connected = self._checked = False
        self._seen_term = None
        if self._snapshot is not None:
            self._statement_failed()
        for shard in self.shards:
            shard.disconnect()

    def _scale(self) -> None:
        shards, within_s = 1 + self.world.script.next(3), self.world.script.next(2) * 1e9
        self._post("scale", lambda: self.machine.scale(shards, self.world.now + within_s, self.world.now))

    def _pause(self) -> None:
        def pause() -> Sequence[c.Command]:
            self.paused = True
            return self.machine.pause(self.world.now)

        self._post("pause", pause)

    def _resume(self) -> None:
        self.paused = False
        self._perform(self.machine.resume(self.world.now))

    # -- the supervisor's part

    def _post(self, name: object, act: Callable[[], Sequence[c.Command]]) -> None:
        self.inbox.append((name, act))

    def _hear(self) -> None:
        self._perform(self.inbox.popleft()[1]())

    def _hear_shard(self, shard: SimProcess) -> None:
        machine, now, i = self.machine, self.world.now, shard.index
        frame = shard.to_supervisor.popleft()
        match frame:
            case f.Settled(ids):
                self._perform(machine.settled(i, ids, now)[1])
            case f.Remarked(epoch, ids, in_doubt):
                self._perform(machine.remarked(i, epoch, ids, now, in_doubt))
            case f.Parked(epoch, record_id, given_back, _, wait_s, _, held):
                self._due[record_id] = epoch, now + wait_s
                self._perform(machine.parked(i, epoch, record_id, given_back, wait_s, held, now))
            case f.InDoubt(record_id):
                machine.in_doubt(i, record_id, now)
            case f.Refused(epoch, ids):
                self._perform(machine.refused(i, epoch, ids, now))
            case f.Dropped(ids, in_doubt):
                self._saw_trust = self._saw_trust and not self.leads
                self._perform(machine.dropped(i, ids, now, in_doubt))
            case f.FateUnknown(epoch, ids, reason):
                self._perform(machine.fate_unknown(i, epoch, ids, reason, now))
            case f.QueueTimedOut(epoch, record_id, waited_s):
                self._perform(machine.queue_timed_out(i, epoch, record_id, waited_s, now))
            case f.Poisoned(record_id):
                self._stop_for(record_id)
            case f.ShardServerChanged(reason):
                self._perform(machine.server_changed(reason, now))
            case f.Quarantined() | f.Log():
                pass
            case f.Ready():
                self._perform(machine.shard_ready(i, now))

    def _bury(self, shard: SimProcess) -> None:
        self.shards[shard.index] = self.world.make_shard(self, shard.index)
        self._perform(self.machine.shard_died(shard.index, self.world.now))

    def _uncongested(self, shard: SimProcess) -> None:
        shard.watched = False
        self._perform(self.machine.uncongested(shard.index, self.world.now))

    def _perform(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            self.world.trace.append(("   ", self.name, command))
            if self.paused and isinstance(command, c.Mark | c.Fetch | c.Look | c.Emptied):
                self.world.fail(f"{self.name} is paused")
            match command:
                case c.Send(index, frame):
                    self._send(self.shards[index], frame)
                case c.Mark() | c.Fetch() | c.Look() | c.SaveBookmark() | c.TakeTerm():
                    if isinstance(command, c.Mark):
                        self._check_mark()
                    elif isinstance(command, c.Fetch):
                        self._check_fetch(command)
                    self.marker.append(command)
                case c.OpenTrust():
                    self.word, self.lapsed = self.proven, False
                    self.world.heard_term = max(self.world.heard_term, self.machine.tenure.term or 0)
                case c.CloseTrust():
                    self.word = False
                case c.Kill(index, _, _):
                    if self.shards[index].alive:
                        self.shards[index].kill()
                case c.Announce(event):
                    leader_id = getattr(event, "leader_id", None)
                    if isinstance(event, LeaderRefreshed) and "trust" in event.reason and not self._saw_trust:
                        self.world.fail(f"{self.name} does not wait for trust")
                    if leader_id in self.world.leader_ids:
                        self.world.fail(f"leader id {leader_id} is used twice")
                    self.world.leader_ids |= {leader_id} if leader_id is not None else set()
                case c.Drained():
                    self._drained()
                case c.ReleaseTerm(term, holder):
                    self._check_settled("Release")
                    table = self.world.table
                    if (table.term, table.holder, self.world.server) == (term, holder, self._term and self._term[2]):
                        self.world.check_release(self.name)
                case c.Emptied():
                    left = [row.id for row in self._processed if not row.gone and not row.early]
                    if left:
                        self.world.fail(f"Emptied is said while {left} are in the outbox")
                case c.Resize(shards):
                    self._resize(shards)

    def _send(self, shard: SimProcess, frame: f.Frame) -> None:
        if not shard.alive:
            return
        if isinstance(frame, f.Dispatch):
            self.world.check_low_water(frame.low_water)
            already = shard.holds
            for found in decode(frame.rows):
                if found.id in already:
                    self.world.fail(f"record {found.id} is dispatched to a shard that holds it")
                key = self.world.uids[uid_of(found)].key
                others = [other.index for other in self.shards if other is not shard and key in other.keys]
                if key is not None and others:
                    self.world.fail(f"record {found.id} goes to shard {shard.index}, others of its key are in {others}")
        shard.to_shard.append(frame)
        if "congestion" in self.world.faults and len(shard.to_shard) > self.world.pipe_frames:
            shard.watched = True
            self.machine.congested(shard.index)
        elif self.machine.is_congested(shard.index):
            self._perform(self.machine.uncongested(shard.index, self.world.now))

    def _check_mark(self) -> None:
        for shard in self.living:
            unknown = [i for i in shard.holds if i not in self.machine.ledger]
            if unknown:
                self.world.fail(f"P5: a mark while {self.name}{shard.index} holds {unknown} beyond the ledger")

    def _check_fetch(self, fetch: c.Fetch) -> None:
        parts = self.machine.planner.statements.under_way[fetch.number].parts
        for record_id in (i for part in parts if part.name is not None for i in part.ids):
            epoch, due = self._due.pop(record_id, (0, 0.0))
            if epoch == self.machine.epoch and self.world.now < due:
                self.world.fail(f"P18: {record_id} is to be tried again at {due}")

    def _check_settled(self, what: str) -> None:
        if len(self.machine.ledger) or any(shard.unsettled for shard in self.living):
            self.world.fail(f"{what} is said while something is unsettled")

    def _drained(self) -> None:
        self._check_settled("Drained")
        if self.revoking:
            self.revoking = self.proven = False
            self._step_down()
        if self.wanted:
            self.wanted = False
            self._perform(self.machine.acquire(self.world.now))

    def _resize(self, shards: int) -> None:
        if any(shard.unsettled for shard in self.living):
            self.world.fail("P17: the number of shards changes while something is unsettled")
        more = range(len(self.shards), shards)
        self.shards = [*self.shards[:shards], *(self.world.make_shard(self, index) for index in more)]

    # -- the marker's part

    def _begin(self) -> None:
        command = self.marker[0]
        if not self._connected:
            self._connected = True
            self._scan.restart()
        if isinstance(command, c.TakeTerm):
            self._seen_term = self.world.table.term
        elif isinstance(command, c.SaveBookmark):
            self.marker.popleft()
            if self._checked and (self.world.table.term, self.world.table.holder) == (command.term, command.holder):
                self.world.table.save(command.bookmark)
        elif self._is_meant(command):
            if isinstance(command, c.Mark) and (command.leader_id != self._scan_of or not self._scan.is_listed):
                self._scan_of = command.leader_id
                self._scan.restart(self.world.table.bookmark)
                self._list()
            self._take_snapshot()
        else:
            self.marker.popleft()

    def _take_snapshot(self) -> None:
        self._snapshot = self.world.table.visible()
        self._over = {number for number in self._scan.watched if number not in self.world.table.running()}

    def _list(self) -> None:
        self._scan.listed(self.world.table.holders(), self.world.table.last_value)

    def _is_meant(self, command: c.Mark | c.Fetch | c.Look) -> bool:
        """P9, as the mark loop does it."""
        if self._checked or self._term is None or self._term[1] != command.holder:
            return True
        term, _, server = self._term
        self._checked = server == self.world.server and self.world.table.term >= term
        if not self._checked:
            self._post("server changed", lambda: self.machine.server_changed("another one", self.world.now))
        return self._checked

    def _finish(self) -> None:
        command = self.marker[0]
        table = self.world.table
        if isinstance(command, c.TakeTerm):
            self._take_term(command)
            return
        if isinstance(command, c.Mark) and self._over:  # it brings nothing, and is repeated
            self._scan.ended(self._over)
            self._take_snapshot()
            return
        self.marker.popleft()
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        assert not isinstance(command, c.SaveBookmark)
        if isinstance(command, c.Look):
            self._look(command, snapshot)
            return
        rows = self._mark(command, snapshot) if isinstance(command, c.Mark) else self._fetch(command, snapshot)
        if rows:
            self._have_flushed()
        if not rows and (table.term, table.holder) != (command.term, command.holder):
            self._post("term gone", lambda: self._term_gone(command.holder, table))
        elif isinstance(command, c.Mark):
            floor = self._scan.floor
            done = partial(self._marked, command.number, rows, snapshot, floor, self._scan.bookmark())
            self._post(("marked", [row[0] for row in rows]), done)
            if not self.world.script.next(2):
                self._list()
        else:
            done = partial(self._fetched, command.number, rows)
            self._post(("fetched", [row[0] for row in rows]), done)

    def _take_term(self, command: c.TakeTerm) -> None:
        table, seen = self.world.table, self._seen_term
        self._seen_term = None
        if not self.proven:
            self.marker.popleft()
        elif table.term == seen:
            self.marker.popleft()
            term, server = max(seen, self.world.heard_term) + 1, self.world.server
            table.set_term(term, command.holder)
            self._term, self._checked = (term, command.holder, server), True
            incarnation = UUID(int=table.server)
            self._post("term taken", lambda: self._term_taken(command.holder, term, server, incarnation))

    def _term_taken(self, holder: UUID, term: int, server: str | None, incarnation: UUID) -> Sequence[c.Command]:
        commands = self.machine.term_taken(holder, term, server, self.world.now, incarnation=incarnation)
        self.world.begin_anew()
        return commands

    def _marked(
        self, number: int, rows: list[Row], snapshot: list[w.Row], floor: int | None, bookmark: Bookmark | None
    ) -> Sequence[c.Command]:
        self._processed = [row for row in snapshot if self.world.table.rows.get(row.id) is row]
        return self.machine.marked(number, rows, self.world.now, floor, bookmark)

    def _fetched(self, number: int, rows: list[Row]) -> Sequence[c.Command]:
        return self.machine.fetched(number, rows, self.world.now)

    def _term_gone(self, holder: UUID, table: w.Table) -> Sequence[c.Command]:
        if holder != self.machine.tenure.holder:
            return ()
        if table.holder == self.machine.tenure.holder:
            self.world.fail("P8: the term is lost, and nobody took it")
        return self.machine.term_lost(self.proven, self.world.now)

    def _mark(self, mark: c.Mark, snapshot: list[w.Row]) -> list[Row]:
        table, scan = self.world.table, self._scan
        if (table.term, table.holder) != (mark.term, mark.holder):
            return []
        high, gaps = scan.high, scan.ranges()
        rows = [
            row
            for row in sorted(snapshot, key=lambda row: row.id)
            if (high is None or row.id > high or any(low <= row.id <= up for low, up in gaps))
            and not (self.world.writes and (row.gone or row.leader_id == mark.leader_id or row.id in mark.kept))
        ][: mark.limit]
        scan.read([row.id for row in rows], mark.limit, writes=self.world.writes)
        if self.world.writes:
            for row in rows:
                row.leader_id = mark.leader_id
            if rows:
                table.flush()
        return [tuple_of(row) for row in rows]

    def _look(self, look: c.Look, snapshot: list[w.Row]) -> None:
        high = LOWEST - 1 if self._scan.high is None else self._scan.high
        high = high if look.high is None else min(high, look.high)
        low = LOWEST if look.width is None else max(LOWEST, high - look.width + 1)
        ids = self._scan.passed_over([row.id for row in snapshot if low <= row.id <= high])
        rest = low - 1 if low > LOWEST else None
        self._post(("looked", ids), lambda: self.machine.looked(look.number, ids, self.world.now, rest)[1])

    def _fetch(self, fetch: c.Fetch, snapshot: list[w.Row]) -> list[Row]:
        table = self.world.table
        if (table.term, table.holder) != (fetch.term, fetch.holder):
            return []
        return [tuple_of(row) for row in sorted(snapshot, key=lambda row: row.id) if row.id in fetch.ids]

    def _have_flushed(self) -> None:
        """P34: what a statement has read is durable before anybody hears of it."""
        self.world.table.flush()

    def _fail_marker(self) -> None:
        """The statement fails; it has taken effect or not. The session is gone, and the scan with it."""
        command = self.marker[0]
        if isinstance(command, c.TakeTerm):
            if self.proven and self.world.script.next(2):
                self.world.table.set_term(self.world.table.term + 1, command.holder)
            self._seen_term = None
            return  # tried again
        if isinstance(command, c.SaveBookmark):
            self.marker.popleft()
            return
        if self.world.script.next(2) and isinstance(command, c.Mark):
            if self._snapshot is None:
                self._begin()
            if self._snapshot is not None and not self._over:
                self._mark(command, self._snapshot)
        if self.marker and self.marker[0] is command:
            self._statement_failed()
        self._scan.restart()

    def _statement_failed(self) -> None:
        command = self.marker.popleft()
        self._snapshot = None
        assert not isinstance(command, c.SaveBookmark | c.TakeTerm)
        self._post("it failed", lambda: self.machine.statement_failed(command.number, "it broke", self.world.now))


def tuple_of(row: w.Row) -> Row:
    """As a statement brings it."""
    topic = undecodable_topic(row.uid) if row.undecodable else "t"
    return row.id, row.key, row_bytes(row.id, row.key, topic, row.uid)
