"""Consumers that coordinate, without Kafka: a log that appends what it is given, and actors that may stop anywhere.

Every command waits in a queue of its actor until the schedule performs it, so an actor can be frozen between any two
steps; what a killed one has sent may still arrive. Each actor has a clock of its own, an hour off if it likes, and the
broker's goes back now and then. The judges know nothing of the rules: who processed what, and when.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from harvester.coordination.core.claim import (
    HOLDING,
    Append,
    BatchWaiting,
    Begin,
    ClaimPhase,
    ClaimTiming,
    LookBack,
    NotSent,
    PartitionDrained,
    PositionFound,
    ProcessBatch,
    Progressed,
    StopHandingOut,
)
from harvester.coordination.core.coordinator import Coordinator, Outcome, Refuse, Warn
from harvester.coordination.core.fair_share import log_partition
from harvester.coordination.core.messages import (
    Client,
    GroupPartition,
    Heartbeats,
    Message,
    ReturningMessages,
    decode,
    encode,
)
from harvester.coordination.core.partition_buffer import PartitionProgress
from harvester.coordination.core.world import Claim, ClaimVerdict, LogTiming, World
from harvester.coordination.errors import DuplicateClient
from harvester.coordination.settings import ConsumerSettings

INTERVAL_S, STEP_S = 1.0, 0.25
TIMING = LogTiming(interval_ms=1000, clock_step_ms=250)
PACE = ClaimTiming(INTERVAL_S, margin_s=0.5)
GROUP, TOPIC = "billing", "orders"
NEVER: tuple[int, int] = (-1, -1)
UNKNOWN = b"a message of another version"


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Tenure:
    """A claim as the consuming side of an actor has it."""

    generation: int
    next_offset: int
    progress: PartitionProgress


@dataclass(eq=False)
class Actor:
    """A process: its coordinator, and what it has not done yet."""

    client: Client
    coordinator: Coordinator
    skew_s: float
    unsent: deque[tuple[Message | Heartbeats, float]] = field(default_factory=deque)
    looking: deque[LookBack] = field(default_factory=deque)
    to_process: deque[tuple[GroupPartition, int, int]] = field(default_factory=deque)  # at most once: what is its own
    lost: set[tuple[GroupPartition, int]] = field(default_factory=set)
    in_hand: deque[tuple[GroupPartition, int, int, float]] = field(default_factory=deque)
    tenures: dict[GroupPartition, Tenure] = field(default_factory=dict)
    batches: dict[tuple[GroupPartition, int, int], range] = field(default_factory=dict)
    draining: dict[GroupPartition, float] = field(default_factory=dict)  # since when
    refused: bool = False


@dataclass(frozen=True)
class Work:
    """A record was processed under a generation; real times."""

    generation: int
    handed_out_at: float
    finished_at: float


class Sim:
    """The world. `at_most_once` and `stable` (client ids that survive a crash) are of all actors."""

    def __init__(
        self, actors: int = 3, places: int = 3, *, at_most_once: bool = False, stable: bool = False,
        log_partitions: int = 2, shed_at_once: int | None = None, greedy: bool = True, max_claims: int | None = None,
        whole_topics: bool = False, topics: dict[str, int] | None = None, orderly: bool = False,
        lets_go_after_s: float = 0.0, older: bool = False, blind: bool = False,
    ) -> None:  # fmt: skip
        self.blind = blind  # what is sent together, those of an older version do not know
        self.older = older  # some do not say that they read heartbeats that are sent together
        self.orderly = orderly  # nobody dies, and nothing is lost on its way: so no record is left out either
        self.now = 1000.0
        self.broker_behind_s = 0.0
        self.at_most_once, self.stable, self.log_partitions = at_most_once, stable, log_partitions
        self.shed_at_once, self.greedy, self.max_claims = shed_at_once, greedy, max_claims
        self.whole_topics = whole_topics
        self.lets_go_after_s = lets_go_after_s  # how long something of a place is in hand when it is given up
        self.topics = topics or {TOPIC: places}
        self.logs: dict[int, list[tuple[int, bytes]]] = {partition: [] for partition in range(log_partitions)}
        self.full = {partition: World.begin(TIMING) for partition in self.logs}
        self.truths: dict[int, list[dict[GroupPartition, Claim]]] = {partition: [] for partition in self.logs}
        self.accepted_sent_at: dict[tuple[GroupPartition, int], float] = {}
        self.work: dict[tuple[GroupPartition, int], list[Work]] = defaultdict(list)
        self.newest: dict[
            GroupPartition, int
        ] = {}  # at most once: the newest generation under which a record was handed out
        self.ghosts: deque[tuple[Message | Heartbeats, float]] = deque()
        self.lives = 0
        self.together = self.claims_won = self.repeats = self.refusals = self.take_overs = self.returned = 0
        self.actors = [self.born(index) for index in range(actors)]

    # -- actors

    def born(
        self, index: int, worlds: dict[int, World] | None = None, client_id: str | None = None,
        older: bool | None = None,
    ) -> Actor:  # fmt: skip
        self.lives += 1
        known = client_id or f"c{index if self.stable else self.lives}"
        older = self.older and self.lives % 4 == 0 if older is None else older
        client = (Client if older else Client.begin)(known, f"{self.lives:04}")
        settings = ConsumerSettings(
            kafka={}, group=GROUP, topics=tuple(self.topics), coordination_partitions=self.log_partitions,
            heartbeat_interval_s=INTERVAL_S, greedy=self.greedy, whole_topics=self.whole_topics,
            max_claims=self.max_claims, shed_at_once=self.shed_at_once, at_most_once=self.at_most_once,
        )  # fmt: skip
        assert (settings.timing, settings.pace) == (TIMING, PACE)
        coordinator = Coordinator(
            settings, client, worlds or {partition: World.begin(TIMING) for partition in self.logs}
        )
        actor = Actor(client, coordinator, skew_s=(index % 3 - 1) * 3600.0)
        coordinator.consume(self.topics)
        coordinator.begin({partition: len(log) for partition, log in self.logs.items()}, self.local(actor))
        return actor

    def restart(self, index: int, which: int) -> None:
        """Kill an actor, and start its successor from anywhere in the log, or with what it knew."""
        old = self.actors[index]
        self.ghosts.extend(old.unsent)
        if which % 4 == 0:
            worlds = deepcopy(old.coordinator.worlds)
        else:
            worlds = {
                partition: World.begin(TIMING, len(log) * (which >> 2) // 48 if which < 192 else len(log))
                for partition, log in self.logs.items()
            }
        self.actors[index] = self.born(index, worlds)

    def local(self, actor: Actor) -> float:
        return self.now + actor.skew_s

    # -- what can happen

    def flush(self, actor: Actor, most: int = 100) -> None:
        for _ in range(min(most, len(actor.unsent))):
            self.append(*actor.unsent.popleft())

    def append(self, record: Message | Heartbeats, created_at: float) -> None:
        partition = log_partition(record.parts[0].place, self.log_partitions)
        log, world = self.logs[partition], self.full[partition]
        at_ms = int((self.now - self.broker_behind_s) * 1000)
        value = encode(record)
        readings = world.read(len(log), at_ms, value)
        log.append((at_ms, value))
        self.truths[partition].append(dict(world.claims))
        self.together += len(readings) > 1
        for message, reading in zip(record.parts, readings, strict=True):
            if reading.verdict in (ClaimVerdict.WON, ClaimVerdict.ACCEPTED):
                claim, before = world.claim(message.place), reading.before
                assert before is not None
                self.accepted_sent_at[message.place, claim.generation] = created_at
                self.returned += isinstance(message, ReturningMessages)
                self.claims_won += reading.verdict is ClaimVerdict.WON
                self.take_overs += reading.verdict is ClaimVerdict.WON and before.holder is not None

    def read(self, actor: Actor, partition: int, most: int = 1000) -> None:
        world = actor.coordinator.worlds[partition]
        for _ in range(most):
            offset = world.next_offset
            if offset >= len(self.logs[partition]):
                return
            at_ms, value = self.logs[partition][offset]
            if self.blind and not actor.client.reads_together and isinstance(decode(value), Heartbeats):
                value = UNKNOWN
            self.perform(actor, actor.coordinator.read(partition, offset, at_ms, value, self.local(actor)))

    def tick(self, actor: Actor) -> None:
        self.perform(actor, actor.coordinator.tick(self.local(actor)))

    def lose(self, actor: Actor, *, arrived: bool) -> None:
        """The producer gives a message up, which may stand in the log all the same."""
        if actor.unsent:
            message, created_at = actor.unsent.popleft()
            if arrived:
                self.append(message, created_at)
            for part in message.parts:
                self.perform(actor, actor.coordinator.tell(part.place, NotSent(part.number), self.local(actor)))

    def look_back(self, actor: Actor) -> None:
        if actor.looking:
            asked = actor.looking.popleft()
            world = World.begin(TIMING)
            for offset, (at_ms, value) in enumerate(self.logs[log_partition(asked.place, self.log_partitions)]):
                if offset <= asked.generation:
                    world.read(offset, at_ms, value)
            found = PositionFound(asked.generation, world.claim(asked.place).last_offset)
            self.perform(actor, actor.coordinator.tell(asked.place, found, self.local(actor)))

    def take(self, actor: Actor, count: int) -> None:
        """Give records to the application, or propose a batch of them."""
        for place, tenure in tuple(actor.tenures.items()):
            holding = actor.coordinator.holdings[place]
            now = self.local(actor)
            if self.at_most_once:
                last = tenure.next_offset + count
                if holding.may_fetch(now, PACE):
                    actor.batches[place, tenure.generation, last] = range(tenure.next_offset, last + 1)
                    tenure.next_offset = last + 1
                    self.perform(actor, actor.coordinator.tell(place, BatchWaiting(last), now))
            else:
                for _ in range(count):
                    if now < holding.hand_out_until(PACE):
                        self._judge_repeat(place, tenure.next_offset, tenure.generation)
                        tenure.progress.deliver(tenure.next_offset)
                        actor.in_hand.append((place, tenure.generation, tenure.next_offset, self.now))
                        tenure.next_offset += 1

    def finish(self, actor: Actor, most: int = 1000) -> None:
        """The application is done with records, or a batch that is its own is processed."""
        for _ in range(min(most, len(actor.in_hand))):
            place, generation, offset, handed_out_at = actor.in_hand.popleft()
            self.work[place, offset].append(Work(generation, handed_out_at, self.now))
            tenure = actor.tenures.get(place)
            if tenure is not None and tenure.generation == generation and tenure.progress.finish(offset):
                done = tenure.progress.last_offset
                assert done is not None
                self.perform(actor, actor.coordinator.tell(place, Progressed(done), self.local(actor)))
        for _ in range(min(most, len(actor.to_process))):
            self._process(actor, *actor.to_process.popleft())
        for place in tuple(actor.draining):
            in_hand = self.now < actor.draining[place] + self.lets_go_after_s or any(
                entry[0] == place for entry in actor.in_hand
            )
            if not in_hand and actor.coordinator.holdings[place].batch is None:
                del actor.draining[place]
                drained = PartitionDrained(actor.tenures[place].progress.last_offset)
                self.perform(actor, actor.coordinator.tell(place, drained, self.local(actor)))

    def _process(self, actor: Actor, place: GroupPartition, generation: int, offset: int) -> None:
        """At most once: a record is handed out, which is all."""
        if self.work[place, offset]:
            raise Broken(f"offset {offset} of {place} is processed twice")
        self.work[place, offset].append(Work(generation, self.now, self.now))
        newest = self.newest.get(place, -1)
        if generation < newest and (place, generation) not in actor.lost:
            raise Broken(f"offset {offset} of {place} is handed out under {generation} after {newest} has begun")
        self.newest[place] = max(newest, generation)
        tenure = actor.tenures.get(place)
        if tenure is not None and tenure.generation == generation:
            tenure.progress.last_offset = offset

    def turn(self, actor: Actor, count: int = 3) -> None:
        """All that a healthy process does in a moment."""
        for _ in range(3):
            self.tick(actor)
            self.flush(actor)
            for partition in self.logs:
                self.read(actor, partition)
            self.look_back(actor)
            self.finish(actor)
        self.take(actor, count)

    def settle(self, seconds: float, actors: Iterable[Actor] | None = None, step_s: float = 0.05) -> None:
        """Let healthy processes run."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for actor in self.actors if actors is None else actors:
                self.turn(actor)
            self.check()

    # -- commands

    def perform(self, actor: Actor, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Append(message):
                    actor.unsent.append((message, self.now))
                case LookBack():
                    actor.looking.append(outcome)
                case Begin(place, generation, last_offset):
                    self._judge_begin(place, generation, last_offset)
                    begin = 0 if last_offset is None else last_offset + 1
                    actor.tenures[place] = Tenure(generation, begin, PartitionProgress(last_offset))
                case ProcessBatch(place, generation, last_offset):
                    batch = actor.batches.pop((place, generation, last_offset))
                    if place not in actor.draining:
                        actor.to_process.extend((place, generation, offset) for offset in batch)
                case StopHandingOut(place, generation, _, lost):
                    if lost:
                        actor.lost.add((place, generation))
                        actor.tenures.pop(place, None)
                        actor.draining.pop(place, None)
                    else:
                        actor.draining[place] = self.now
                        kept = [each for each in actor.to_process if each[:2] != (place, generation)]
                        actor.to_process = deque(kept)  # the rest is returned
                case Refuse(DuplicateClient()):
                    actor.refused = True
                    self.refusals += 1
                case Refuse(error):
                    raise Broken(str(error))
                case Warn(text) if repr(UNKNOWN.decode()) not in text:
                    raise Broken(text)

    # -- judges

    def _judge_begin(self, place: GroupPartition, generation: int, last_offset: int | None) -> None:
        truth = self.truths[log_partition(place, self.log_partitions)][generation][place]
        if truth.last_offset != last_offset:
            raise Broken(f"{place} is begun behind {last_offset}, its position is {truth.last_offset}")
        if (self.orderly or not self.at_most_once) and last_offset is not None:
            missing = [offset for offset in range(last_offset + 1) if not self.work[place, offset]]
            if missing:
                raise Broken(f"{place} is begun behind {last_offset}, {missing} were never processed")

    def _judge_repeat(self, place: GroupPartition, offset: int, generation: int) -> None:
        for work in self.work[place, offset]:
            if work.generation == generation:
                raise Broken(f"offset {offset} of {place} is handed out twice under one claim")
            self.repeats += 1
            last_sent_at = self.accepted_sent_at[place, work.generation]
            if not work.handed_out_at <= last_sent_at + INTERVAL_S + 1e-6 or work.finished_at < last_sent_at - 1e-6:
                raise Broken(f"offset {offset} of {place} is repeated, of {work} after a heartbeat at {last_sent_at}")

    def check(self) -> None:
        """Nobody believes what the log does not say; no two believe in one claim at one moment."""
        believers: dict[GroupPartition, set[str]] = defaultdict(set)
        for actor in self.actors:
            self._check_worlds(actor)
            for place, holding in actor.coordinator.holdings.items():
                if holding.phase not in HOLDING:
                    continue
                partition = log_partition(place, self.log_partitions)
                truth = self.truths[partition][actor.coordinator.worlds[partition].next_offset - 1][place]
                if (truth.holder, truth.generation) != (actor.client, holding.generation):
                    raise Broken(f"{actor.client} holds {place} at a position where {truth.holder} does")
                if self.local(actor) < holding.trusted_until(PACE):
                    believers[place].add(actor.client.id)
        for place, names in believers.items():
            if len(names) > 1:
                raise Broken(f"{place} has two holders at one moment: {names}")

    def _check_worlds(self, actor: Actor) -> None:
        for partition, world in actor.coordinator.worlds.items():
            if not world.next_offset:
                continue
            truth = self.truths[partition][world.next_offset - 1]
            for place, claim in world.claims.items():
                if claim.exact and seen(claim) != seen(truth[place]):
                    raise Broken(f"{place}: {seen(claim)}, a reader from offset 0 knows {seen(truth[place])}")
                if claim.exact and claim.positioned and claim.last_offset != truth[place].last_offset:
                    raise Broken(f"{place}: position {claim.last_offset}, truly {truth[place].last_offset}")

    # -- figures

    def held(self) -> dict[str, int]:
        """Places by client, of those that are fully held."""
        counts = {actor.client.id: 0 for actor in self.actors}
        for actor in self.actors:
            for holding in actor.coordinator.holdings.values():
                counts[actor.client.id] += holding.phase is ClaimPhase.HELD
        return counts


def seen(claim: Claim) -> tuple[object, ...]:
    """What two readers have to agree about."""
    return claim.holder, claim.generation, claim.proposed, claim.beat_ms if claim.holder else None


def scheduled(sim: Sim, data: bytes) -> Sim:
    """Let the bytes decide what happens next, two for each event."""
    for what, which in zip(data[::2], data[1::2], strict=False):
        index = which % len(sim.actors)
        actor = sim.actors[index]
        if actor.refused:
            sim.restart(index, which)
            actor = sim.actors[index]
        match what % 20:
            case 0 | 1:
                sim.now += 0.02 * (1 + which % 8)
            case 2:
                sim.now += 0.1 * (1 + which % 8)
            case 3 if which % 8 == 0:
                sim.now += 1 + which / 64
            case 4 | 5:
                sim.flush(actor, 1 + which % 2)
            case 6 | 7:
                sim.read(actor, which // 16 % sim.log_partitions, 1 + which % 4)
            case 8:
                sim.tick(actor)
            case 9:
                sim.take(actor, 1 + which % 3)
            case 10:
                sim.finish(actor, 1)
            case 11:
                sim.look_back(actor)
            case 12 if which % 4 == 0:
                sim.lose(actor, arrived=which % 8 == 0)
            case 13 if which % 16 == 0:
                sim.restart(index, which)
            case 14 if sim.ghosts:
                sim.append(*sim.ghosts.popleft())
            case 15 if which % 8 == 0:
                sim.broker_behind_s = STEP_S * (which % 3) / 2
            case 16 | 17 | 18:
                sim.now += 0.02
                sim.turn(actor, 1 + which % 3)
            case 19:
                sim.now += 0.05
                for each in sim.actors:
                    sim.turn(each)
        sim.check()
    return sim
