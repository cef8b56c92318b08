"""Runs the coordination's own thread: reads and writes the log, advances time, keeps what is held. Thin.

It runs however long the application takes for a record, so heartbeats never wait for it. The consumer's thread sees it
through `buffer`, `owned` and `changes`, under `lock`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from harvester.clock import clock_s
from harvester.coordination.core.claim import (
    Append,
    Begin,
    ClaimPhase,
    ClaimState,
    LookBack,
    Missed,
    NotSent,
    PartitionDrained,
    PositionFound,
    ProcessBatch,
    Progressed,
    StopHandingOut,
)
from harvester.coordination.core.claim import Event as Signal
from harvester.coordination.core.coordinator import Coordinator, Outcome, Refuse, Warn
from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import Client, GroupPartition, Heartbeats, Message
from harvester.coordination.core.partition_buffer import NOTHING, PartitionBuffer, RecordBatch
from harvester.coordination.core.world import World
from harvester.coordination.events import Claimed, Event, Lost, Released
from harvester.coordination.log import CoordinationLog, LogBackfill
from harvester.coordination.settings import ConsumerSettings, Statistics
from harvester.errors import BrokerUnavailable

_LOGGER = logging.getLogger("harvester.coordination")
_TURN = 0.02  # of an interval: how often time advances when nothing is read
_LONGEST_TURN_S = 0.1  # each one interrupts the consumer's thread
_READY_S, _AGAIN_S = 2.0, 0.5  # for one attempt to begin, and between attempts
Change = tuple[GroupPartition, PartitionBuffer | None, Event | None]


class Session:
    """What the coordination's and the consumer's threads share."""

    def __init__(self, settings: ConsumerSettings, client: Client) -> None:
        self.lock = threading.RLock()
        self.buffer: dict[GroupPartition, PartitionBuffer] = {}
        self.changes: deque[Change] = deque()  # begun (with a buffer) or stopped, with the event
        self.owned: deque[RecordBatch] = deque()  # at most once: batches that are ours
        self.in_hand = NOTHING  # at most once: the one that is being handed out
        self.news = threading.Event()  # set when there is one more
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._settings = settings
        self._turn_s = min(_TURN * settings.heartbeat_interval_s, _LONGEST_TURN_S)
        self._counts: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        partitions = range(settings.coordination_partitions)
        self._coordinator = Coordinator(settings, client, {each: World.begin(settings.timing) for each in partitions})
        self._log = CoordinationLog(
            settings.coordination_topic, settings.kafka, self._not_sent, settings.pace.trust_s
        )  # messages older than trust prove nothing
        self._past = LogBackfill(settings, self._found)
        self._thread = threading.Thread(target=self._run, name="coordination", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def consume(self, topics: Mapping[str, int]) -> None:
        with self.lock:
            self._coordinator.consume(topics)

    def tell(self, place: GroupPartition, signal: Signal) -> None:
        """An event concerning a partition; the lock is held."""
        self._perform(self._coordinator.tell(place, signal, clock_s()))

    def write(self, message: Message) -> Future[bool]:
        """Write to the log; the lock is held. The result: whether it has arrived there."""
        arrived = Future[bool]()
        self._append(message, arrived)
        return arrived

    def has(self, topic: str, partition: int, token: int) -> bool:
        """True until this claim has ended."""
        with self.lock:
            buffer = self.buffer.get(GroupPartition(self._settings.group, topic, partition))
            return buffer is not None and buffer.token == token

    def holding(self, place: GroupPartition) -> ClaimState:
        return self._coordinator.holdings[place]

    def processed(self) -> dict[GroupPartition, int | None]:
        """For each held partition, the end of its processed prefix."""
        with self.lock:
            return {place: buffer.last_offset for place, buffer in self.buffer.items()}

    def fewer_elsewhere(self) -> bool:
        """Whether another present client holds less, and none asks; the lock is held."""
        return self._coordinator.choice.fewer_elsewhere(clock_s())

    def claims(self) -> dict[GroupPartition, int]:
        """The held partitions, with their fencing tokens; the lock is held."""
        holdings = self._coordinator.holdings
        return {
            place: holdings[place].token
            for place in self._coordinator.holds
            if holdings[place].phase is not ClaimPhase.FINDING
        }

    def statistics(self, records: int) -> Statistics:
        """Current statistics; `records` were given to the application."""
        with self.lock:
            counts = self._counts
            return Statistics(
                records, counts["batches"], counts["won"], counts["missed"], counts["releases"], counts["losses"],
                dict(self._written), counts["bytes"], counts["unwritten"],
            )  # fmt: skip

    def fail(self, error: BaseException) -> None:
        """The consumer ends: it raises the first such error from every call, and hands out nothing more."""
        with self.lock:
            self.error = self.error or error
            for buffer in self.buffer.values():
                _hold_back(buffer)

    def stop(self, *, release: bool) -> None:
        """End; with `release`, first give everything up, waiting for an interval at most, and for no record in hand.

        A claim that was just sent is waited for: if it wins, it is released as well.
        """
        try:
            with self.lock:
                self._report_all()
                self._perform(self._coordinator.close(clock_s(), release=release))
                for buffer in self.buffer.values():
                    _hold_back(buffer)
                    buffer.stopping_at = 0.0 if release else None
            deadline = clock_s() + self._settings.heartbeat_interval_s
            while release and self._thread.is_alive() and clock_s() < deadline:
                with self.lock:
                    if self._coordinator.left:
                        break
                self.ended.wait(self._turn_s)
        finally:  # also when interrupted, or no longer allowed to write
            self.ended.set()
            try:
                self._past.close()
            finally:
                self._thread.join()
                self._log.close(self._settings.heartbeat_interval_s)

    # -- the thread

    def _run(self) -> None:
        try:
            ends = self._begin()
            if ends is None:
                return
            with self.lock:
                self._coordinator.begin(ends, clock_s())
            while not self.ended.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001 - the top frame of this thread; the consumer raises it
            self.fail(error)

    def _begin(self) -> Mapping[int, int] | None:
        """Begin to read the log, once brokers answer; returns where it ends, or None at the end of the session.

        Nothing is claimed yet, so nothing is lost by waiting.
        """
        told = False
        while True:
            try:
                return self._log.begin(self._coordinator.worlds, self._settings.tail_ms, _READY_S)
            except BrokerUnavailable as error:
                if not told:
                    _LOGGER.warning("nothing is claimed until the coordination topic can be read: %s", error)
                told = True
            if self.ended.wait(_AGAIN_S):
                return None

    def _turn(self) -> None:
        read = tuple(self._log.poll(self._turn_s))
        with self.lock:  # before reading or time ends the claim
            self._report_all()
        for partition, offset, at_ms, value in read:
            with self.lock:
                self._perform(self._coordinator.read(partition, offset, at_ms, value, clock_s()))
        with self.lock:
            now = clock_s()
            for buffer in self.buffer.values():
                if buffer.busy:
                    if not self._settings.at_most_once:
                        buffer.look(self._settings.max_open_records, now)
                    buffer.note_idle()
            self._perform(self._coordinator.tick(clock_s()))
            self._drain(clock_s())

    def _report_all(self) -> None:
        for place, buffer in tuple(self.buffer.items()):
            if buffer.busy:
                self._report(place, buffer)

    def _report(self, place: GroupPartition, buffer: PartitionBuffer) -> None:
        """Report what is processed by now, for the next message. At most once the log already knows, except what was
        skipped.
        """
        last_offset = buffer.last_offset
        if last_offset is not None and last_offset != buffer.reported:
            buffer.reported = last_offset
            self.tell(place, Progressed(last_offset))

    def _drain(self, now: float) -> None:
        """Release what is being given up, once nothing of it is in hand or its time limit has passed.

        At most once, a batch whose heartbeat is under way is waited for: it may become ours, and is then returned. So
        is what became ours under a claim that was lost and won again: a successor begins behind it (P42). And so is a
        thread that has not decided yet whether to hand out a record.
        """
        for place, buffer in tuple(self.buffer.items()):
            if buffer.stopping_at is None or self.holding(place).batch is not None:
                continue
            if self._settings.at_most_once and buffer.batch is not None and buffer.batch.is_taking:
                continue
            older = self._of_older_claims(place, buffer)
            if older and now < buffer.stopping_at:
                continue
            if buffer.laid_down or not buffer.open_records or now >= buffer.stopping_at:
                for batch in older:
                    batch.withdraw()
                self.owned = deque(batch for batch in self.owned if batch not in older)
                self._report(place, buffer)
                if self.buffer.get(place) is not buffer:  # trust ended in the meantime
                    continue
                last_offset = buffer.give_back()
                del self.buffer[place]
                self._counts["releases"] += 1
                self._change(place, None, Released(place.topic, place.partition, buffer.token, buffer.reason))
                self.tell(place, PartitionDrained(last_offset))

    def _of_older_claims(self, place: GroupPartition, buffer: PartitionBuffer) -> list[RecordBatch]:
        """At most once: batches of earlier claims that are not completely handed out."""
        ours = (self.in_hand, *self.owned)
        return [batch for batch in ours if batch.place == place and batch.rest and batch not in buffer.owned]

    def _not_sent(self, place: GroupPartition, number: int) -> None:
        with self.lock:
            self._counts["unwritten"] += 1
            self.tell(place, NotSent(number))

    # -- commands

    def _append(self, message: Message | Heartbeats, arrived: Future[bool] | None = None) -> None:
        self._written[type(message).__name__] += 1
        self._counts["bytes"] += self._log.append(self._partition(message.parts[0].place), message, arrived)

    def _perform(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Append(message):
                    self._append(message)
                case LookBack(place, generation):
                    self._look_back(place, generation)
                case Begin(place, generation, last_offset, positioned):
                    self._counts["won"] += 1
                    token = self.holding(place).token
                    self.buffer[place] = buffer = PartitionBuffer(
                        place, generation, last_offset, token=token, positioned=positioned
                    )
                    self._change(place, buffer, Claimed(place.topic, place.partition, token))
                case Missed():
                    self._counts["missed"] += 1
                case ProcessBatch(place, generation):
                    self._own(place, generation)
                case StopHandingOut(place, generation, reason, lost, moved):
                    if moved:
                        self._withdraw(place)
                    self._stop(place, generation, reason, lost=lost)
                case Warn(text):
                    _LOGGER.warning("%s", text)
                case Refuse(error):
                    raise error

    def _look_back(self, place: GroupPartition, generation: int) -> None:
        partition = self._partition(place)
        if partition in self._log.tails:
            self._past.find(partition, place, generation)
        else:  # the whole retained log has been read: nothing further back can be found
            claim = self._coordinator.worlds[partition].claim(place)
            self.tell(place, PositionFound(generation, claim.last_offset, claim.positioned))

    def _found(self, place: GroupPartition, found: PositionFound) -> None:
        with self.lock:
            self.tell(place, found)

    def _own(self, place: GroupPartition, generation: int) -> None:
        buffer = self.buffer.get(place)
        if buffer is not None and buffer.generation == generation:
            self._counts["batches"] += 1
            batch = buffer.own()
            if buffer.stopping_at is None:
                self.owned.append(batch)
                self.news.set()

    def _withdraw(self, place: GroupPartition) -> None:
        """At most once: hand out nothing more of what is ours."""
        buffer = self.buffer.get(place)
        waiting = [batch for batch in (self.in_hand, *self.owned) if batch.place == place]
        for batch in (*waiting, *(() if buffer is None else buffer.owned)):
            batch.withdraw()
        self.owned = deque(batch for batch in self.owned if batch.place != place)

    def _stop(self, place: GroupPartition, generation: int, reason: str, *, lost: bool) -> None:
        _LOGGER.info("%s is given up: %s", place, reason)
        buffer = self.buffer.get(place)
        if buffer is not None:
            _hold_back(buffer)
        if not lost:
            self._change(place, None, None)
            if buffer is not None:
                buffer.reason, buffer.stopping_at = reason, clock_s() + self._settings.heartbeat_interval_s
                for batch in buffer.owned:
                    if batch is not buffer.batch:
                        self.owned.remove(batch)
            return
        token = self.buffer.pop(place).token if buffer is not None else generation
        self._counts["losses"] += 1
        self._change(place, None, Lost(place.topic, place.partition, token, reason))

    def _change(self, place: GroupPartition, buffer: PartitionBuffer | None, event: Event | None) -> None:
        self.changes.append((place, buffer, event))

    def _partition(self, place: GroupPartition) -> int:
        return log_partition(place, self._settings.coordination_partitions)


def _hold_back(buffer: PartitionBuffer) -> None:
    if buffer.batch is not None:
        buffer.batch.end()
