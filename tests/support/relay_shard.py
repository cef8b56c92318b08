"""A shard of `tests.support.relay_world`, and the bytes of rows."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from harvester.delivery.decode import Broken, Decoded, Oversize, decode
from harvester.delivery.retries import Policy
from harvester.failpoints import load
from harvester.outbox.purge_session import PoisonRow, QuarantineOutcome
from harvester.record import KafkaRecord, ReadRow
from harvester.relay.at_least_once import Sender
from harvester.relay.core import frames as f
from harvester.relay.put_away import Outcome
from tests.support.rows import row

if TYPE_CHECKING:
    from tests.support.relay_actors import SimHarvester

Action = Callable[[], object]
Note = tuple[object, ...]  # what the history shows; put into words only when it is shown
_FOR_EVER = float("inf")


def row_bytes(record_id: int, key: bytes | None, topic: str, uid: int) -> bytes:
    """A row as `COPY (FORMAT BINARY)` sends it; its value is its uid."""
    return row(record_id=record_id, key=key, topic=topic.encode(), value=str(uid).encode())


def undecodable_topic(uid: int) -> str:
    """A topic that cannot be; it carries the uid, since nothing but the complaint about it is left of such a row."""
    return f"?{uid}"


def uid_of(found: Decoded | Oversize) -> int:
    """Which row of the world this is."""
    if isinstance(found, Oversize):
        return uid_of(found.record)
    if isinstance(found, Broken):
        complaint = re.search(r"'\?(\d+)'", found.reason)
        assert complaint, found
        return int(complaint[1])
    return int(found.value or b"")


@dataclass(frozen=True, slots=True)
class Delivered:
    """The message of a report without an error; no offset: the client infers that it was appended (P45)."""

    at: int | None = 0

    def offset(self) -> int | None:
        """As of confluent_kafka.Message."""
        return self.at


@dataclass(slots=True, eq=False)
class Sent:
    """A record at a producer; its report comes later."""

    uid: int
    report: Callable[[KafkaError | None, Any], None]
    appended: bool = False


class SimStore:
    """Puts values away in a world with the fault "store", where those of every third row are too large."""

    stored = 0

    def __init__(self) -> None:
        self._waiting: list[tuple[Oversize, Callable[[Outcome], None]]] = []

    def decode(self, rows: bytes) -> list[Decoded | Oversize]:
        return [
            Oversize(found.id, found.key, found) if isinstance(found, KafkaRecord) and not uid_of(found) % 3 else found
            for found in decode(rows)
        ]

    def put(self, record: Oversize, done: Callable[[Outcome], None]) -> None:
        self._waiting.append((record, done))

    def actions(self, name: str) -> list[tuple[Note, Action]]:
        if not self._waiting:
            return []
        record, _ = self._waiting[0]
        return [((name, record.id, "is put away"), partial(self._end, record.record))]

    def mishaps(self, name: str) -> list[tuple[str, Note, Action]]:
        if not self._waiting:
            return []
        record, _ = self._waiting[0]
        return [("store", (name, record.id, "is not put away"), partial(self._end, "the store is away"))]

    def _end(self, outcome: Outcome) -> None:
        _, done = self._waiting.pop(0)
        done(outcome)


class SimProcess(ABC):
    """What shards of both modes share: the process with its pipes and its purger, which are simulated."""

    def __init__(self, owner: SimHarvester, index: int) -> None:
        self.owner, self.index, self.name = owner, index, f"{owner.name}{index}"
        self.to_shard: deque[f.Frame] = deque()
        self.to_supervisor: deque[f.Frame] = deque()
        self.alive, self.ready, self.doomed, self.watched = True, False, False, False
        self.acked: list[int] = []
        self.deleting: list[int] | None = None
        self.deleted = False
        self.poison: deque[PoisonRow] = deque()
        self.server: str | None = None  # of the purger, as its `expect` and its connections leave it
        self.term = 0
        self.connected = False
        self.store = SimStore() if "store" in owner.world.faults else None
        self.late: dict[int, Sent] = {}  # timed out; the network has kept them, and may deliver them yet
        self.policy = Policy(
            2, retry_backoff_s=1.0, retry_backoff_max_s=4.0, queue_timeout_s=0.0, poison=owner.world.policy
        )
        # What the parts of a shard use of it (`ShardHost`).
        self.send: Callable[[f.Frame], None] = self.to_supervisor.append
        self.purge: Callable[[Sequence[ReadRow]], None] = lambda rows: self.acked.extend(row.id for row in rows)
        self.quarantine: Callable[[PoisonRow], None] = self.poison.append
        self.trusted: Callable[[], bool] = owner.is_trusted
        self.failpoints, self.is_crowded = load(), False

    @property
    def records(self) -> Any:
        """The purger, which would ask for them, is simulated."""
        raise AssertionError

    def wake(self) -> None:  # noqa: B027 - all there is to do
        """A retry was scheduled; it is made when the script says so."""

    def die(self, _reason: str) -> None:
        """As the shard's own: the process is about to end."""
        self.doomed = True

    # -- what the kinds differ in

    @property
    @abstractmethod
    def unsettled(self) -> list[int]:
        """Ids handed to the producer, or on their way to quarantine, and not settled."""

    @property
    @abstractmethod
    def held(self) -> int:
        """The number of ids in `unsettled`."""

    @property
    @abstractmethod
    def unsettled_uids(self) -> list[int]:
        """The same rows, told from others that had their ids on another server."""

    @property
    @abstractmethod
    def inside(self) -> list[tuple[int, bytes | None]]:
        """Id and key of every record in this shard."""

    @property
    @abstractmethod
    def keeps_something(self) -> bool:
        """In calm it must not."""

    @property
    def may_send(self) -> bool:
        """Whether something that was produced may still be appended."""
        return False

    @abstractmethod
    def mishaps(self) -> list[tuple[str, Note, Action]]:
        """(fault, name, action) of what may go wrong."""

    @abstractmethod
    def _steps(self) -> list[tuple[Note, Action]]:
        """What goes on by itself besides pipes and purger."""

    @abstractmethod
    def _read(self) -> None:
        """Obey the next frame."""

    @abstractmethod
    def _purged(self, ids: list[int]) -> None:
        """Their DELETE has committed."""

    @abstractmethod
    def _quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        """The outcome of a quarantine has committed."""

    def end(self) -> None:  # noqa: B027 - most processes have nothing to do
        """The world is calm: what the network still keeps arrives now."""

    @abstractmethod
    def _leave_producer(self) -> None:
        """The process is dead: what its producer has sent arrives or not."""

    # -- what it holds

    def _under_way(self) -> list[tuple[int, bytes | None]]:
        """Id and key of every record in this shard, or on its way to it under the current epoch."""
        frames = [frame for frame in self.to_shard if isinstance(frame, f.Dispatch)]
        rows = [found for frame in frames if frame.epoch == self.owner.machine.epoch for found in decode(frame.rows)]
        return [*self.inside, *((found.id, found.key) for found in rows)]

    @property
    def holds(self) -> set[int]:
        """Every id in this shard or on its way to it under the current epoch."""
        return {record_id for record_id, _ in self._under_way()}

    @property
    def keys(self) -> set[bytes | None]:
        """Of all that is in this shard or on its way to it under the current epoch."""
        return {key for _, key in self._under_way()}

    # -- what can happen

    def actions(self) -> list[tuple[Note, Action]]:
        """Everything that goes on by itself."""
        name = self.name
        if self.doomed:
            return [((name, "exits"), self.kill)]
        found: list[tuple[Note, Action]] = []
        if not self.ready:
            found.append(((name, "ready"), self._become_ready))
        if self.to_shard:
            found.append(((name, "reads", self.to_shard[0]), self._read))
        found += self._steps()
        if self.store is not None:
            found += self.store.actions(name)
        if not self.connected and (self.deleting or self.acked or self.poison):
            found.append(((name, "reconnects"), self._connect))
        elif self.deleting is not None:
            step = self._return if self.deleted else self._delete
            verb = "returns" if self.deleted else "commits"
            found.append(((name, "purge of", self.deleting, verb), step))
        elif self.acked:
            found.append(((name, "purge of", tuple(self.acked), "begins"), self._begin_delete))
        elif self.poison:
            found.append(((name, "quarantine of", self.poison[0].id), self._move))
        return found

    def _become_ready(self) -> None:
        self.ready = True
        self._connect()
        self.to_supervisor.append(f.Ready(1))

    def _connect(self) -> None:
        """Compare the database with the one that is meant (P9), as the purger does."""
        world = self.owner.world
        if (self.server is not None and self.server != world.server) or world.table.term < self.term:
            self.to_supervisor.append(f.ShardServerChanged("another one"))
            return
        self.server, self.connected = world.server, True

    def disconnect(self) -> None:
        """The server is gone: what was under way is repeated over a new connection."""
        self.connected = self.deleted = False

    def _begin_delete(self) -> None:
        self.deleting, self.deleted = sorted(self.acked), False
        self.acked.clear()

    def _delete(self) -> None:
        assert self.deleting is not None
        self.delete_rows(self.deleting)
        self.deleted = True

    def delete_rows(self, ids: Sequence[int]) -> None:
        """They leave the outbox, those that are there."""
        world = self.owner.world
        for record_id in ids:
            row = world.table.rows.get(record_id)
            if row is None or row.gone:
                continue
            if not world.appended[row.uid]:
                world.fail(f"I5: record {record_id} is purged and was never appended")
            world.table.delete(row)

    def _return(self) -> None:
        ids, self.deleting = self.deleting, None
        assert ids is not None
        self._purged(ids)

    def _move(self) -> None:
        poison, table = self.poison.popleft(), self.owner.world.table
        row = table.rows.get(poison.id)
        if (table.term, str(table.holder)) != (poison.term, poison.holder):
            outcome = QuarantineOutcome.FENCED
        elif row is None or row.gone or not row.visible:
            outcome = QuarantineOutcome.GONE
        else:
            outcome = QuarantineOutcome.MOVED
            table.quarantine(row)
        self._quarantined(poison, outcome)

    def kill(self) -> None:
        """SIGKILL: what is on the wire arrives or not, what was said stays readable."""
        self.alive = False
        world = self.owner.world
        self._leave_producer()
        if self.deleting is not None and self.connected and not self.deleted and world.script.next(2):
            self._delete()
        world.excuse(self)


