"""The relay's decisions: from leadership to marks, dispatch, remarks and drains. Pure.

Theory. One leadership runs through these phases:

    IDLE ──acquire──▶ TAKING ──term taken──▶ LEADING ◀──all shards answered── REMARKING
     ▲                  ▲                     │  │                               ▲
     │                  └────term lost────────┘  └──fate unknown, queue timeout──┘
     │                                        │     shard death, failed mark
     └──fence (from anywhere)                 └──drain──▶ DRAINING ──nothing unsettled──▶ IDLE

*Epoch.* Every change that drops what is queued (take-over, remark, drain, fence) raises the epoch and broadcasts
`Remark` to all living shards. Each answers with exactly the ids it still has on the wire; those stay in the
ledger, everything else is forgotten. Nothing is marked until all have answered (P5), and then under a new leader
id, so that every forgotten row is found again from the head. What is on the wire is awaited, never repeated (I8).

*Marks* and what becomes of their rows: `harvester.relay.intake`. Results of an older epoch are discarded whole.

*Another server* (P9). When the database is not the one that the term was taken on, or has gone back in time, nothing
that is known of its rows holds any more, and a purge that is still to be done could hit a new row under an old id: all
shards are killed, whatever they hold, and the term is taken anew. That repeats records rather than lose one.

*Exactly once.* A shard answers a remark only when it has fenced its lane under the new term, and has purged what its
predecessor had committed (`harvester.relay.transactor`). So a take-over waits for every shard, those that are being
started included (P19), however long their answer takes as long as they give a sign of life; and while we lead, the ids
of a dead shard stay in the ledger until its successor has answered (P21). Rows are bounded, not keys: nothing waits
for another of its key.

*Paused.* A leader that is paused stays in REMARKING: what was queued has been given back, what is on the wire is
awaited, and no statement is asked for, since that takes LEADING. It is in no other way different: it keeps its term and
its trust, and can be drained, fenced, scaled and deposed. Who is paused while it stands by comes to REMARKING, not to
LEADING, when it has taken the term. To resume is to go on from there, under a new leader id.

*Shards that are stuck.* A shard that does not answer a remark, or is silent while it has records to settle, is
killed; a killed shard's ids have an unknown fate, which is what a remark is for. Its successor is a new process
(P15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from uuid import UUID

from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay.commands import (
    Announce,
    CloseTrust,
    Command,
    Drained,
    Emptied,
    Kill,
    OpenTrust,
    Release,
    Resize,
    Send,
    TakeTerm,
)
from harvester.relay.frames import Closed, Dispatch, Remark
from harvester.relay.intake import Intake, Taken
from harvester.relay.ledger import Bounds, Ledger, Row
from harvester.relay.spread import Spread

_ENOUGH_UNSETTLED = 10_000
_LOW_WATER_S = 1.0


class Phase(Enum):
    """See the module's text."""

    IDLE = "idle"
    TAKING = "taking"
    LEADING = "leading"
    REMARKING = "remarking"
    SCALING = "scaling"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits in records and seconds, from the configuration."""

    shards: int
    max_in_flight_records: int
    max_unsettled_records: int  # with those that wait in shards behind another of their key
    mark_query_records: int
    send_buffer: int
    max_queued_per_key: int
    records_per_shard: int
    most_shards: int  # that are put to use at a time, unless all always are
    answer_timeout_s: float
    silence_timeout_s: float
    look_interval_s: float = 60.0
    exactly_once: bool = False
    expiry_s: float = 22.0  # S + H + D: what a dead shard had on the wire has arrived by then, or never does


def max_unsettled(in_flight: int) -> int:
    """How many records may be unsettled where so many may be in flight: enough to find that many keys among them."""
    return max(2 * in_flight, min(6 * in_flight, _ENOUGH_UNSETTLED))


class Relay:
    """See the module's text. Every method returns the commands to perform, in order. One thread only."""

    def __init__(self, settings: Settings, new_id: Callable[[], UUID]) -> None:
        self.settings = settings
        self._new_id = new_id
        self.phase = Phase.IDLE
        self.epoch = 0
        self.paused = False  # by whoever operates it, leading or not
        self.term: int | None = None
        self.holder: UUID | None = None
        self.leader_id: UUID | None = None
        most = settings.max_in_flight_records
        bounds = Bounds(most, settings.max_unsettled_records, settings.max_queued_per_key)
        if settings.exactly_once:
            bounds = Bounds(most, most, most)
        self.ledger = Ledger(bounds, pipelined=settings.exactly_once)
        spread = Spread(settings.shards, bounds.unsettled, settings.records_per_shard, settings.most_shards)
        self.intake = Intake(
            settings.mark_query_records, settings.send_buffer, self.ledger, shards=settings.shards, spread=spread
        )
        self._awaited: set[int] = set()
        self._answer_deadline = 0.0
        self._reason = ""
        self._look_at = 0.0
        self._server: str | None = None
        self._incarnation: str | None = None
        self.lanes = 0  # that exist, in exactly-once mode; set before the first term is taken
        self.low_water: int | None = None  # every id below is settled, and none can appear there (P25)
        self._floor: int | None = None  # as of the last mark
        self._low_water_at = 0.0
        self._term_asked = False
        self._told_term: int | None = None  # the term that shards are told; it becomes ours when all have answered
        self._to_release: tuple[int, UUID] | None = None  # the term of a drain, as long as all of it gets settled
        self._unclean_at = -math.inf  # when something was last given up that may arrive in Kafka all the same
        self._target = settings.shards
        self._scale_deadline = 0.0

    # -- leadership

    def acquire(self, now: float) -> list[Command]:
        """The group made this process its leader and trusts it: drop everything, take the term, lead."""
        if self.phase is not Phase.IDLE:
            return []
        self.phase = Phase.TAKING
        self.holder = self.leader_id = self._new_id()
        self.term = self._told_term = None
        self._term_asked = False
        return [CloseTrust(), *self._broadcast(now), *self._proceed(now)]

    def term_taken(
        self,
        holder: UUID,
        term: int,
        server: str | None,
        now: float,
        went_back: bool = False,
        incarnation: UUID | None = None,
        in_doubt: bool = False,
    ) -> list[Command]:
        """The term row of this server names us under this number. `went_back`: it, or its ids, had gone back (P9).

        `in_doubt`: the term before was not released, so what its leader had on the wire may still arrive.

        The shards are told, and answer once more: while they knew no term, they gave up what failed on the wire, and
        their word of that has to be heard before anything behind it is marked (P5).
        """
        if self.phase is not Phase.TAKING or holder != self.holder or self._told_term is not None:
            return []
        if in_doubt:
            self._doubt(now)
        changed = went_back or (self._server is not None and server is not None and server != self._server)
        self._told_term, self._server = term, server or self._server
        if incarnation is None or str(incarnation) != self._incarnation:
            self.low_water = None
        self._incarnation = str(incarnation) if incarnation is not None else None
        kills = (
            self._kill_all(f"the term was taken on another database than the last one ({server})") if changed else []
        )
        return [*kills, *self._broadcast(now), *self._proceed(now)]

    def term_lost(self, trusted: bool, now: float) -> list[Command]:
        """The term row names somebody else (P8): take over again while trusted, else give up."""
        if self.phase not in (Phase.LEADING, Phase.REMARKING, Phase.SCALING, Phase.TAKING):
            return []
        self.intake.abandon()
        if not trusted:
            return self.fence("the term row names another holder", now)
        self.phase = Phase.IDLE
        return self.acquire(now)

    def fence(self, reason: str, now: float) -> list[Command]:
        """Trust has run out: nothing may be produced, nothing queued survives."""
        if self.phase in (Phase.IDLE, Phase.DRAINING):
            return []
        had_led = self.term is not None
        self._end_leadership()
        self.phase = Phase.IDLE
        event: list[Command] = [Announce(LeaderFenced(reason))] if had_led else []
        return [CloseTrust(), *self._broadcast(now), *event]

    def drain(self, now: float, trusted: bool = False) -> list[Command]:
        """Leadership is to be given up in good order, or the process stops: finish what is on the wire.

        `trusted`: the group's trust stays, only the term is given up (P32), so nothing has to be given up unsent.
        """
        if self.phase is not Phase.DRAINING:
            term, holder = self._told_term, self.holder
            in_doubt = now - self._unclean_at < self.settings.expiry_s
            self._to_release = (term, holder) if term is not None and holder is not None and not in_doubt else None
            self._end_leadership()
            self.phase = Phase.DRAINING
            closing: list[Command] = [] if trusted else [CloseTrust()]
            return [*closing, *self._broadcast(now), *self._proceed(now)]
        return []

    def server_changed(self, reason: str, now: float) -> list[Command]:
        """The database is another one than before (P9): see the module's text."""
        kills = self._kill_all(reason)
        if self.phase in (Phase.IDLE, Phase.DRAINING):
            return kills
        self.intake.abandon()
        self.phase = Phase.IDLE
        return [*kills, *self.acquire(now)]

    def _kill_all(self, reason: str) -> list[Command]:
        slices = enumerate(self.intake.slices)
        return [Kill(index, reason, own_fault=False) for index, shard in slices if shard.ready]

    def _doubt(self, now: float) -> None:
        """Something of this term, or of the one before, may be on its way to Kafka though nobody waits for it (P24)."""
        if not self.settings.exactly_once:  # there, whoever comes next fences the lanes
            self._unclean_at, self._to_release = now, None

    def _end_leadership(self) -> None:
        self.intake.abandon()
        self.term = self._told_term = self.holder = self.leader_id = None

    # -- marks

    def marked(self, number: int, rows: Sequence[Row], now: float, floor: int | None = None) -> list[Command]:
        """A mark's result, sorted by id. `floor`: no row can appear below it any more."""
        if not self.intake.knows(number) or self.phase is not Phase.LEADING:
            return []
        self._floor = floor
        commands = self._dispatch(self.intake.marked(number, rows, now))
        if not rows and self.intake.is_empty:
            commands.append(Emptied())
        return [*commands, *self._next_statements(now)]

    def fetched(self, number: int, rows: Sequence[Row], now: float) -> list[Command]:
        """A fetch's result."""
        if not self.intake.knows(number) or self.phase is not Phase.LEADING:
            return []
        return [*self._dispatch(self.intake.fetched(number, rows, now)), *self._next_statements(now)]

    def looked(self, number: int, ids: Iterable[int], now: float) -> tuple[int, list[Command]]:
        """All ids that the scan has passed and the table still has. Returns how many nobody knew of, and commands."""
        if not self.intake.knows(number) or self.phase is not Phase.LEADING:
            return 0, []
        return self.intake.looked(number, ids), self._next_statements(now)

    def statement_failed(self, number: int, error: str, now: float) -> list[Command]:
        """A statement that was sent may have taken effect: only a new leader id finds its rows again."""
        if not self.intake.knows(number):
            return []
        self.intake.abandon()
        return self.remark(f"a mark failed: {error}", now)

    def _dispatch(self, taken: Taken) -> list[Command]:
        return [
            Send(index, Dispatch(self.epoch, b"".join([row[2] for row in rows]), self.low_water))
            for index, rows in taken.items()
        ]

    def _next_statements(self, now: float) -> list[Command]:
        if self.phase is not Phase.LEADING or self.leader_id is None or self.term is None or self.holder is None:
            return []
        return [*self.intake.next(self.term, self.holder, self.leader_id, now)]

    # -- settling

    def settled(self, shard: int, ids: Sequence[int], now: float) -> tuple[int, list[Command]]:
        """The purge of these ids has committed. Returns how many were new, and the commands."""
        self.heard(shard, now)
        return self.ledger.settle(ids), self._proceed(now)

    def parked(
        self, shard: int, epoch: int, record_id: int, given_back: Sequence[int], wait_s: float, held: bool, now: float
    ) -> list[Command]:
        """A record failed and is to be tried again after `wait_s`: it and what stood behind it wait here (P18)."""
        self.heard(shard, now)
        self._doubt(now)
        if epoch != self.epoch or record_id not in self.ledger:
            return []
        key = self.ledger.key_of(record_id)
        name = record_id if key is None else key
        self.intake.park(name, shard, [record_id, *given_back], now + wait_s, held)
        return [Send(shard, Closed(epoch, record_id)), *self._proceed(now)]

    def refused(self, shard: int, epoch: int, ids: Sequence[int], now: float) -> list[Command]:
        """Rows of a parked key that reached the shard too late."""
        self.heard(shard, now)
        if epoch != self.epoch:
            return []
        for record_id in ids:
            key = self.ledger.key_of(record_id)
            if record_id not in self.ledger:
                continue
            if key is None or not self.intake.is_parked(key):
                # Not parked: the shard gave up a record of this key, and takes nothing more of it before a remark.
                self.ledger.give_back(ids)
                return self.remark(f"shard {shard} gave up a record", now)
            self.intake.give_back(key, (record_id,))
        return self._proceed(now)

    def dropped(self, shard: int, ids: Sequence[int], now: float) -> list[Command]:
        """A shard did not send these, for lack of trust or of a leader; while we lead, that calls for a remark."""
        self.heard(shard, now)
        forgotten = self.ledger.give_back(ids)
        if forgotten:
            self._doubt(now)
        if forgotten and self.phase is Phase.LEADING:
            return self.remark(f"shard {shard} ran out of trust", now)
        if forgotten:
            self._to_release = None  # what failed on the wire may still arrive
        return self._proceed(now)

    # -- remarks

    def remark(self, reason: str, now: float) -> list[Command]:
        """Drop what is queued everywhere, and mark again under a new leader id."""
        if self.phase not in (Phase.LEADING, Phase.REMARKING):
            return self._proceed(now)
        self.intake.abandon()
        if self.phase is Phase.LEADING:
            self._reason = reason  # the first cause says more than what follows from it
        self.phase = Phase.REMARKING
        return [*self._broadcast(now), *self._proceed(now)]

    def pause(self, now: float) -> list[Command]:
        """Mark nothing until `resume`, now or when this process comes to lead; see the module's text."""
        self.paused = True
        return self.remark("paused", now) if self.phase is Phase.LEADING else []

    def resume(self, now: float) -> list[Command]:
        """The end of `pause`."""
        if not self.paused:
            return []
        self.paused, self._reason = False, "resumed"
        return self._proceed(now)

    def remarked(
        self, shard: int, epoch: int, on_the_wire: Sequence[int], now: float, in_doubt: bool = False
    ) -> list[Command]:
        """A shard's answer to `Remark`. `in_doubt`: what it gave up may still arrive."""
        self.heard(shard, now)
        if in_doubt:
            self._doubt(now)
        if epoch != self.epoch or shard not in self._awaited:
            return []
        self._awaited.discard(shard)
        self.intake.slices[shard].opening = False
        lost = self.ledger.keep_only(shard, on_the_wire)
        if lost and self.phase is Phase.LEADING:  # a successor's answer: what its predecessor had is accounted for
            return self.remark(f"shard {shard} was replaced", now)
        return self._proceed(now)

    def fate_unknown(self, shard: int, epoch: int, ids: Sequence[int], reason: str, now: float) -> list[Command]:
        """Nobody can tell whether these were published. The shard ends itself; until then the ledger keeps them."""
        self.heard(shard, now)
        self._doubt(now)
        if epoch != self.epoch:
            return []
        return self.remark(reason, now)

    def queue_timed_out(self, shard: int, epoch: int, record_id: int, waited_s: float, now: float) -> list[Command]:
        """A shard has had a record queued for longer than queue_timeout, without any progress of its key."""
        self.heard(shard, now)
        if epoch != self.epoch:
            return []
        return self.remark(f"queue timeout: record {record_id} waited {waited_s:.1f} s in shard {shard}", now)

    def _broadcast(self, now: float) -> list[Command]:
        """Raise the epoch, ask every living shard what it has on the wire."""
        self.epoch += 1
        if self._told_term is None:
            self._forget_the_dead()
        ready = {i for i, shard in enumerate(self.intake.slices) if shard.ready}
        # Of a shard that is being started the answer tells that its lane is fenced.
        self._awaited = set(range(len(self.intake.slices))) if self._fences_all else set(ready)
        self._answer_deadline = now + self.settings.answer_timeout_s
        return [Send(i, self._remark_frame()) for i in sorted(ready)]

    def _forget_the_dead(self) -> None:
        """Nobody leads: what a dead shard had is for the next leader to find out, and nothing waits for it here."""
        for index, shard in enumerate(self.intake.slices):
            if not shard.ready and self.ledger.keep_only(index, ()):
                self._to_release = None

    @property
    def _fences_all(self) -> bool:
        """Whether every lane has to be fenced before a term can begin."""
        return self.settings.exactly_once and self.phase is Phase.TAKING and self._told_term is not None

    def _remark_frame(self) -> Remark:
        if self._told_term is None:
            return Remark(self.epoch, None, None)
        lanes, shards = (self.lanes, self.settings.shards) if self.settings.exactly_once else (0, 0)
        return Remark(
            self.epoch, self._told_term, str(self.holder), self._server, self._incarnation, max(lanes, shards), shards
        )

    def _proceed(self, now: float) -> list[Command]:
        """Go on where something was waited for."""
        if self.phase is Phase.LEADING:
            return self._next_statements(now)
        if self._awaited:
            return []
        if self.phase is Phase.TAKING and self._told_term is not None and self.leader_id is not None:
            self.term = self._told_term
            began: list[Command] = [OpenTrust(), Announce(LeaderAcquired(self.leader_id, self.term))]
            if self.paused:
                self.phase = Phase.REMARKING
                return began
            self._lead(now)
            return [*began, *self._next_statements(now)]
        if self.phase is Phase.TAKING and self.holder is not None and not self._term_asked:
            self._term_asked = True  # once: a second one would raise the term under our own feet
            return [TakeTerm(self.holder)]
        if self.phase is Phase.REMARKING and self.term is not None and not self.paused:
            self.leader_id = self._new_id()
            self._lead(now)
            refreshed = LeaderRefreshed(self.leader_id, self.term, self._reason)
            return [Announce(refreshed), *self._next_statements(now)]
        if self.phase is Phase.SCALING and not len(self.ledger):
            resize = self._resize(self._target)
            self.phase = Phase.REMARKING
            self._reason = f"changed to {self._target} shards"
            return [resize, *self._proceed(now)]
        if self.phase is Phase.DRAINING and not len(self.ledger):
            self.phase = Phase.IDLE
            released = [Release(*self._to_release)] if self._to_release is not None else []
            return [*released, Drained()]
        return []

    def _raise_low_water(self) -> None:
        """What is known to be settled without a gap stays so, over remarks and terms of one incarnation."""
        lowest = self.intake.lowest()
        if self._floor is not None:
            found = self._floor if lowest is None else min(self._floor, lowest)
            self.low_water = max(found, self.low_water or 1) if found > 1 else self.low_water

    def _lead(self, now: float) -> None:
        self.phase = Phase.LEADING
        self._floor = None
        self._look_at = now + self.settings.look_interval_s
        self.intake.begin()

    # -- the number of shards

    def scale(self, shards: int, deadline: float, now: float) -> list[Command]:
        """Change the number of shards (P17): stop marking, drop queues, wait until nothing is unsettled, switch.

        Done when `Resize` is commanded. It is refused when the phase is no longer SCALING without that: because
        something was still unsettled at the deadline, or leadership ended, or changed hands at this moment.
        """
        if self.phase is Phase.IDLE and not len(self.ledger):
            return [self._resize(shards)]
        if self.phase not in (Phase.LEADING, Phase.REMARKING):
            return []
        self.intake.abandon()
        self.phase = Phase.SCALING
        self._target, self._scale_deadline = shards, deadline
        return [*self._broadcast(now), *self._proceed(now)]

    def _resize(self, shards: int) -> Command:
        self.settings = replace(self.settings, shards=shards)
        self.intake.resize(shards)
        return Resize(shards)

    # -- shards

    def shard_ready(self, shard: int, now: float) -> list[Command]:
        """A new process of this shard can take rows."""
        state = self.intake.slices[shard]
        state.ready, state.congested, state.heard_at = True, False, now
        if self.settings.exactly_once and self._told_term is not None:
            state.opening = True
            self._awaited.add(shard)
            self._answer_deadline = now + self.settings.answer_timeout_s
        return [Send(shard, self._remark_frame()), *self._proceed(now)]

    def shard_died(self, shard: int, now: float) -> list[Command]:
        """Its process is gone for certain. What it had on the wire may or may not have been published."""
        state = self.intake.slices[shard]
        state.ready = False
        if self._fences_all:
            return []  # its successor has to fence the lane
        self._awaited.discard(shard)
        if self.settings.exactly_once and self.phase in (Phase.LEADING, Phase.REMARKING, Phase.SCALING):
            return self._proceed(now)  # its successor says what became of its records (P21)
        lost = self.ledger.keep_only(shard, ())
        if lost:
            self._doubt(now)
        if lost and self.phase in (Phase.LEADING, Phase.REMARKING):
            return self.remark(f"shard {shard} died", now)
        if lost:
            self._to_release = None
        return self._proceed(now)

    def congested(self, shard: int) -> None:
        """Its pipe takes nothing at the moment. No news of a shard that the same step has retired."""
        if shard < len(self.intake.slices):
            self.intake.congested(shard)

    def is_congested(self, shard: int) -> bool:
        """Whether its pipe was last known to take nothing. A retired one has nothing to take any more."""
        return shard < len(self.intake.slices) and self.intake.slices[shard].congested

    def uncongested(self, shard: int, now: float) -> list[Command]:
        """Its pipe takes frames again."""
        self.intake.uncongested(shard)
        return self._proceed(now)

    def heard(self, shard: int, now: float) -> None:
        """A frame arrived from it."""
        self.intake.slices[shard].heard_at = now

    # -- time

    def forgive(self, lost_s: float) -> None:
        """This process did not run for so long; its shards may not have either. Their time starts over."""
        self._answer_deadline += lost_s
        self._scale_deadline += lost_s
        for shard in self.intake.slices:
            shard.heard_at += lost_s

    def tick(self, now: float) -> list[Command]:
        """Look at the clock: unanswered remarks, silent shards, rows held for too long."""
        commands: list[Command] = []
        for index, shard in enumerate(self.intake.slices):
            if not shard.ready:
                continue
            silent_s = now - shard.heard_at
            patient = self.settings.exactly_once and silent_s < self.settings.answer_timeout_s
            if index in self._awaited and now >= self._answer_deadline and not patient:
                commands.append(Kill(index, "it did not answer a remark"))
            elif self.ledger.unsettled_of(index) and silent_s >= self.settings.silence_timeout_s:
                commands.append(Kill(index, f"it was silent for {silent_s:.1f} s"))
        if self.phase is Phase.SCALING and now >= self._scale_deadline:
            self.phase = Phase.REMARKING
            self._reason = "the number of shards could not be changed: something is still unsettled"
            return [*commands, *self._proceed(now)]
        if self.phase is Phase.LEADING:
            self.intake.watch(now)
            if now >= self._low_water_at:
                self._low_water_at = now + _LOW_WATER_S
                self._raise_low_water()
            if now >= self._look_at and self.term is not None and self.holder is not None:
                self._look_at = now + self.settings.look_interval_s
                commands.append(self.intake.look(self.term, self.holder))
            commands += self._next_statements(now)  # retries whose time has come
        return commands
