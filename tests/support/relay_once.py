"""The world of `tests.support.relay_world` in exactly-once mode: what its log holds is what is committed (I6).

Real are the machine (`StateMachine` with its settings for that mode), each shard's `TransactionQueue`, and what becomes
of failed records (`Refusals`). Simulated are the lanes as Kafka keeps them, and the transactor with the opening of its
lanes, as a generator that stops wherever another process could do something.

Besides what its base checks:

- I6: nothing is appended to the log twice, whatever happened;
- I2 holds without exception, for the log and for what is committed to it;
- P25: nothing can appear, or is still to be settled, below a low water that is sent;
- P49: where the fault "server" replaces the database by a copy that lacks nothing, nothing is repeated. Where the copy
  lacks the last events, what it has may be repeated, and in the end no older record of a key has come after a younger
  one of its rows.

Trust is of no importance here: a *zombie* goes on as a leader while another one is elected, for as long as it likes.
A lane's transaction stays open when its shard dies; a commit that was asked for arrives later, or never.

The fault "stray" stands apart. A commit that nobody here has sent arrives in the middle of a transaction, as one could
without P40. Records reach the broker one by one then, and those that come after it are refused. Order and repeats are
not looked at; that nothing is lost is P46.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

from confluent_kafka import KafkaError

from harvester.delivery.decode import Broken, Oversize, decode
from harvester.delivery.progress import (
    LANES_OF_A_SHARD,
    NamedRows,
    Progress,
    encode_named,
    lanes_of,
    lanes_to_fence,
    same_rows,
)
from harvester.delivery.progress import decode as decode_progress
from harvester.outbox.purge_session import PoisonRow, QuarantineOutcome
from harvester.record import KafkaRecord
from harvester.relay.core import frames as f
from harvester.relay.core.leadership import RelaySettings
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.put_away import Outcome
from harvester.relay.transaction_intake import Failed, Refusals
from tests.support.relay_actors import SimHarvester, tuple_of
from tests.support.relay_shard import Action, Note, SimProcess, uid_of
from tests.support.relay_world import Row, World

ONCE_FAULTS = (
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
    "zombie",
    "harvester death",
    "crash",
    "pause",
    "loan",
)
SHARDS = 3
LANES = SHARDS * LANES_OF_A_SHARD
TROUBLES = ("_MSG_TIMED_OUT", "UNKNOWN_TOPIC_OR_PART", "unclear", "unavailable")
Steps = Generator[str, None, None]
_FOR_EVER = float("inf")


@dataclass(slots=True, eq=False)
class SimLane:
    """A lane as Kafka keeps it: the producer's epoch, the open transaction, and the partition of the progress topic."""

    number: int
    epoch: int = 0
    is_slow: bool = False  # records take their time to the broker
    coming: list[int] = field(default_factory=list)  # uids, handed over and not yet written
    written: list[int] = field(default_factory=list)  # uids, in the open transaction
    noted: Progress | None = None  # written, in the open transaction
    ending: Progress | None = None  # a commit with this record is on its way
    log: list[Progress] = field(default_factory=list)
    producer: SimProducer | None = None  # that is not fenced
    late: int | None = None  # the epoch of a commit that was sent twice; one of the two may still arrive

    def fence(self) -> None:
        """Whatever is open is aborted."""
        self.epoch += 1
        self.empty()
        self.ending = self.producer = None

    def empty(self) -> None:
        """The open transaction has nothing any more."""
        self.coming, self.written, self.noted = [], [], None

    def commit(self) -> list[int]:
        """The commit that was on its way arrives; returns what is committed."""
        assert self.ending is not None
        self.log.append(self.ending)
        uids, self.ending = self.written, None
        self.empty()
        if self.producer is not None:
            self.producer.result = True
        return uids

    def commit_astray(self) -> list[int]:
        """A commit that nobody here has sent arrives: what the broker has is committed, and the rest refused."""
        if self.noted is not None:
            self.log.append(self.noted)
        uids = self.written
        self.fence()  # nothing comes of whatever else the producer does
        return uids