class SimShard(SimProcess):
    """A shard with a real Sender; its producer is simulated."""

    def __init__(self, owner: SimHarvester, index: int) -> None:
        super().__init__(owner, index)
        self.wire: dict[int, Sent] = {}
        self.full = 0  # how many produces the producer refuses for lack of room
        put_away: Any = self.store
        # Real time must decide nothing here: every other shard tells what is settled as late as it may.
        self.sender = Sender(self, self.policy, self, put_away=put_away, report_s=math.inf if index % 2 else 0.0)

    # -- what it holds

    @property
    def unsettled(self) -> list[int]:
        """Ids handed to the producer and not settled."""
        return [*self.sender._barrier.unsettled]

    @property
    def held(self) -> int:
        return len(self.sender._barrier.unsettled)

    @property
    def unsettled_uids(self) -> list[int]:
        """The same rows, told from others that had their ids on another server."""
        return [uid_of(entry.record) for entry in self.sender._barrier.unsettled.values()]

    @property
    def inside(self) -> list[tuple[int, bytes | None]]:
        barrier = self.sender._barrier
        queued = [entry for queue in barrier._queues.values() for entry in queue or ()]
        return [(entry.id, entry.key) for entry in (*barrier.unsettled.values(), *queued)]

    @property
    def keeps_something(self) -> bool:
        barrier = self.sender._barrier
        return bool(barrier.held or barrier.queued or barrier._queues)

    @property
    def may_send(self) -> bool:
        return any(not sent.appended for sent in self.wire.values())

    # -- the producer's interface

    def produce(self, topic: str, value: bytes, key: bytes | None, partition: int, on_delivery: Any, *_: Any) -> None:
        """Take a record."""
        if self.full:
            self.full -= 1
            raise BufferError
        row = self.owner.world.uids[int(value)]
        if row.id in self.wire:
            self.owner.world.complaint = f"{row.id} is handed to the producer twice"
        if not self.owner.word:
            self.owner.world.complaint = "P12: produced without trust"
        self.wire[row.id] = Sent(row.uid, on_delivery)
        self.late.pop(row.id, None)  # brokers refuse it from here on: the producer has raised its epoch

    # -- what can happen

    def _steps(self) -> list[tuple[Note, Action]]:
        name, found = self.name, list[tuple[Note, Action]]()
        for record_id, sent in self.wire.items():
            if self.owner.world.uids[sent.uid].refused:
                found.append(((name, record_id, "refused"), partial(self.fail, record_id, "MSG_SIZE_TOO_LARGE")))
            elif sent.appended:
                found.append(((name, record_id, "acknowledged"), partial(self._acknowledge, record_id)))
            else:
                found.append(((name, record_id, "appended"), partial(self._append, record_id)))
        if self.sender._acked:
            found.append(((name, "collects"), self.sender.collect))
        return found

    def end(self) -> None:
        for record_id in list(self.late):
            self._deliver_late(record_id)

    def _deliver_late(self, record_id: int) -> None:
        """The network delivers what it kept; of a record that went to quarantine meanwhile, that is a known limit."""
        sent, world = self.late.pop(record_id), self.owner.world
        if sent.uid not in world.table.quarantined:
            world.excused[sent.uid] += 1
            world.append(sent.uid)

    def actions(self) -> list[tuple[Note, Action]]:
        found = super().actions()
        if self.sender._timers and not self.doomed:
            found.append(((self.name, "retries"), lambda: self.sender.due(_FOR_EVER)))
        return found

    def mishaps(self) -> list[tuple[str, Note, Action]]:
        name = self.name
        found: list[tuple[str, Note, Action]] = [
            ("shard death", (name, "dies"), self.kill),
            ("kafka", (name, "producer full"), self._fill),
            ("timeouts", (name, "checks its queues"), lambda: self.sender.check_queues(_FOR_EVER)),
            *(self.store.mishaps(name) if self.store is not None else ()),
        ]
        for i, sent in self.wire.items():
            if not sent.appended:
                found.append(("kafka", (name, i, "times out"), partial(self.fail, i, "_MSG_TIMED_OUT")))
                found.append(("kafka", (name, i, "no topic"), partial(self.fail, i, "UNKNOWN_TOPIC_OR_PART")))
                found.append(("kafka", (name, i, "is passed over"), partial(self._acknowledge, i, Delivered(None))))
            else:
                found.append(("kafka", (name, i, "loses its ack"), partial(self.fail, i, "_MSG_TIMED_OUT")))
            found.append(("shard death", (name, i, "fatal"), partial(self.fail, i, "_FATAL")))
        for i in self.late:
            found.append(("kafka", (name, i, "arrives late"), partial(self._deliver_late, i)))
        return found

    def _fill(self) -> None:
        self.full = 1 + self.owner.world.script.next(2)

    def _read(self) -> None:
        frame = self.to_shard.popleft()
        match frame:
            case f.Dispatch():
                self.sender.dispatch(frame)
            case f.Remark():
                self.server, self.term = frame.server or self.server, frame.term or self.term
                self.sender.remark(frame)
            case f.ParkAcknowledged(epoch, record_id):
                self.sender.closed(epoch, record_id)
            case _:
                raise AssertionError(frame)

    def _append(self, record_id: int) -> None:
        sent = self.wire[record_id]
        sent.appended = True
        self.owner.world.append(sent.uid)

    def _acknowledge(self, record_id: int, delivered: Delivered = Delivered()) -> None:
        """Served by the delivery thread, which collects what it has served a little later."""
        self.wire.pop(record_id).report(None, delivered)

    def fail(self, record_id: int, error: str) -> None:
        """Its report is an error; appended or not."""
        sent = self.wire.pop(record_id)
        if sent.appended:
            self.owner.world.excused[sent.uid] += 1
        elif error == "_MSG_TIMED_OUT" and self.owner.world.script.next(2):
            self.late[record_id] = sent
        sent.report(KafkaError(getattr(KafkaError, error)), None)

    def _purged(self, ids: list[int]) -> None:
        self.sender.purged(ids)

    def _quarantined(self, poison: PoisonRow, outcome: QuarantineOutcome) -> None:
        self.sender.quarantined(poison, outcome)

    def _leave_producer(self) -> None:
        world = self.owner.world
        for sent in self.wire.values():
            if not sent.appended and not world.uids[sent.uid].refused and world.script.next(2):
                world.append(sent.uid)
        self.wire.clear()
        self.late.clear()
