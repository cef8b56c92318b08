"""All claims of one consumer, over the worlds of all partitions of the log: records and time in, commands out. Pure.

Theory. The coordinator keeps a world for each partition of the coordination topic and a machine (`claim`) for each
partition it deals with. A record changes its world first; then its partition's machine is notified: of its own messages
with their verdict, of others' messages if they have ended its claim. As time passes, it sends heartbeats, claims, asks
and sheds (`fair_share`). Its stage limits what it may do:

    READING ──all partitions read to the end they had──▶ LISTENING ──nobody else has this id──▶ ACTIVE ──▶ CLOSING
                                                             └──another process has it──▶ REFUSED ◀──┘

*One process per client id.* An id that holds claims is visible every half interval. So a client that finds that its id
holds some listens for three quarters of an interval before it takes them over; a message of another instance in that
time causes the newcomer to be refused. A process wrongly taken for dead is refused when it reads that its successor has
its claims. If two start at the same moment, whichever loses a claim to the other is refused.

*One interval and one mode per group.* Clients with different intervals would not agree on which claims are stale, and
records are not processed at most once if some clients repeat what was not committed. So claims and heartbeats carry
their sender's interval and mode (`GroupCheck`). A newcomer that finds a different client that may still be alive ends
before it has claimed anything. Of clients that start at the same moment with different modes, the at-least-once ones
end; with different intervals they warn. A client may be alive for 2 of *its* intervals after its last heartbeat, unless
it has released the partition. Log time shows this if it advances; otherwise the newcomer listens for as long.

*Combined heartbeats* (P47). When a place is due for a heartbeat, all others whose claims are in the same partition of
the log send theirs, up to half their time early; so they are due together from then on, and are written as one record
(`Heartbeats`). So what a client writes grows with the partitions of the log, not with the places it holds. At most
once, each heartbeat is written separately: it is a commit, and waited for. The same applies while any client heard from
within 2 intervals, in whatever partition of the log and of whatever group, runs a version that cannot read combined
ones: to it their places would be stale. When such a client is newly heard from, each place is due at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from harvester.coordination.core import claim as claims
from harvester.coordination.core.claim import (
    HOLDING,
    Append,
    ClaimPhase,
    ClaimState,
    ClaimTaken,
    ClaimTick,
    Command,
    Event,
    Missed,
    ReadBack,
    ReleaseClaim,
    TryClaim,
)
from harvester.coordination.core.fair_share import Choice, log_partition
from harvester.coordination.core.messages import (
    MOST_TOGETHER,
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Heartbeats,
    Message,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
    Unreadable,
)
from harvester.coordination.core.world import NO_GENERATION, ClaimVerdict, Reading, World
from harvester.coordination.errors import CoordinationError, DuplicateClient, OtherInterval, OtherMode
from harvester.coordination.settings import ConsumerSettings

_LISTEN = 0.75  # of an interval
_CHOOSE = 0.05  # of an interval: how often all places are looked at


@dataclass(frozen=True, slots=True)
class Warn:
    """Something in the log cannot be interpreted."""

    text: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """This consumer must end, because another live one has its client id, or uses another interval or mode."""

    error: CoordinationError


Outcome = Command | Warn | Refuse


class Stage(Enum):
    """Limits what the coordinator may do."""

    READING = "reading"
    LISTENING = "listening"
    ACTIVE = "active"
    CLOSING = "closing"
    REFUSED = "refused"


class Coordinator:
    """Every method returns the resulting commands, in order. One thread at a time."""

    def __init__(self, settings: ConsumerSettings, client: Client, worlds: Mapping[int, World]) -> None:
        self.settings, self.client = settings, client
        self.stage = Stage.READING
        self.worlds = dict(worlds)
        self.holdings: dict[GroupPartition, ClaimState] = {}
        self._due_at: dict[GroupPartition, float] = {}
        self._pace = settings.pace
        self.choice = Choice(settings, client, self.worlds, self.holdings)
        self._group = GroupCheck(settings.timing.interval_ms, at_most_once=settings.at_most_once)
        self._ends: Mapping[int, int] = {}
        self._unread = set(self.worlds)  # partitions of the log not yet read to their initial end
        self._ready_at = self._next_choice_at = -math.inf
        self._claiming: dict[GroupPartition, int] = {}  # after closing: the numbers of claims under way
        self._topics: Mapping[str, int] = {}
        self._together = False  # whether heartbeats were last combined

    # -- the log

    def begin(self, ends: Mapping[int, int], now: float) -> None:
        """Where each partition of the log ended when reading began: nothing is decided before that is read."""
        self._ends = ends
        for partition in tuple(self._unread):
            self._check_end(partition, now)

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None, now: float) -> list[Outcome]:
        world = self.worlds[partition]
        readings = world.read(offset, timestamp_ms, value)
        self.choice.read(partition, world.now_ms, now)
        said: list[Outcome] = []
        for reading in readings:
            message = reading.message
            if isinstance(message, Unreadable):
                said.append(Warn(f"coordination log, partition {partition}, offset {offset}: {message.reason}"))
            elif message is not None and message.place.group == self.settings.group:
                said += self._heard(world, offset, message, reading, now)
        self._check_end(partition, now)
        return said

    def _check_end(self, partition: int, now: float) -> None:
        if partition not in self._unread or partition not in self._ends:
            return
        if self.worlds[partition].next_offset >= self._ends[partition]:
            self._unread.discard(partition)
            if not self._unread and self.stage is Stage.READING:
                self.stage, self._ready_at = Stage.LISTENING, now
                self.choice.ready(now)

    def _heard(self, world: World, offset: int, message: Message, reading: Reading, now: float) -> list[Outcome]:
        place, us, verdict = message.place, self.client, reading.verdict
        self.choice.heard(place, now)
        claim = world.claim(place)
        said: list[Outcome] = []
        other = self._group.heard(message, verdict, world.now_ms)
        if other is not None:
            said += self._differs(other, now)
        if message.client == us:
            event = ReadBack(message, offset, verdict, claim.last_offset, claim.positioned, world.now_ms)
            said += self._step(place, event, now)
        rival = self._rival(message, reading, claim.holder)
        if rival is not None:
            duplicate = DuplicateClient(self.settings.group, us.id, rival.instance)
            said += self._end(duplicate, "another process has this client id", now)
        holding = self.holdings.get(place)
        if holding is None or holding.phase not in HOLDING:
            return said
        if claim.generation != holding.generation or claim.holder != us:
            reason = "it was released for us" if claim.holder is None else f"{claim.holder.id} holds it"
            said += self._step(place, ClaimTaken(reason, isinstance(message, SettingPosition)), now)
        return said

    # -- input from the consumer

    def consume(self, topics: Mapping[str, int]) -> None:
        """The topics, with their current number of partitions; to be called again when that grows."""
        if topics == self._topics:
            return
        group, self._topics = self.settings.group, dict(topics)
        self.choice.consume(
            GroupPartition(group, topic, partition) for topic, count in topics.items() for partition in range(count)
        )

    def tell(self, place: GroupPartition, event: Event, now: float) -> list[Outcome]:
        """An event concerning one of the consumer's claims."""
        if isinstance(event, ReleaseClaim):
            self.choice.let_go(place, now)
        return list(self._step(place, event, now))

    def close(self, now: float, *, release: bool = True) -> list[Outcome]:
        """Claim nothing more; with `release`, give everything up, which is done when `left` is true."""
        self.stage = Stage.CLOSING
        self._claiming = {
            place: holding.claim_number
            for place, holding in self.holdings.items()
            if holding.phase is ClaimPhase.CLAIMING
        }
        said: list[Outcome] = []
        if release:
            for place in tuple(self.holdings):
                said += self._step(place, ReleaseClaim("the consumer is closed"), now)
        return said

    def tick(self, now: float) -> list[Outcome]:
        said: list[Outcome] = []
        if self.stage is Stage.REFUSED:
            return said
        said += self._tick_claims(now)
        if self.stage is Stage.LISTENING and self._has_listened(now):
            self.stage = Stage.ACTIVE
            self.choice.active(now)
        if self.stage is Stage.ACTIVE and now >= self._next_choice_at:
            self._next_choice_at = now + _CHOOSE * self._pace.interval_s
            said += self._choose(now)
        return said

    @property
    def holds(self) -> tuple[GroupPartition, ...]:
        """The held partitions, including those being given up."""
        return tuple(place for place, holding in self.holdings.items() if holding.phase in HOLDING)

    @property
    def left(self) -> bool:
        """After closing: nothing is held, and no claim is under way that may still win and block others."""
        return not self.holds and not any(
            self.holdings[place].awaits(number) for place, number in self._claiming.items()
        )

    # -- parts

    def _tick_claims(self, now: float) -> list[Outcome]:
        due = dict.fromkeys(place for place, at in self._due_at.items() if at <= now)
        early_s = self._early_s(due, now)
        for place in self.holdings if early_s else ():
            if self.holdings[place].beats(now + early_s.get(self._partition(place), 0.0)):
                due[place] = None
        said: list[Outcome] = []
        beats: dict[int, list[Heartbeat]] = {}
        for place in due:
            partition = self._partition(place)
            for command in self._step(place, ClaimTick(early_s.get(partition, 0.0)), now):
                match command:
                    case Append(Heartbeat() as beat) if self._together:
                        beats.setdefault(partition, []).append(beat)
                    case _:
                        said.append(command)
        for together in beats.values():
            for first in range(0, len(together), MOST_TOGETHER):
                some = tuple(together[first : first + MOST_TOGETHER])
                said.append(Append(Heartbeats(some) if len(some) > 1 else some[0]))
        return said

    def _early_s(self, due: Iterable[GroupPartition], now: float) -> dict[int, float]:
        """How many seconds early heartbeats may be sent now, by partition of the log; 0 if not listed."""
        if self.settings.at_most_once:
            return {}
        # An older client heard from in one partition of the log reads the others, too.
        now_ms = max(world.now_ms for world in self.worlds.values())
        before, self._together = self._together, all(world.read_together(now_ms) for world in self.worlds.values())
        if not self._together:
            return dict.fromkeys(self.worlds, math.inf) if before else {}
        beating = {self._partition(place) for place in due if self.holdings[place].beats(now)}
        return dict.fromkeys(beating, self._pace.beat_every_s / 2)

    def _partition(self, place: GroupPartition) -> int:
        return log_partition(place, len(self.worlds))

    def _choose(self, now: float) -> list[Outcome]:
        said: list[Outcome] = []
        for place in self.choice.orphans():
            said += self._step(place, ReleaseClaim("the first partition of its topic is not held"), now)
        roster = self.choice.roster(now)
        for place in self.choice.to_shed(roster, now):
            said += self._step(place, ReleaseClaim("others have fewer"), now)
        for place in self.choice.to_claim(roster, now):  # nothing if something is shed
            claim = self.choice.world(place).claim(place)
            certain = claim.exact and claim.generation != NO_GENERATION
            said += self._step(place, TryClaim(claim.generation if certain else None), now)
        return said

    def _has_listened(self, now: float) -> bool:
        us = self.client
        in_use = any(
            client.id == us.id and client != us
            for world in self.worlds.values()
            for _, client in world.held(self.settings.group)
        )
        own_s = _LISTEN * self._pace.interval_s if in_use else 0.0
        others_s = self._group.silence_ms(lambda place: self.choice.world(place).now_ms) / 1000
        return now >= self._ready_at + max(own_s, others_s)

    def _differs(self, other: Other, now: float) -> list[Outcome]:
        """A client has another interval or mode; it is alive unless this was read from the past."""
        paced = other.interval_ms != self.settings.timing.interval_ms
        group, client, interval_s = self.settings.group, other.client.id, other.interval_ms / 1000
        error = (
            OtherInterval(group, self._pace.interval_s, client, interval_s)
            if paced
            else OtherMode(group, client, at_most_once=self.settings.at_most_once)
        )
        yields = not paced and other.at_most_once
        if self.stage is Stage.LISTENING or (self.stage is Stage.ACTIVE and yields):
            return self._end(error, "others of the group consume at most once", now)
        if self.stage is Stage.ACTIVE and self._group.is_new(other.client):
            what = f"uses a heartbeat interval of {interval_s:g} s" if paced else "repeats records"
            return [Warn(f"client {client} {what}, which is not allowed")]
        return []

    def _rival(self, message: Message, reading: Reading, holder: Client | None) -> Client | None:
        """Another live process with our client id that takes precedence over us, if this message shows one."""
        us, client = self.client, message.client
        if self.stage is Stage.LISTENING and client.id == us.id and client != us:
            return client
        if self.stage is not Stage.ACTIVE or not isinstance(message, ClaimingPartition):
            return None  # late messages of an earlier life are refused by the log
        deposed = reading.verdict is ClaimVerdict.WON and reading.before is not None and reading.before.holder == us
        if deposed and client != us and client.id == us.id:
            return client
        beaten = reading.verdict is ClaimVerdict.LOST and client == us
        return holder if beaten and holder is not None and holder.id == us.id and holder != us else None

    def _end(self, error: CoordinationError, reason: str, now: float) -> list[Outcome]:
        self.stage = Stage.REFUSED
        said: list[Outcome] = []
        for place in self.holds:
            said += self._step(place, ClaimTaken(reason), now)
        return [*said, Refuse(error)]

    def _step(self, place: GroupPartition, event: Event, now: float) -> tuple[Command, ...]:
        holding = self.holdings.get(place)
        if holding is None:
            holding = ClaimState(place, self.client, at_most_once=self.settings.at_most_once)
        self.holdings[place], commands = claims.step(holding, event, now, self._pace)
        self._due_at[place] = self.holdings[place].due_at(self._pace)
        if any(isinstance(command, Missed) for command in commands):
            self.choice.missed(place, now)
        return commands