@dataclass(slots=True, eq=False)
class SimProducer:
    """A producer of a lane. What it does has no effect when another one has fenced it."""

    lane: SimLane
    epoch: int = -1
    result: bool | None = None  # of the commit: it was done, it cannot be, or nobody knows yet
    resent: bool = False  # the commit, by the client, whose connection broke

    @property
    def is_fenced(self) -> bool:
        return self.epoch != self.lane.epoch

    def init(self) -> None:
        """Fence the others."""
        self.lane.fence()
        self.epoch, self.lane.producer = self.lane.epoch, self

    def write(self, uid: int) -> None:
        """Part of the open transaction."""
        if not self.is_fenced:
            (self.lane.coming if self.lane.is_slow else self.lane.written).append(uid)

    def note(self, progress: Progress) -> None:
        """The progress record, part of the open transaction."""
        if not self.is_fenced:
            self.lane.noted = progress

    def commit(self, progress: Progress) -> None:
        """Ask for it; it is sent when all records are written."""
        self.result = False if self.is_fenced else None
        if not self.is_fenced:
            self.lane.ending = progress

    def abort(self) -> bool:
        """False: it is fenced."""
        if not self.is_fenced:
            self.lane.empty()
        return not self.is_fenced


class OnceShard(SimProcess):
    """A shard in exactly-once mode; `_transactor` follows `harvester.relay.exactly_once` step by step."""

    world: OnceWorld

    def __init__(self, owner: SimHarvester, index: int, world: OnceWorld) -> None:
        super().__init__(owner, index)
        self.world = world
        self.batches = TransactionQueue(world.transaction_records, world.named)
        self.refusals = Refusals(self.batches, self.policy, self)
        self.pending: f.Remark | None = None
        self.under: f.Remark | None = None
        self.wanted: f.Remark | None = None
        self.answered_term: int | None = None
        self.opened: tuple[int | None, int] | None = None
        self.producer: SimProducer | None = None  # of the lane whose turn it is
        self.idle: SimProducer | None = None  # of the other one
        self.found: set[int] = set()  # committed on a lane that was opened, while the other one is not open
        self.failed: list[Failed] = []
        self.trouble: str | None = None  # what goes wrong with the next thing that is asked of Kafka
        self.answered = -1  # the epoch
        self.transactor: Steps = self._transactor()
        self.at = next(self.transactor)

    # -- what it holds

    def _open_entries(self) -> list[QueuedRecord]:
        """Without those of a transaction of which nobody knows what became: they are whoever's who opens the lane."""
        return self.batches._open if self.producer is not None else []

    @property
    def unsettled(self) -> list[int]:
        return [*(entry.id for entry in self._open_entries()), *self.batches.leaving()]

    @property
    def held(self) -> int:
        return len(self._open_entries()) + len(self.batches._unpurged) + len(self.batches._leaving)

    @property
    def unsettled_uids(self) -> list[int]:
        return []  # nothing may be repeated, whoever has it

    @property
    def inside(self) -> list[tuple[int, bytes | None]]:
        batches = self.batches
        held = [entry for entries in batches._held.values() for entry in entries]
        entries = [*batches._queue, *batches._oversize.values(), *held]
        unpurged = [entry for transaction in batches._not_purged() for entry in transaction.entries]
        entries += [*self._open_entries(), *unpurged]
        return [*((entry.id, entry.key) for entry in entries), *((record_id, None) for record_id in batches._leaving)]

    @property
    def keeps_something(self) -> bool:
        batches = self.batches
        return bool(batches.queued or batches.in_flight or batches._refusing or batches._announced)

    # -- what can happen

    def _steps(self) -> list[tuple[Note, Action]]:
        found: list[tuple[Note, Action]] = []
        if self.at == "awaits the commit":
            if self.producer is not None and (self.producer.result is not None or self.producer.is_fenced):
                found.append(((self.name, "hears of its commit", self.producer.result), self._go_on))
        elif self.at != "rests" or self._has_work():
            found.append(((self.name, self.at), self._go_on))
        return found

    def _go_on(self) -> None:
        self.at = next(self.transactor)

    def mishaps(self) -> list[tuple[str, Note, Action]]:
        name = self.name
        found: list[tuple[str, Note, Action]] = [
            ("shard death", (name, "dies"), self.kill),
            ("timeouts", (name, "checks its queues"), self._check_queues),
        ]
        if self.at == "awaits the commit":
            found.append(("kafka", (name, "its commit is unclear"), self._doubt))
            if self.producer is not None and not (self.producer.resent or self.producer.is_fenced):
                found.append(("kafka", (name, "its commit is sent twice"), self._resend))
        found.append(("kafka", (name, "will have trouble"), self._foresee))
        if self.store is not None:
            found += self.store.mishaps(name)
        return found

    def _foresee(self) -> None:
        self.trouble = TROUBLES[self.world.script.next(len(TROUBLES))]

    def _doubt(self) -> None:
        self.trouble = "unclear"
        self._go_on()

    def _resend(self) -> None:
        assert self.producer is not None
        self.producer.resent, self.producer.lane.late = True, self.producer.epoch

    def _is_clear(self, producer: SimProducer) -> bool:
        """P40: no request is under way that could end another transaction."""
        return not producer.resent

    def _is_troubled(self, *what: str) -> str | None:
        """Whether one of these goes wrong now; once."""
        trouble = self.trouble
        if trouble not in what:
            return None
        self.trouble = None
        return trouble

    def _check_queues(self) -> None:
        oldest = self.batches.oldest()
        if oldest is not None and self.under is not None and self.pending is None and self.producer is not None:
            self.to_supervisor.append(f.QueueTimedOut(self.under.epoch, oldest.id, _FOR_EVER))

    def _read(self) -> None:
        frame = self.to_shard.popleft()
        match frame:
            case f.Dispatch(epoch, rows):
                self._dispatch(epoch, rows)
            case f.Remark():
                self.server, self.term = frame.server or self.server, frame.term or self.term
                self.pending = frame
                self.batches.drop_queue()
            case f.ParkAcknowledged(epoch, record_id):
                if self.under is not None and epoch == self.under.epoch:
                    self.batches.reopen(record_id)
            case _:
                raise AssertionError(frame)

    def _dispatch(self, epoch: int, rows: bytes) -> None:
        meant = self.pending or self.under
        blocked = meant is None or meant.term is None
        sums: list[int] = []
        records = decode(rows, sums)
        stored = records if self.store is None else self.store.decode(rows)
        entries = [
            QueuedRecord(record.id, record.key, record, self.world.now, row_sum)
            for record, row_sum in zip(stored, sums, strict=True)
        ]
        for entry in entries:
            entry.alone = self.refusals.attempts.has_timed_out(entry.id)
        stale = blocked or (meant is not None and epoch != meant.epoch)
        refused = [entry.id for entry in (entries if stale else self.batches.offer_all(entries))]
        if refused:
            self.to_supervisor.append(f.Dropped(refused) if blocked else f.Refused(epoch, refused))
        self._store_oversize()

    def _store_oversize(self) -> None:
        for entry in self.batches.to_store():
            assert self.store is not None
            assert isinstance(entry.record, Oversize)
            self.store.put(entry.record, partial(self._stored, entry))

    def _stored(self, entry: QueuedRecord, outcome: Outcome) -> None:
        if self.batches.is_oversize(entry):
            meant = self.pending or self.under
            if isinstance(outcome, KafkaRecord):
                self.batches.stored(entry, outcome, self.world.now)
            elif meant is not None:
                self.refusals.not_stored(entry, outcome, meant)
            self._store_oversize()

    def _purged(self, ids: list[int]) -> None:
        self.batches.settle(ids)
        self._store_oversize()
        self.refusals.attempts.settled(ids)
        self.to_supervisor.append(f.Settled(ids))

    def _quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        if outcome is QuarantineOutcome.FENCED:
            self.refusals.give_up(poison.id)
            return
        if outcome is QuarantineOutcome.MOVED:
            self.to_supervisor.append(f.Quarantined(poison.id, poison.error))
        self._purged([poison.id])

    def _leave_producer(self) -> None:
        self.producer = self.idle = None  # a transaction stays open, and a commit may be on its way

    # -- the transactor: it yields what it is about to do

    def _transactor(self) -> Steps:
        while True:
            yield "rests"
            self.wanted = self.pending
            if self.pending is not None:
                yield from self._answer(self.pending)
            elif self.producer is None and self.under is not None:
                yield from self._open(self.under, lanes_of(self.index))
            elif self.producer is not None:
                yield from self._transact(self.producer)

    def _has_work(self) -> bool:
        if self.pending is not None:
            return True
        return self.under is not None and (self.producer is None or self.batches.is_ready)

    def _is_over(self) -> bool:
        return self.pending is not None or self.under is None

    def _transact(self, producer: SimProducer) -> Steps:
        if not self.trusted():
            self._give_all_up()
            return
        self.failed = []
        assert self.under is not None
        producer.note(_progress(self.under, self.batches.unpurged(producer.lane.number)))
        sound = yield from self._fill(producer)
        named, under, alone = self.batches.progress(), self.under, self.batches.alone
        if not sound or self._is_over() or under is None or not self.trusted():
            yield from self._abort(producer)
            return
        yield "commits"
        yield from self._arrive(producer)
        self._fail_some(alone)
        if self.failed:
            yield from self._abort(producer)
            return
        progress = _progress(under, named)
        producer.note(progress)
        if producer.lane.is_slow:
            yield "has sent its progress"
        producer.commit(progress)
        yield "awaits the commit"
        if not self._is_troubled("unclear") and producer.result and self._is_clear(producer):
            self._commit(producer.lane.number)
            self.producer, self.idle = self.idle, self.producer
        else:
            self._not_committed()

    def _fill(self, producer: SimProducer) -> Generator[str, None, bool]:
        while True:
            entries = [] if self._is_over() else self.batches.take(1 + self.world.script.next(3))
            for entry in entries:
                if not isinstance(entry.record, KafkaRecord):
                    assert isinstance(entry.record, Broken)  # what is oversize is not queued
                    self.failed.append((entry, entry.record.reason))
                    return False
                producer.write(uid_of(entry.record))
            if not entries or not self.world.script.next(3):
                return True
            yield "fills"

    def _arrive(self, producer: SimProducer) -> Steps:
        """P46: progress is sent when all other records are acknowledged."""
        while producer.lane.coming and not producer.is_fenced:
            yield "awaits its records"

    def _fail_some(self, alone: QueuedRecord | None) -> None:
        """What brokers say of the open transaction: they refuse whole batches, in which records lie together."""
        entries, draw = self.batches._open, self.world.script.next
        for at, entry in enumerate(entries):
            if self.world.uids[uid_of(entry.record)].refused:
                first, last = at - draw(at + 1), at + draw(len(entries) - at)
                error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
                self.failed += [(other, error) for other in entries[first : last + 1]]
                return
        trouble = self._is_troubled("_MSG_TIMED_OUT", "UNKNOWN_TOPIC_OR_PART")
        if trouble is not None and entries:
            error = KafkaError(getattr(KafkaError, trouble))
            first = draw(len(entries))
            self.failed += [(other, error) for other in entries[first : first + 1 + draw(3)]]
            if alone is not None:
                self.failed = [(alone, error)]

    def _commit(self, lane: int) -> None:
        """It is certain."""
        self.purge([entry.record for entry in self.batches.committed(lane)])

    def _not_committed(self) -> None:
        """Or it was, and nobody knows."""
        self._lose_lanes()

    def _abort(self, producer: SimProducer) -> Steps:
        yield "aborts"
        if not producer.abort() or self._is_troubled("unclear"):
            self._lose_lanes()
            return
        self.batches.aborted()
        self._judge()

    def _lose_lanes(self) -> None:
        self.producer = self.idle = None

    def _judge(self) -> None:
        failed, self.failed = self.failed, []
        if self.under is None or self.pending is not None:
            self.batches.drop_queue()
        elif failed:
            self.refusals.judge(failed, self.under)

    def _give_all_up(self) -> None:
        self.under = None
        self.to_supervisor.append(f.Dropped(self.batches.drop_queue(), in_doubt=True))

    # -- opening

    def _answer(self, frame: f.Remark) -> Steps:
        self.under = None
        in_doubt = frame.term is None and self.producer is None
        if frame.term is None:
            self._undo()
            self.batches.drop_queue()
        elif self.producer is None or self.opened != (frame.term, frame.lanes):
            self._lose_lanes()
            self.opened = None
            opened = yield from self._open(frame, [*self._others(frame), *lanes_of(self.index)])
            if not opened:
                return
            if self.producer is not None:
                self.opened = (frame.term, frame.lanes)
        if self.pending is not frame:
            return
        if frame.term != self.answered_term:
            self.refusals.attempts.states.clear()
        self.pending, self.answered_term, self.answered = None, frame.term, frame.epoch
        self.under = frame if self.producer is not None and frame.term is not None else None
        self.to_supervisor.append(f.Remarked(frame.epoch, self.batches.leaving(), in_doubt))

    def _others(self, frame: f.Remark) -> list[int]:
        """Lanes of shards that are no more."""
        return lanes_to_fence(self.index, frame.shards, frame.lanes)[:-LANES_OF_A_SHARD]

    def _open(self, frame: f.Remark, numbers: Sequence[int]) -> Generator[str, None, bool]:
        """False: nobody wants it any more."""
        own: list[SimProducer] = []
        for number in numbers:
            producer: SimProducer | None = None
            while producer is None:
                if self.pending is not self.wanted:
                    return False
                if not self._is_ours(frame):
                    return self._be_deposed()
                producer = SimProducer(self.world.lanes[number])
                for step in self._fence(producer):
                    yield f"{step} lane {number}"
                    if self.pending is not self.wanted:
                        return False
                if not self._still_ours(frame):
                    return self._be_deposed()
                if self._is_troubled("unavailable"):
                    producer = None
                    continue
                if not (yield from self._see_to_progress(producer, frame)):
                    producer = None
            if number in lanes_of(self.index):
                own.append(producer)
        self.idle, self.producer = own
        return True

    def _fence(self, producer: SimProducer) -> Steps:
        yield "fences"
        producer.init()
        yield "has fenced"

    def _is_ours(self, frame: f.Remark) -> bool:
        """The term row names us."""
        table = self.world.table
        return (table.term, str(table.holder)) == (frame.term, frame.holder)

    def _still_ours(self, frame: f.Remark) -> bool:
        """After the lane was fenced (P20)."""
        return self._is_ours(frame)

    def _be_deposed(self) -> bool:
        self._undo()
        self._give_all_up()
        return True

    def _last_progress(self, producer: SimProducer) -> Progress | None:
        return producer.lane.log[-1] if producer.lane.log else None

    def _see_to_progress(self, producer: SimProducer, frame: f.Remark) -> Generator[str, None, bool]:
        """False: to be tried again."""
        number = producer.lane.number
        progress = self._last_progress(producer)
        ids = list(progress.ids) if progress is not None else []
        yield f"has read that {ids} are committed on lane {number}"
        if progress is None or not ids:
            self._published(number, [])
            return True
        while not self._reaches_database():
            yield "awaits the database"
        ids = self._same_rows(progress, frame)
        self.delete_rows(ids)
        yield f"has purged {ids}"
        self._published(number, ids)
        producer.commit(_progress(frame, ()))
        yield "writes an empty record"
        while producer.result is None and not producer.is_fenced:
            if self._is_troubled("unclear"):
                return False
            yield "awaits an empty record"
        return bool(producer.result)

    def _reaches_database(self) -> bool:
        """P9: its purger has a connection with the server that is meant."""
        if not self.connected:
            self._connect()
        return self.connected

    def _same_rows(self, progress: Progress, frame: f.Remark) -> list[int]:
        """The rows that the lane has committed, and that are to be purged."""
        assert frame.term is not None
        if str(progress.incarnation) == frame.incarnation and progress.term <= frame.term:
            return list(progress.ids)
        found = self._in_order([*same_rows(progress, map(tuple_of, self.world.table.visible())).ids])
        if found:
            self.world.trace.append(("   ", self.name, found, "are recognised"))
        return found

    def _in_order(self, ids: list[int]) -> list[int]:
        """P49: without those that an older row of their key stays behind."""
        rows = self.world.table.visible()
        others = [row for row in rows if row.id not in ids and row.key is not None]
        return [
            row.id for row in rows
            if row.id in ids and not any(other.key == row.key and other.id < row.id for other in others)
        ]  # fmt: skip

    def _published(self, number: int, ids: list[int]) -> None:
        if number in lanes_of(self.index):
            self.found.update(ids)
            if self._is_known(number):
                self._undo()
                self._judge()
        self.refusals.attempts.settled(ids)
        if ids:
            self.to_supervisor.append(f.Settled(ids))

    def _is_known(self, number: int) -> bool:
        """Both lanes are open once this one of ours has been read, so the open transaction's fate is known."""
        return number == lanes_of(self.index)[-1]

    def _undo(self) -> None:
        self.batches.aborted(self.found)
        self.found.clear()


