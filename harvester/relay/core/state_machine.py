"""The relay's state machine: the phases of a leadership, and the remarks between them. Pure.

Theory. One leadership runs through these phases:

    IDLE ──acquire──▶ TAKING ──term taken──▶ LEADING ◀──all shards answered── REMARKING
     ▲                  ▲                     │  │                               ▲
     │                  └────term lost────────┘  └──fate unknown, queue timeout──┘
     │                                        │     shard death, failed mark
     └──fence (from anywhere)                 └──drain──▶ DRAINING ──nothing unsettled──▶ IDLE

*Epoch.* Every change that drops what is queued (take-over, remark, drain, fence) raises the epoch and broadcasts
`Remark` to all living shards. Each replies with exactly the ids it still has on the wire; those stay in the ledger,
everything else is forgotten. Nothing is marked until all have replied (P5), and then under a new leader id, so that
every forgotten row is found again from a bookmark. What is on the wire is awaited, never repeated (I8). Shards that do
not reply are killed.

*Reports.* Every report about rows is first checked against phase and epoch: a report of an older epoch says nothing
about what is known now. Then read planner and ledger are updated, and the machine continues, or remarks what cannot be
accounted for. Every method and function returns the commands to perform, in order.

*Exactly once.* A shard replies to a remark only when it has fenced its lane under the new term and has purged what its
predecessor had committed. So a take-over waits for every shard, including those being started (P19), for as long as
they show signs of life; and while we lead, the ids of a dead shard stay in the ledger until its successor has replied
(P21). Rows are limited, not keys: nothing waits for another record of its key.

*Another server* (P9). If the database is not the one on which the term was taken, or has gone back in time, nothing
known about its rows holds any more, and a pending purge could hit a new row under an old id: all shards are killed,
whatever they hold, and the term is taken again. This repeats records rather than losing one.

*Paused.* A paused leader stays in REMARKING: what was queued has been given back, what is on the wire is awaited, and
no statement is issued, since that requires LEADING. It keeps its term and its trust, and can be drained, fenced, scaled
and deposed. A paused standby that takes the term enters REMARKING instead of LEADING. Resuming continues from there,
under a new leader id.

*Without trust.* Trust may expire some time before the fence arrives, and shards then drop whatever they are given. The
first rows that a shard drops cause one remark, which waits in REMARKING after the shards have replied: a new mark would
only fetch rows that are dropped again. Each tick checks trust. Once it is valid again, the remark continues; a fence
ends it like any other. A take-over whose last reply comes without trust waits in TAKING in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from uuid import UUID

from harvester.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from harvester.relay.core import messages as m
from harvester.relay.core.dispatcher import Spread, Taken
from harvester.relay.core.frames import Dispatch, ParkAcknowledged, Remark, in_pieces
from harvester.relay.core.leadership import Doubt, RelaySettings, RemarkReplies, Tenure
from harvester.relay.core.ledger import Ledger, Row
from harvester.relay.core.read_planner import ReadPlanner
from harvester.relay.core.scan import Bookmark, LowWatermark

_LOOK_PAUSE_S = 0.5  # between the portions of a look: marks have most of the session's time


class LeadershipPhase(Enum):
    IDLE = "idle"
    TAKING = "taking"
    LEADING = "leading"
    REMARKING = "remarking"
    SCALING = "scaling"
    DRAINING = "draining"


class StateMachine:
    """Decides. Every method returns the commands to perform, in order. One thread only."""

    def __init__(self, settings: RelaySettings, new_id: Callable[[], UUID]) -> None:
        self.settings = settings
        self.new_id = new_id
        self.phase = LeadershipPhase.IDLE
        self.epoch = 0
        self.paused = False  # by the operator, leading or not
        self.untrusted = False  # a shard dropped rows, and no tick has seen valid trust since
        self.vouched_for = True  # by the group, at this moment: set before each event
        self.tenure = Tenure()
        bounds = settings.bounds
        self.ledger = Ledger(bounds, pipelined=settings.exactly_once)
        spread = Spread(settings.shards, bounds.in_flight, settings.records_per_shard, settings.most_shards)
        self.planner = ReadPlanner(
            settings.mark_query_records, settings.send_buffer, self.ledger, shards=settings.shards, spread=spread
        )
        self.low_water = LowWatermark()
        self.doubt = Doubt(settings.expiry_s, fences=settings.exactly_once)
        self._replies = RemarkReplies(settings)
        self._reason = ""
        self._look_at = 0.0
        self._target = settings.shards
        self._scale_deadline = 0.0
        self._loan_deadline = math.inf  # of a drain for a loan

    def next_statements(self, now: float) -> list[m.Command]:
        tenure = self.tenure
        if (
            self.phase is not LeadershipPhase.LEADING
            or tenure.leader_id is None
            or tenure.term is None
            or tenure.holder is None
        ):
            return []
        return [*self.planner.next(tenure.term, tenure.holder, tenure.leader_id, now)]

    # -- remarks

    def remark(self, reason: str, now: float) -> list[m.Command]:
        """Drop everything queued, and mark again under a new leader id."""
        if self.phase not in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
            return self.proceed(now)
        self.planner.abandon()
        if self.phase is LeadershipPhase.LEADING:
            self._reason = reason  # the first cause says more than its consequences
        self.phase = LeadershipPhase.REMARKING
        return [*self.broadcast(now), *self.proceed(now)]

    def pause(self, now: float) -> list[m.Command]:
        """Mark nothing until `resume`, now or after a later take-over."""
        self.paused = True
        return self.remark("paused", now) if self.phase is LeadershipPhase.LEADING else []

    def resume(self, now: float) -> list[m.Command]:
        if not self.paused:
            return []
        self.paused, self._reason = False, "resumed"
        return self.proceed(now)

    def remarked(
        self, shard: int, epoch: int, on_the_wire: Sequence[int], now: float, in_doubt: bool = False
    ) -> list[m.Command]:
        """A shard's reply to `Remark`. `in_doubt`: what it gave up may still arrive."""
        self.heard(shard, now)
        if in_doubt:
            self.doubt.arise(now)
        if epoch != self.epoch or shard not in self._replies.awaited:
            return []
        self._replies.awaited.discard(shard)
        self.planner.shards[shard].opening = False
        lost = self.ledger.keep_only(shard, on_the_wire)
        if lost and in_doubt:
            self.doubt.keep_term()
        if (
            lost and self.phase is LeadershipPhase.LEADING
        ):  # reply of a successor: its predecessor's records are accounted for
            return self.remark(f"shard {shard} was replaced", now)
        return self.proceed(now)

    def broadcast(self, now: float) -> list[m.Command]:
        """Raise the epoch and ask every living shard what it has on the wire."""
        self.epoch += 1
        if self.tenure.told is None:
            self._forget_the_dead()
        ready = {i for i, shard in enumerate(self.planner.shards) if shard.ready}
        # A reply of a shard that is being started says that its lane is fenced.
        self._replies.begin(range(len(self.planner.shards)) if self._fences_all else ready, now)
        return [m.Send(i, self._remark_frame()) for i in sorted(ready)]

    def _forget_the_dead(self) -> None:
        """Nobody leads: the next leader finds out what a dead shard had, and nothing waits for it here."""
        for index, shard in enumerate(self.planner.shards):
            if not shard.ready and self.ledger.keep_only(index, ()):
                self.doubt.keep_term()

    @property
    def _fences_all(self) -> bool:
        """Whether every lane must be fenced before a term can begin."""
        return self.settings.exactly_once and self.phase is LeadershipPhase.TAKING and self.tenure.told is not None

    def _remark_frame(self) -> Remark:
        return self.tenure.remark(self.epoch, self.settings.shards if self.settings.exactly_once else 0)

    def proceed(self, now: float) -> list[m.Command]:
        """Continue if something was waited for."""
        tenure = self.tenure
        if self.phase is LeadershipPhase.LEADING:
            return self.next_statements(now)
        if self._replies.awaited:
            return []
        if self.phase is LeadershipPhase.TAKING and tenure.told is not None and tenure.leader_id is not None:
            if not self.vouched_for:  # the process hung; either trust returns by the next tick, or a fence comes
                return []
            tenure.term, tenure.announced, self.untrusted = tenure.told, True, False
            began: list[m.Command] = [m.OpenTrust(), m.Announce(LeaderAcquired(tenure.leader_id, tenure.term))]
            if self.paused:
                self.phase = LeadershipPhase.REMARKING
                return began
            self._lead(now)
            return [*began, *self.next_statements(now)]
        if self.phase is LeadershipPhase.TAKING and tenure.holder is not None and not tenure.asked:
            tenure.asked = True  # once: a second request would raise the term and depose ourselves
            return [m.TakeTerm(tenure.holder, tenure.lost)]
        if (
            self.phase is LeadershipPhase.REMARKING
            and tenure.term is not None
            and not self.paused
            and not self.untrusted
        ):
            tenure.leader_id = self.new_id()
            self._lead(now)
            refreshed = LeaderRefreshed(tenure.leader_id, tenure.term, self._reason)
            return [m.Announce(refreshed), *self.next_statements(now)]
        if self.phase is LeadershipPhase.SCALING and not len(self.ledger) and self.ledger.pinned(self._target):
            self.phase = LeadershipPhase.REMARKING
            first, *_ = self.ledger.pinned(self._target)
            self._reason = (
                f"the number of shards could not be changed: the delivery of record {first} timed out, and only the"
                " shard that sent it may send it again"
            )
            return self.proceed(now)
        if self.phase is LeadershipPhase.SCALING and not len(self.ledger):
            resize = self._resize(self._target)
            self.phase = LeadershipPhase.REMARKING
            self._reason = f"changed to {self._target} shards"
            return [resize, *self.proceed(now)]
        if self.phase is LeadershipPhase.DRAINING and not len(self.ledger):
            self.phase = LeadershipPhase.IDLE
            return [*self.doubt.release(), m.Drained()]
        return []

    def _lead(self, now: float) -> None:
        self.phase = LeadershipPhase.LEADING
        self.low_water.begin()
        self._look_at = now + self.settings.look_interval_s
        self.planner.begin()

    def save(self, bookmark: Bookmark | None) -> list[m.Command]:
        """Save where the next leader id may begin, while the term is ours."""
        term, holder = self.tenure.term, self.tenure.holder
        return [] if bookmark is None or term is None or holder is None else [m.SaveBookmark(term, holder, bookmark)]

    # -- the number of shards

    def scale(self, shards: int, deadline: float, now: float) -> list[m.Command]:
        """Change the number of shards (P17): stop marking, drop queues, wait until nothing is unsettled, switch.

        Done when `Resize` is returned. It was refused if the phase leaves SCALING without that: because something was
        still unsettled at the deadline, a shard that would end has a record in doubt, whose key no other producer may
        send (P36), or leadership ended or changed hands in the meantime.
        """
        if self.phase is LeadershipPhase.IDLE and not len(self.ledger):
            return [] if self.ledger.pinned(shards) else [self._resize(shards)]
        if self.phase not in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
            return []
        self.planner.abandon()
        self.phase = LeadershipPhase.SCALING
        self._target, self._scale_deadline = shards, deadline
        return [*self.broadcast(now), *self.proceed(now)]

    def _resize(self, shards: int) -> m.Command:
        self.settings = replace(self.settings, shards=shards)
        self.planner.resize(shards)
        return m.Resize(shards)

    # -- shards

    def shard_ready(self, shard: int, now: float) -> list[m.Command]:
        """A new process of this shard can accept rows."""
        state = self.planner.shards[shard]
        state.ready, state.congested, state.heard_at = True, False, now
        if self.settings.exactly_once and self.tenure.told is not None:
            state.opening = True
            self._replies.include(shard, now)
        return [m.Send(shard, self._remark_frame()), *self.proceed(now)]

    def shard_died(self, shard: int, now: float) -> list[m.Command]:
        """Its process is certainly gone. What it had on the wire may or may not have been published."""
        state = self.planner.shards[shard]
        state.ready = False
        self.ledger.unpin_shard(shard)
        if self._fences_all:
            return []  # its successor must fence the lane
        self._replies.awaited.discard(shard)
        if self.settings.exactly_once and self.phase in (
            LeadershipPhase.LEADING,
            LeadershipPhase.REMARKING,
            LeadershipPhase.SCALING,
        ):
            return self.proceed(now)  # its successor reports what became of its records (P21)
        lost = self.ledger.keep_only(shard, ())
        if lost:
            self.doubt.arise(now)
        if lost and self.phase in (LeadershipPhase.LEADING, LeadershipPhase.REMARKING):
            return self.remark(f"shard {shard} died", now)
        if lost:
            self.doubt.keep_term()
        return self.proceed(now)

    def congested(self, shard: int) -> None:
        """Its pipe accepts nothing at the moment. Ignored for a shard that the same step has retired."""
        if shard < len(self.planner.shards):
            self.planner.shards.congested(shard)

    def is_congested(self, shard: int) -> bool:
        """Whether its pipe was last known to accept nothing. Never true of a retired shard."""
        return shard < len(self.planner.shards) and self.planner.shards[shard].congested

    def uncongested(self, shard: int, now: float) -> list[m.Command]:
        self.planner.shards.uncongested(shard)
        return self.proceed(now)

    def heard(self, shard: int, now: float) -> None:
        self.planner.shards[shard].heard_at = now

    # -- time

    def forgive(self, lost_s: float) -> None:
        """This process, and possibly its shards, did not run for this long: their timeouts start over."""
        self._replies.forgive(lost_s)
        self._scale_deadline += lost_s
        self._loan_deadline += lost_s
        for shard in self.planner.shards:
            shard.heard_at += lost_s

    def tick(self, now: float, trusted: bool = True) -> list[m.Command]:
        """Check the clock: unanswered remarks, silent shards, rows held for too long, a wait for trust.

        `trusted`: shards may produce now.
        """
        commands: list[m.Command] = [*self._replies.stuck(self.planner.shards, self.ledger, now)]
        if self.untrusted and trusted:
            self.untrusted = False
            if self.phase is LeadershipPhase.REMARKING:
                return [*commands, *self.proceed(now)]
        if self.phase is LeadershipPhase.SCALING and now >= self._scale_deadline:
            self.phase = LeadershipPhase.REMARKING
            self._reason = "the number of shards could not be changed: something is still unsettled"
            return [*commands, *self.proceed(now)]
        if self.phase is LeadershipPhase.DRAINING and now >= self._loan_deadline:
            self._loan_deadline = math.inf
            late = [i for i, shard in enumerate(self.planner.shards) if shard.ready and self.ledger.unsettled_of(i)]
            reason = "the term is wanted by another, and what was sent is not settled"
            commands += [m.Kill(index, reason, own_fault=False) for index in late]
        if self.phase is LeadershipPhase.LEADING:
            self.planner.watch(now)
            self.low_water.look(now, self.planner.lowest)
            if self.low_water.known is not None:
                self.ledger.unpin_below(self.low_water.known)
            tenure = self.tenure
            if now >= self._look_at and tenure.term is not None and tenure.holder is not None:
                self._look_at = now + self.settings.look_interval_s
                commands += self.planner.look(tenure.term, tenure.holder)
            commands += self.save(self.low_water.to_save(now))
            commands += self.next_statements(now)  # retries that are due
        elif self.phase is LeadershipPhase.TAKING:
            commands += self.proceed(now)  # trust may be back
        return commands

    # -- statements

    def marked(
        self,
        number: int,
        rows: Sequence[Row],
        now: float,
        floor: int | None = None,
        bookmark: Bookmark | None = None,
    ) -> list[m.Command]:
        """A mark's result, in id order. `floor`: no row can appear below it any more; `bookmark`: the scan's."""
        if not self.planner.knows(number) or self.phase is not LeadershipPhase.LEADING:
            return []
        self.low_water.read(floor, bookmark)
        commands = self._dispatch(self.planner.marked(number, rows, now))
        if not rows and self.planner.is_empty:
            commands.append(m.Emptied())
        return [*commands, *self.next_statements(now)]

    def fetched(self, number: int, rows: Sequence[Row], now: float) -> list[m.Command]:
        if not self.planner.knows(number) or self.phase is not LeadershipPhase.LEADING:
            return []
        return [*self._dispatch(self.planner.fetched(number, rows, now)), *self.next_statements(now)]

    def looked(
        self, number: int, ids: Iterable[int], now: float, rest: int | None = None
    ) -> tuple[int, list[m.Command]]:
        """Ids that the scan has passed and the table still has. Returns how many were unknown, and commands.

        `rest`: the highest id that is still to be looked at.
        """
        if not self.planner.knows(number) or self.phase is not LeadershipPhase.LEADING:
            return 0, []
        if rest is not None:
            self._look_at = now + _LOOK_PAUSE_S
        return self.planner.looked(number, ids, rest), self.next_statements(now)

    def statement_failed(self, number: int, error: str, now: float) -> list[m.Command]:
        """A mark or fetch that was sent may have taken effect: only a new leader id finds its rows again."""
        if not self.planner.knows(number):
            return []
        if not self.planner.failed(number):
            self._look_at = now + 10 * _LOOK_PAUSE_S
            return self.proceed(now)
        return self.remark(f"a mark failed: {error}", now)

    def _dispatch(self, taken: Taken) -> list[m.Command]:
        return [
            m.Send(index, Dispatch(self.epoch, piece, self.low_water.known))
            for index, rows in taken.items()
            for piece in in_pieces([row[2] for row in rows])
        ]

    # -- shards

    def settled(self, shard: int, ids: Sequence[int], now: float) -> tuple[int, list[m.Command]]:
        """The purge of these ids has committed. Returns how many were new, and the commands."""
        self.heard(shard, now)
        return self.ledger.settle(ids), self.proceed(now)

    def parked(
        self,
        shard: int,
        epoch: int,
        record_id: int,
        given_back: Sequence[int],
        wait_s: float,
        held: bool,
        now: float,
    ) -> list[m.Command]:
        """A record failed and is to be retried after `wait_s`: it and those behind it wait here (P18)."""
        self.heard(shard, now)
        self.doubt.arise(now)
        if epoch != self.epoch or record_id not in self.ledger:
            return []
        key = self.ledger.key_of(record_id)
        name = record_id if key is None else key
        self.planner.park(name, shard, [record_id, *given_back], now + wait_s, held)
        return [m.Send(shard, ParkAcknowledged(epoch, record_id)), *self.proceed(now)]

    def in_doubt(self, shard: int, record_id: int, now: float) -> None:
        """A record failed that may still arrive: its key stays with this shard's producer until it is settled (P36)."""
        self.heard(shard, now)
        known = self.low_water.known
        self.ledger.pin(record_id, shard, passed_over=known is not None and record_id < known)

    def refused(self, shard: int, epoch: int, ids: Sequence[int], now: float) -> list[m.Command]:
        """Rows of a parked key that reached the shard too late."""
        self.heard(shard, now)
        if epoch != self.epoch:
            return []
        for record_id in ids:
            key = self.ledger.key_of(record_id)
            if record_id not in self.ledger:
                continue
            if key is None or not self.planner.is_parked(key):
                # Not parked: the shard gave up a record of this key, and accepts no more of it before a remark.
                self.ledger.give_back(ids)
                return self.remark(f"shard {shard} gave up a record", now)
            self.planner.give_back(key, (record_id,))
        return self.proceed(now)

    def dropped(self, shard: int, ids: Sequence[int], now: float, in_doubt: bool = False) -> list[m.Command]:
        """A shard did not send these because trust or a leader was missing; while we lead, this requires a remark.

        `in_doubt`: something of them had been sent before, and may still arrive.

        The remark continues when a tick has seen valid trust: rows marked before that would be dropped again.
        """
        self.heard(shard, now)
        forgotten = self.ledger.give_back(ids)
        if forgotten and in_doubt:
            self.doubt.arise(now)
        if forgotten and self.phase is LeadershipPhase.LEADING:
            self.untrusted = True
            return self.remark(f"shard {shard} ran out of trust", now)
        if forgotten and in_doubt:
            self.doubt.keep_term()
        return self.proceed(now)

    def fate_unknown(self, shard: int, epoch: int, ids: Sequence[int], reason: str, now: float) -> list[m.Command]:
        """It is unknown whether these were published. The shard ends itself; until then the ledger keeps them."""
        self.heard(shard, now)
        self.doubt.arise(now)
        if epoch != self.epoch:
            return []
        return self.remark(reason, now)

    def queue_timed_out(self, shard: int, epoch: int, record_id: int, waited_s: float, now: float) -> list[m.Command]:
        """A shard has had a record queued for longer than queue_timeout without any progress of its key."""
        self.heard(shard, now)
        if epoch != self.epoch:
            return []
        return self.remark(f"queue timeout: record {record_id} waited {waited_s:.1f} s in shard {shard}", now)

    def acquire(self, now: float) -> list[m.Command]:
        """The group made this process its leader and trusts it: drop everything, take the term, lead."""
        if self.phase is not LeadershipPhase.IDLE:
            return []
        self.phase = LeadershipPhase.TAKING
        self.tenure.begin(self.new_id())
        return [m.CloseTrust(), *self.broadcast(now), *self.proceed(now)]

    def lanes_known(self, lanes: int) -> None:
        """The number of lanes in exactly-once mode: each must be fenced before a term begins."""
        self.tenure.lanes = lanes

    def term_taken(
        self,
        holder: UUID,
        term: int,
        server: str | None,
        now: float,
        went_back: bool = False,
        incarnation: UUID | None = None,
        in_doubt: bool = False,
    ) -> list[m.Command]:
        """The term row of this server names us under this number. `went_back`: the row or its ids had gone back (P9).

        `in_doubt`: the previous term was not released, so what its leader had on the wire may still arrive.

        The shards are sent the term and reply once more: while they knew no term, they gave up what failed on the wire,
        and that must be known before anything behind it is marked (P5).
        """
        tenure = self.tenure
        if self.phase is not LeadershipPhase.TAKING or holder != tenure.holder or tenure.told is not None:
            return []
        if in_doubt:
            self.doubt.arise(now)
        changed = tenure.tell(term, server, now) or went_back
        if tenure.is_new(incarnation):
            self.low_water.forget()
        reason = f"the term was taken on a different database ({server})"
        kills = self._kill_all(reason) if changed else []
        return [*kills, *self.broadcast(now), *self.proceed(now)]

    def term_lost(self, trusted: bool, now: float) -> list[m.Command]:
        """The term row names another holder (P8): take over again while trusted, otherwise give up."""
        if self.phase not in (
            LeadershipPhase.LEADING,
            LeadershipPhase.REMARKING,
            LeadershipPhase.SCALING,
            LeadershipPhase.TAKING,
        ):
            return []
        self.planner.abandon()
        if not trusted:
            return self.fence("the term row names another holder", now)
        self.tenure.lose(now, self.settings.expiry_s)
        self.phase = LeadershipPhase.IDLE
        return self.acquire(now)

    def fence(self, reason: str, now: float) -> list[m.Command]:
        """Trust has expired: nothing may be produced, nothing queued survives."""
        if self.phase in (LeadershipPhase.IDLE, LeadershipPhase.DRAINING):
            return []
        announced = self.tenure.announced
        self._end()
        self.phase = LeadershipPhase.IDLE
        event: list[m.Command] = [m.Announce(LeaderFenced(reason))] if announced else []
        return [m.CloseTrust(), *self.broadcast(now), *event]

    def drain(self, now: float, trusted: bool = False) -> list[m.Command]:
        """Leadership is to be given up in good order, or the process stops: finish what is on the wire.

        `trusted`: the group's trust remains and only the term is given up (P32), so nothing has to be dropped unsent.
        Shards that still have something unsettled when all that was on the wire has expired are killed: a single row
        that somebody has locked would keep the outbox from being led for as long. The caller bounds other drains.
        """
        if self.phase is LeadershipPhase.DRAINING:
            return []
        # Exactly once, before all lanes are open, it is not known what the last leader's lanes have committed.
        term = self.tenure.term if self.settings.exactly_once else self.tenure.told
        self.doubt.drain(term, self.tenure.holder, now)
        saved = self.save(self.low_water.last())
        self._end()
        self.phase = LeadershipPhase.DRAINING
        self._loan_deadline = now + self.settings.expiry_s if trusted else math.inf
        closing: list[m.Command] = [] if trusted else [m.CloseTrust()]
        return [*saved, *closing, *self.broadcast(now), *self.proceed(now)]

    def server_changed(self, reason: str, now: float) -> list[m.Command]:
        """The database is not the previous one (P9): kill all shards, take the term again."""
        kills = self._kill_all(reason)
        if self.phase in (LeadershipPhase.IDLE, LeadershipPhase.DRAINING):
            return kills
        self.planner.abandon()
        self.phase = LeadershipPhase.IDLE
        return [*kills, *self.acquire(now)]

    def _kill_all(self, reason: str) -> list[m.Command]:
        shards = enumerate(self.planner.shards)
        return [m.Kill(index, reason, own_fault=False) for index, shard in shards if shard.ready]

    def _end(self) -> None:
        self.planner.abandon()
        self.tenure.end()