_COUNTS = frozenset({ClaimVerdict.WON, ClaimVerdict.ACCEPTED, ClaimVerdict.UNDECIDED})


@dataclass(frozen=True, slots=True)
class Other:
    """A client with different settings, and how it consumes."""

    client: Client
    interval_ms: int
    at_most_once: bool


class GroupCheck:
    """Detects clients of the group that use another interval or mode."""

    def __init__(self, interval_ms: int, *, at_most_once: bool = False) -> None:
        self._interval_ms, self._at_most_once = interval_ms, at_most_once
        self._others: dict[GroupPartition, tuple[Other, int]] = {}  # and when it was heard from
        self._known: set[Client] = set()

    def heard(self, message: Message, verdict: ClaimVerdict, now_ms: int) -> Other | None:
        """Process a message of the group, in log order. Returns its sender if that one differs."""
        if verdict not in _COUNTS:
            return None
        other = self._other(message)
        if other is not None:
            self._others[message.place] = (other, now_ms)
        elif not isinstance(message, ClaimingMessages | ReturningMessages):  # which do not carry the interval
            self._others.pop(message.place, None)
        return other

    def _other(self, message: Message) -> Other | None:
        match message:
            case ClaimingPartition(interval_ms=interval_ms) | Heartbeat(interval_ms=interval_ms):
                other = Other(message.client, interval_ms or self._interval_ms, message.at_most_once)
            case ClaimingMessages() | ReturningMessages():
                other = Other(message.client, self._interval_ms, at_most_once=True)
            case ReleasingPartition() | SettingPosition():
                return None
        same = (other.interval_ms, other.at_most_once) == (self._interval_ms, self._at_most_once)
        return None if same else other

    def is_new(self, client: Client) -> bool:
        new = client not in self._known
        self._known.add(client)
        return new

    def silence_ms(self, now_ms: Callable[[GroupPartition], int]) -> int:
        """How long to listen until none of them can be alive, given the log time at each place."""
        alive = (
            2 * other.interval_ms
            for place, (other, heard_ms) in self._others.items()
            if now_ms(place) - heard_ms <= 2 * other.interval_ms
        )
        return max(alive, default=0)