def _progress(under: f.Remark, rows: Sequence[NamedRows]) -> Progress:
    assert under.term is not None
    assert under.incarnation is not None
    return decode_progress(*encode_named(under.term, UUID(under.incarnation), rows))


class OnceHarvester(SimHarvester):
    """It can be killed as a whole, and be a zombie."""

    world: OnceWorld
    is_zombie = False

    def actions(self) -> list[tuple[Note, Action]]:
        found = super().actions()
        if self.is_zombie and self.world.leader is not self:
            found.append(((self.name, "learns that another one leads"), self._learn))
        return found

    @property
    def is_calm(self) -> bool:
        return super().is_calm and not self.inbox_matters and not any(shard.keeps_something for shard in self.shards)

    @property
    def inbox_matters(self) -> bool:
        """Whether anything but what the marker found is still to be heard."""
        return any(isinstance(name, str) for name, _ in self.inbox)

    def mishaps(self) -> list[tuple[str, Note, Action]]:
        found = super().mishaps()
        if self.proven and not self.revoking and self.world.leader is self and len(self.world.harvesters) > 1:
            found.append(("zombie", (self.name, "is a zombie from now on"), self._be_zombie))
        found.append(("harvester death", (self.name, "is killed"), self._be_killed))
        return found

    def elect(self) -> None:
        self.is_zombie = False
        super().elect()

    def _be_zombie(self) -> None:
        self.is_zombie = True
        self._step_down()

    def _learn(self) -> None:
        self.is_zombie = False
        self.lose_trust("another one leads")

    def _be_killed(self) -> None:
        for shard in self.living:
            shard.kill()
        self._step_down()
        self.is_zombie = False
        self._begin_life(self.machine.settings)

    def _begin_life(self, settings: RelaySettings) -> None:
        super()._begin_life(settings)
        self.machine.tenure.lanes = LANES

    def _send(self, shard: SimProcess, frame: f.Frame) -> None:
        assert isinstance(shard, OnceShard)
        if isinstance(frame, f.Dispatch) and shard.alive and shard.answered != frame.epoch:
            self.world.fail(f"P21: {shard.name} gets records before it has answered")
        super()._send(shard, frame)

    def pass_time(self, time_s: float) -> None:
        """Shards that live give a sign of it, as a rule."""
        self.world.now += time_s
        for shard in self.living:
            if shard.ready and (self.world.script.over or self.world.script.next(3)):
                self.machine.heard(shard.index, self.world.now)
        self._tick()


