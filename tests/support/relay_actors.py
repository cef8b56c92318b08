"""The inhabitants of `tests.support.relay_world`: a harvester, its shards, and the row bytes they exchange."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from confluent_kafka import KafkaError

from harvester.relay import commands as c
from harvester.relay import frames as f
from harvester.relay.machine import Phase, Relay, Row, Settings
from harvester.relay.purging import Outcome, Poison
from harvester.relay.router import shard_of
from harvester.relay.sender import Outlets, Policy, Sender

if TYPE_CHECKING:
    from tests.support import relay_world as w

Action = Callable[[], object]
_FOR_EVER = float("inf")
_POLICY = Policy(max_attempts=2, retry_backoff_s=0.0, retry_backoff_max_s=0.0, queue_timeout_s=0.0)


def row_bytes(record_id: int, key: bytes | None, topic: str = "t") -> bytes:
    """A row as `COPY (FORMAT BINARY)` sends it; its value is its id."""
    value = str(record_id).encode()
    parts = [struct.pack(">hiq", 8, 8, record_id)]
    parts += [struct.pack(">i", -1) if one is None else struct.pack(">i", len(one)) + one
              for one in (key, topic.encode(), value, None, None, struct.pack(">q", 0), None)]  # fmt: skip
    return b"".join(parts)


@dataclass(slots=True, eq=False)
class Sent:
    """A record at a producer; its report comes later."""

    report: Callable[[KafkaError | None, Any], None]
    appended: bool = False


class SimShard:
    """A shard process with a real Sender; its pipes, producer and purger are simulated."""

    def __init__(self, owner: SimHarvester, index: int) -> None:
        self.owner, self.index = owner, index
        self.to_shard: deque[f.Frame] = deque()
        self.to_supervisor: deque[f.Frame] = deque()
        self.alive, self.ready, self.doomed, self.watched = True, False, False, False
        self.wire: dict[int, Sent] = {}
        self.acked: list[int] = []
        self.deleting: list[int] | None = None
        self.deleted = False
        self.poison: deque[Poison] = deque()
        self.full = 0  # how many produces the producer refuses for lack of room
        self.sender = Sender(
            self,
            _POLICY,
            Outlets(
                send=self.to_supervisor.append,
                purge=self.acked.append,
                quarantine=self.poison.append,
                wake=lambda: None,
                fatal=self._fatal,
                trusted=owner.is_trusted,
            ),
        )

    # -- what it holds

    @property
    def unsettled(self) -> list[int]:
        """Ids handed to the producer and not settled."""
        return [*self.sender._barrier._unsettled]

    @property
    def holds(self) -> set[int]:
        """Every id in this shard or on its way to it under the current epoch."""
        barrier = self.sender._barrier
        ids = {*barrier._unsettled, *(entry.id for queue in barrier._queues.values() for entry in queue)}
        for frame in self.to_shard:
            if isinstance(frame, f.Dispatch) and frame.epoch == self.owner.relay.epoch:
                ids |= {struct.unpack_from(">hiq", raw)[2] for raw in frame.rows}
        return ids

    # -- the producer's interface

    def produce(self, topic: str, *, value: bytes, on_delivery: Any, **_: Any) -> None:
        """Take a record."""
        if self.full:
            self.full -= 1
            raise BufferError
        record_id = int(value)
        assert record_id not in self.wire, f"{record_id} is handed to the producer twice"
        assert self.owner.word, "P12: produced without trust"
        self.wire[record_id] = Sent(on_delivery)

    def _fatal(self, _text: str) -> None:
        self.doomed = True

    # -- what can happen

    def actions(self) -> list[tuple[str, Action]]:
        """Everything that goes on by itself."""
        name = f"{self.owner.name}{self.index}"
        if self.doomed:
            return [(f"{name}: exits", self.die)]
        found: list[tuple[str, Action]] = []
        if not self.ready:
            found.append((f"{name}: ready", self._become_ready))
        if self.to_shard:
            found.append((f"{name}: reads {self.to_shard[0]}", self._read))
        for record_id, sent in self.wire.items():
            if self.owner.world.table.rows[record_id].refused:
                found.append((f"{name}: {record_id} refused", lambda i=record_id: self.fail(i, "MSG_SIZE_TOO_LARGE")))
            elif sent.appended:
                found.append((f"{name}: {record_id} acknowledged", lambda i=record_id: self._acknowledge(i)))
            else:
                found.append((f"{name}: {record_id} appended", lambda i=record_id: self._append(i)))
        if self.deleting is not None:
            step = self._return if self.deleted else self._delete
            found.append((f"{name}: purge of {self.deleting} {'returns' if self.deleted else 'commits'}", step))
        elif self.acked:
            found.append((f"{name}: purge of {self.acked} begins", self._begin_delete))
        elif self.poison:
            found.append((f"{name}: quarantine of {self.poison[0].id}", self._move))
        if self.sender._retries:
            found.append((f"{name}: retries", lambda: self.sender.due(_FOR_EVER)))
        return found

    def mishaps(self) -> list[tuple[str, str, Action]]:
        """(fault, name, action) of what may go wrong."""
        name = f"{self.owner.name}{self.index}"
        found: list[tuple[str, str, Action]] = [
            ("shard death", f"{name}: dies", self.die),
            ("kafka", f"{name}: producer full", self._fill),
            ("timeouts", f"{name}: checks its queues", lambda: self.sender.check_queues(_FOR_EVER)),
        ]
        for i, sent in self.wire.items():
            if not sent.appended:
                found.append(("kafka", f"{name}: {i} times out", lambda i=i: self.fail(i, "_MSG_TIMED_OUT")))
                found.append(("kafka", f"{name}: {i} no topic", lambda i=i: self.fail(i, "UNKNOWN_TOPIC_OR_PART")))
            else:
                found.append(("kafka", f"{name}: {i} loses its ack", lambda i=i: self.fail(i, "_MSG_TIMED_OUT")))
            found.append(("shard death", f"{name}: {i} fatal", lambda i=i: self.fail(i, "_FATAL")))
        return found

    def _fill(self) -> None:
        self.full = 1 + self.owner.world.script.next(2)

    def _become_ready(self) -> None:
        self.ready = True
        self.to_supervisor.append(f.Ready(1))

    def _read(self) -> None:
        frame = self.to_shard.popleft()
        match frame:
            case f.Dispatch(epoch, rows):
                self.sender.dispatch(epoch, rows)
            case f.Remark():
                self.sender.remark(frame)
            case f.Closed(epoch, record_id):
                self.sender.closed(epoch, record_id)
            case _:
                raise AssertionError(frame)

    def _append(self, record_id: int) -> None:
        self.wire[record_id].appended = True
        self.owner.world.append(record_id)

    def _acknowledge(self, record_id: int) -> None:
        self.wire.pop(record_id).report(None, None)

    def fail(self, record_id: int, error: str) -> None:
        """Its report is an error; appended or not."""
        sent = self.wire.pop(record_id)
        if sent.appended:
            self.owner.world.excused[record_id] += 1
        sent.report(KafkaError(getattr(KafkaError, error)), None)

    def _begin_delete(self) -> None:
        self.deleting, self.deleted = sorted(self.acked), False
        self.acked.clear()

    def _delete(self) -> None:
        assert self.deleting is not None
        for record_id in self.deleting:
            if not self.owner.world.appended[record_id]:
                self.owner.world.fail(f"I5: record {record_id} is purged and was never appended")
            self.owner.world.table.rows[record_id].gone = True
        self.deleted = True

    def _return(self) -> None:
        ids, self.deleting = self.deleting, None
        assert ids is not None
        self.sender.purged(ids)

    def _move(self) -> None:
        poison, table = self.poison.popleft(), self.owner.world.table
        row = table.rows[poison.id]
        if (table.term, str(table.holder)) != (poison.term, poison.holder):
            outcome = Outcome.FENCED
        elif row.gone:
            outcome = Outcome.GONE
        else:
            outcome = Outcome.MOVED
            row.gone = True
            table.quarantined.add(poison.id)
        self.sender.quarantined(poison, outcome)

    def die(self) -> None:
        """SIGKILL: what is on the wire arrives or not, what was said stays readable."""
        self.alive = False
        world = self.owner.world
        for record_id, sent in self.wire.items():
            if not sent.appended and not world.table.rows[record_id].refused and world.script.next(2):
                world.append(record_id)
        self.wire.clear()
        if self.deleting is not None and not self.deleted and world.script.next(2):
            self._delete()
        world.excuse(self)


class SimHarvester:
    """A supervisor with a real Relay; its marker and its place in the group are simulated."""

    def __init__(self, world: w.World, name: str, settings: Settings) -> None:
        self.world, self.name = world, name
        self._made = 0
        self.relay = Relay(settings, self._new_id)
        self.shards = [SimShard(self, index) for index in range(settings.shards)]
        self.inbox: deque[tuple[str, Callable[[], Sequence[c.Command]]]] = deque()
        self.marker: deque[c.Mark | c.Reset | c.TakeTerm] = deque()
        self._snapshot: list[w.Row] | None = None
        self._seen_term: int | None = None
        self._processed: list[w.Row] = []  # what the mark that is being processed could see
        self.proven = self.word = self.revoking = False
        self.fuse: int | None = None  # trust runs out after so many produces

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
        self._post("acquire", lambda: self.relay.acquire(self.world.now))

    def lose_trust(self, reason: str) -> None:
        """The election fences."""
        self.word = self.proven = False
        self.fuse = None
        self.world.leader = None
        for shard in self.living:
            self.world.excuse(shard)
        self._post("fence", lambda: self.relay.fence(reason, self.world.now))

    @property
    def has_let_go(self) -> bool:
        """Another one may lead: trust is over, and so is the delivery timeout of all that was produced under it."""
        return not self.proven and not any(sent for s in self.living for sent in s.wire.values() if not sent.appended)

    def revoke(self) -> None:
        """The group takes leadership away and waits for the drain."""
        self.word, self.revoking, self.fuse = False, True, None
        self._post("drain", lambda: self.relay.drain(self.world.now))

    def _cut(self) -> None:
        """The drain takes too long."""
        for shard in self.living:
            if self.relay.ledger.unsettled_of(shard.index):
                shard.die()

    # -- state

    @property
    def living(self) -> list[SimShard]:
        return [shard for shard in self.shards if shard.alive]

    @property
    def leads(self) -> bool:
        return self.relay.phase is Phase.LEADING

    @property
    def is_calm(self) -> bool:
        return (
            not len(self.relay.ledger)
            and all(shard.alive and shard.ready and not shard.unsettled for shard in self.shards)
            and not any(shard.to_shard or shard.to_supervisor for shard in self.shards)
            and not self.revoking
        )

    def check_end(self) -> None:
        """Nothing is left behind."""
        ledger = self.relay.ledger
        if ledger.in_flight or ledger.queued or ledger.closed or any(s.sender._barrier.parked for s in self.shards):
            self.world.fail(f"{self.name} keeps something in calm")
        if any(shard.sender._barrier.queued or shard.sender._barrier._queues for shard in self.shards):
            self.world.fail(f"a barrier of {self.name} is up in calm")

    # -- what can happen

    def actions(self) -> list[tuple[str, Action]]:
        """Everything that goes on by itself."""
        found: list[tuple[str, Action]] = []
        if self.inbox:
            found.append((f"{self.name}: hears {self.inbox[0][0]}", self._hear))
        for shard in self.shards:
            name = f"{self.name}{shard.index}"
            if shard.to_supervisor:
                found.append((f"{name} says {shard.to_supervisor[0]}", lambda s=shard: self._hear_shard(s)))
            elif not shard.alive:
                found.append((f"{name} is buried", lambda s=shard: self._bury(s)))
            if shard.alive and shard.watched and len(shard.to_shard) <= self.world.pipe_frames:
                found.append((f"{name} has room", lambda s=shard: self._uncongested(s)))
            if shard.alive:
                found += shard.actions()
        if self.marker:
            begun = self._snapshot is not None or self._seen_term is not None
            step = self._finish if begun else self._begin
            found.append((f"{self.name}: {'ends' if begun else 'begins'} {self.marker[0]}", step))
        return found

    def mishaps(self) -> list[tuple[str, str, Action]]:
        """(fault, name, action) of what may go wrong."""
        found = [mishap for shard in self.living for mishap in shard.mishaps()]
        if self.proven and not self.revoking:
            found.append(("trust", f"{self.name}: fenced", lambda: self.lose_trust("fenced")))
            found.append(("trust", f"{self.name}: fuse", self._light_fuse))
            found.append(("hand over", f"{self.name}: revoked", self.revoke))
            found.append(("scale", f"{self.name}: scales", self._scale))
        if self.revoking:
            found.append(("shard death", f"{self.name}: cut", self._cut))
        if self.marker:
            found.append(("marker", f"{self.name}: the marker fails", self._fail_marker))
        found.append(("timeouts", f"{self.name}: time passes", self._jump))
        found.append(("timeouts", f"{self.name}: ticks", lambda: self._perform(self.relay.tick(self.world.now))))
        return found

    def _light_fuse(self) -> None:
        self.fuse = self.world.script.next(3)

    def _jump(self) -> None:
        self.world.now += 60.0
        self._perform(self.relay.tick(self.world.now))

    def _scale(self) -> None:
        shards, within_s = 1 + self.world.script.next(3), self.world.script.next(2) * 1e9
        self._post(f"scale {shards}", lambda: self.relay.scale(shards, self.world.now + within_s, self.world.now))

    # -- the supervisor's part

    def _post(self, name: str, act: Callable[[], Sequence[c.Command]]) -> None:
        self.inbox.append((name, act))

    def _hear(self) -> None:
        self._perform(self.inbox.popleft()[1]())

    def _hear_shard(self, shard: SimShard) -> None:
        relay, now, i = self.relay, self.world.now, shard.index
        frame = shard.to_supervisor.popleft()
        match frame:
            case f.Settled(ids):
                self._perform(relay.settled(i, ids, now)[1])
            case f.Remarked(epoch, ids):
                self._perform(relay.remarked(i, epoch, ids, now))
            case f.Parked(epoch, record_id, given_back, _):
                self._perform(relay.parked(i, epoch, record_id, given_back, now))
            case f.Refused(epoch, ids):
                self._perform(relay.refused(i, epoch, ids, now))
            case f.Dropped(ids):
                self._perform(relay.dropped(i, ids, now))
            case f.FateUnknown(epoch, ids, reason):
                self._perform(relay.fate_unknown(i, epoch, ids, reason, now))
            case f.QueueTimedOut(epoch, record_id, waited_s):
                self._perform(relay.queue_timed_out(i, epoch, record_id, waited_s, now))
            case f.Ready():
                self._perform(relay.shard_ready(i, now))

    def _bury(self, shard: SimShard) -> None:
        self.shards[shard.index] = SimShard(self, shard.index)
        self._perform(self.relay.shard_died(shard.index, self.world.now))

    def _uncongested(self, shard: SimShard) -> None:
        shard.watched = False
        self._perform(self.relay.uncongested(shard.index, self.world.now))

    def _perform(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            self.world.trace.append(f"    {self.name} {command}")
            match command:
                case c.Send(index, frame):
                    self._send(self.shards[index], frame)
                case c.Mark() | c.Reset() | c.TakeTerm():
                    if isinstance(command, c.Mark):
                        self._check_mark()
                    self.marker.append(command)
                case c.OpenTrust():
                    self.word = self.proven
                case c.CloseTrust():
                    self.word = False
                case c.Kill(index, _):
                    if self.shards[index].alive:
                        self.shards[index].die()
                case c.Announce(event):
                    leader_id = getattr(event, "leader_id", None)
                    if leader_id in self.world.leader_ids:
                        self.world.fail(f"leader id {leader_id} is used twice")
                    self.world.leader_ids |= {leader_id} if leader_id is not None else set()
                case c.Drained():
                    self._drained()
                case c.Emptied():
                    left = [row.id for row in self._processed if not row.gone]
                    if left:
                        self.world.fail(f"Emptied is said while {left} are in the outbox")
                case c.Resize(shards):
                    self._resize(shards)

    def _send(self, shard: SimShard, frame: f.Frame) -> None:
        if not shard.alive:
            return
        if isinstance(frame, f.Dispatch):
            already = shard.holds
            for raw in frame.rows:
                record_id = struct.unpack_from(">hiq", raw)[2]
                if record_id in already:
                    self.world.fail(f"record {record_id} is dispatched to a shard that holds it")
                key = self.world.table.rows[record_id].key
                assert shard.index == shard_of(key, record_id, len(self.shards))
        shard.to_shard.append(frame)
        if "congestion" in self.world.faults and len(shard.to_shard) > self.world.pipe_frames:
            shard.watched = True
            self.relay.congested(shard.index)

    def _check_mark(self) -> None:
        for shard in self.living:
            unknown = [i for i in shard.holds if i not in self.relay.ledger]
            if unknown:
                self.world.fail(f"P5: a mark while {self.name}{shard.index} holds {unknown} beyond the ledger")

    def _drained(self) -> None:
        if len(self.relay.ledger) or any(shard.unsettled for shard in self.living):
            self.world.fail("Drained is said while something is unsettled")
        if self.revoking:
            self.revoking = self.proven = False
            self.world.leader = None

    def _resize(self, shards: int) -> None:
        if any(shard.unsettled for shard in self.living):
            self.world.fail("P17: the number of shards changes while something is unsettled")
        self.shards = [*self.shards[:shards], *(SimShard(self, i) for i in range(len(self.shards), shards))]

    # -- the marker's part

    def _begin(self) -> None:
        if isinstance(self.marker[0], c.TakeTerm):
            self._seen_term = self.world.table.term
        else:
            self._snapshot = self.world.table.visible()

    def _finish(self) -> None:
        command = self.marker[0]
        table = self.world.table
        if isinstance(command, c.TakeTerm):
            self._seen_term, seen = None, self._seen_term
            if self.proven and table.term != seen:
                return  # again
            self.marker.popleft()
            if self.proven:
                table.term, table.holder = table.term + 1, command.holder
                term = table.term
                self._post("term taken", lambda: self.relay.term_taken(command.holder, term, self.world.now))
            return
        self.marker.popleft()
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        if isinstance(command, c.Reset):
            self._reset(command)
            return
        rows = self._mark(command, snapshot)
        if not rows and (table.term, table.holder) != (command.term, command.holder):
            self._post("term gone", lambda: self._term_gone(command.holder))
        else:
            self._post(f"marked {[row[0] for row in rows]}", lambda: self._marked(command.number, rows, snapshot))

    def _marked(self, number: int, rows: list[Row], snapshot: list[w.Row]) -> Sequence[c.Command]:
        self._processed = snapshot
        return self.relay.marked(number, rows, self.world.now)

    def _term_gone(self, holder: UUID) -> Sequence[c.Command]:
        if holder != self.relay.holder:
            return ()
        if not self.world.usurped and len(self.world.harvesters) == 1:
            self.world.fail("P8: the term is lost, and nobody took it")
        return self.relay.term_lost(self.proven, self.world.now)

    def _mark(self, mark: c.Mark, snapshot: list[w.Row]) -> list[Row]:
        table = self.world.table
        if (table.term, table.holder) != (mark.term, mark.holder):
            return []
        rows = [
            row
            for row in snapshot
            if not row.gone
            and row.leader_id != mark.leader_id
            and row.key not in mark.closed_keys
            and shard_of(row.key, row.id, mark.shards) not in mark.closed_shards
        ][: mark.limit]
        for row in rows:
            row.leader_id = mark.leader_id
        return [(row.id, row.key, row_bytes(row.id, row.key, "?" if row.undecodable else "t")) for row in rows]

    def _reset(self, reset: c.Reset) -> None:
        table = self.world.table
        if (table.term, table.holder) == (reset.term, reset.holder):
            for record_id in reset.ids:
                row = table.rows[record_id]
                if row.leader_id == reset.leader_id:
                    row.leader_id = None

    def _fail_marker(self) -> None:
        """The statement fails; it has taken effect or not."""
        command = self.marker[0]
        if isinstance(command, c.TakeTerm):
            if self.proven and self.world.script.next(2):
                self.world.table.term, self.world.table.holder = self.world.table.term + 1, command.holder
            self._seen_term = None
            return  # tried again
        self.marker.popleft()
        snapshot, self._snapshot = self._snapshot, None
        happened = self.world.script.next(2)
        if isinstance(command, c.Reset):
            if happened:
                self._reset(command)
            self._post("reset failed", lambda: self.relay.reset_failed("it broke", self.world.now))
        else:
            if happened:
                self._mark(command, self.world.table.visible() if snapshot is None else snapshot)
            self._post("mark failed", lambda: self.relay.mark_failed(command.number, "it broke", self.world.now))