class OnceWorld(World):
    """A world whose leader delivers exactly once."""

    transaction_records = named = 1

    def __init__(self, data: bytes, faults: tuple[str, ...] = ONCE_FAULTS) -> None:
        self.lanes = [SimLane(number, is_slow="stray" in faults) for number in range(LANES)]
        self._survivors: set[int] = set()  # uids of the rows that the last server with a loss began with
        self._places: dict[int, int] = {}  # by uid: the place of its last record in the log
        super().__init__(data, faults)

    def adjusted(self, settings: RelaySettings) -> RelaySettings:
        draw = self.script.next
        self.transaction_records, self.named = 1 + draw(6), 1 + draw(8)
        return replace(settings, exactly_once=True, max_in_flight_records=settings.max_in_flight_records + draw(8))

    def make_harvester(self, name: str, settings: RelaySettings) -> SimHarvester:
        """The second has a number of shards of its own: a key's lane is not the same for both."""
        shards = settings.shards if name == "A" else 1 + self.script.next(SHARDS)
        return OnceHarvester(self, name, replace(settings, shards=shards))

    def make_shard(self, owner: SimHarvester, index: int) -> SimProcess:
        return OnceShard(owner, index, self)

    def check_release(self, name: str) -> None:
        """`harvester move` forgets the progress then: all that is committed is purged, and no more is."""
        for lane in self.lanes:
            if lane.ending is not None:
                self.fail(f"{name} releases its term while lane {lane.number} is committing")
            last = lane.log[-1] if lane.log else None
            rows = self.table.rows
            if last is not None and last.incarnation == UUID(int=self.table.server):
                left = [number for number in last.ids if number in rows and not rows[number].gone]
                if left:
                    self.fail(f"{name} releases its term, and {left}, which lane {lane.number} has committed, are left")

    def may_be_elected(self, harvester: SimHarvester) -> bool:
        """At any time: a zombie is fenced by its lanes."""
        return not harvester.proven and not harvester.revoking

    def excuse(self, _shard: SimProcess) -> None:
        """Nothing may be repeated."""

    def append(self, uid: int) -> None:
        if "stray" in self.faults:
            self.appended[uid] += 1
            return
        row = self.uids[uid]
        if uid in self.appended:
            self.trace.append(("    log:", row.id, "again"))
            if not self.excused[uid]:
                self.fail(f"I6: record {row.id} is committed twice")
            if row.key is not None and uid < self._newest.get(row.key, 0):
                del self._newest[row.key]  # how repeats end is seen in the end
        self._places[uid] = self.appended.total()
        super().append(uid)

    def begin_anew(self) -> None:
        """Only where something was lost may anything be repeated."""
        if self._led_on == self.table.server:
            return
        lost, self._has_lost = self._has_lost, False
        if not lost:
            self._led_on = self.table.server
            return
        let_go = set(self._let_go)
        super().begin_anew()
        self._let_go |= let_go  # until the lanes are fenced
        self._survivors = {row.uid for row in self.table.visible()}

    def _replace_server(self) -> None:
        """More often than not while something is committed and not purged: else there is little to see."""
        shards = [shard for harvester in self.harvesters for shard in harvester.living]
        if any(isinstance(shard, OnceShard) and shard.batches.in_flight for shard in shards) or not self.script.next(8):
            self.replace_server(self.script.next(12) if self.script.next(2) else 0)

    def _check_end(self) -> None:
        super()._check_end()
        rows = sorted((row for row in self.table.rows.values() if row.uid in self._survivors), key=lambda row: row.uid)
        last: dict[bytes, Row] = {}
        for row in rows:
            if row.key is None or row.uid not in self._places:
                continue
            before = last.get(row.key, row)
            if self._places[before.uid] > self._places[row.uid]:
                self.fail(f"P49: record {before.id} has come after {row.id} of its key")
            last[row.key] = row

    def check_low_water(self, low_water: int | None) -> None:
        if low_water is None or "server" in self.faults:
            return  # what was settled on another server may be back, and whoever led there says what held
        left = [row.id for row in self.table.rows.values() if not (row.gone or row.early) and row.id < low_water]
        if left:
            self.fail(f"P25: {left} lie below the low water {low_water}")

    # -- what can happen

    def _ordinary(self) -> list[tuple[Note, Action]]:
        return [*super()._ordinary(), *self._endings()]

    def _endings(self) -> list[tuple[Note, Action]]:
        """Commits that were asked for, and those that a producer had sent twice and that nobody has fenced since."""
        writes, commits, late = list[tuple[Note, Action]](), list[tuple[Note, Action]](), list[tuple[Note, Action]]()
        for lane in self.lanes:
            if lane.coming:
                writes.append(((f"lane {lane.number}", "writes"), self._write(lane)))
            elif lane.ending is not None:
                commits.append(((f"lane {lane.number}", "commits"), self._end(lane)))
            if lane.late == lane.epoch and lane.ending is None:
                late.append(((f"lane {lane.number}", "a late commit arrives"), self._end_early(lane)))
        return [*writes, *commits, *late]

    def _write(self, lane: SimLane) -> Callable[[], None]:
        return lambda: lane.written.append(lane.coming.pop(0))

    def _end(self, lane: SimLane) -> Callable[[], None]:
        def end() -> None:
            for uid in lane.commit():
                self.append(uid)

        return end

    def _end_early(self, lane: SimLane) -> Callable[[], None]:
        def end() -> None:
            uids, lane.written, lane.late = lane.written, [], None
            for uid in uids:
                self.append(uid)

        return end

    def _end_astray(self, lane: SimLane) -> Callable[[], None]:
        def end() -> None:
            for uid in lane.commit_astray():
                self.append(uid)

        return end

    def _faults(self) -> list[tuple[Note, Action]]:
        found = super()._faults()
        if "kafka" in self.faults:
            expiring = [lane for lane in self.lanes if lane.written]
            found += [((f"lane {lane.number}", "its transaction expires"), lane.fence) for lane in expiring]
        if "stray" in self.faults:
            meant = [lane for lane in self.lanes if lane.written or lane.noted is not None]
            found += [((f"lane {lane.number}", "a stray commit arrives"), self._end_astray(lane)) for lane in meant]
        return found

    def _is_calm(self) -> bool:
        return super()._is_calm() and not any(getattr(h, "is_zombie", False) for h in self.harvesters)
