"""Is the world of `test_machine` able to fail? Each rule is broken once, and the world has to notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from pytest import MonkeyPatch

from harvester.relay.barrier import Barrier, Entry, Step
from harvester.relay.commands import Reset
from harvester.relay.ledger import Ledger
from harvester.relay.machine import Phase, Relay
from tests.support.relay_shard import SimShard
from tests.support.relay_world import Broken, World

HISTORIES = 1500


def _barrier_falls_at_the_ack(patch: MonkeyPatch) -> None:
    """P1."""

    def acknowledge(self: SimShard, record_id: int) -> None:
        self.wire.pop(record_id).report(None, None)
        self.sender.purged([record_id])

    patch.setattr(SimShard, "_acknowledge", acknowledge)
    patch.setattr(SimShard, "_return", lambda self: setattr(self, "deleting", None))


def _keys_closed_since_are_taken(patch: MonkeyPatch) -> None:
    """P18."""
    patch.setattr(Ledger, "closed_since", lambda _self, _number: frozenset())


def _parked_keys_are_not_refused(patch: MonkeyPatch) -> None:
    """P5: frames that were on their way overtake what was dropped."""
    offer = Barrier.offer

    def welcome(self: Barrier, entry: Entry) -> bool | None:
        self._refusing.clear()
        return offer(self, entry)

    patch.setattr(Barrier, "offer", welcome)


def _ghosts_are_forgotten(patch: MonkeyPatch) -> None:
    """P3."""
    patch.setattr(Ledger, "knows", Ledger.__contains__)


def _marks_before_all_answered(patch: MonkeyPatch) -> None:
    """P5."""
    broadcast = Relay._broadcast

    def impatient(self: Relay, now: float) -> Any:
        commands = broadcast(self, now)
        self._awaited.clear()
        return commands

    patch.setattr(Relay, "_broadcast", impatient)


def _wire_is_forgotten(patch: MonkeyPatch) -> None:
    """P5: what is on the wire has to stay in the ledger."""
    keep = Ledger.keep_only
    patch.setattr(Ledger, "keep_only", lambda self, shard, _ids: keep(self, shard, ()))


def _nothing_is_forgotten(patch: MonkeyPatch) -> None:
    """P5: what a shard dropped has to leave the ledger."""
    patch.setattr(Ledger, "keep_only", lambda _self, _shard, _ids: [])


def _old_results_count(patch: MonkeyPatch) -> None:
    """P4."""
    patch.setattr(Relay, "_abandon_mark", lambda _self: None)


def _leader_id_stays(patch: MonkeyPatch) -> None:
    """P4: forgotten rows are found again by a new leader id only."""
    proceed = Relay._proceed

    def forgetful(self: Relay, now: float) -> Any:
        leader_id, phase = self.leader_id, self.phase
        commands = proceed(self, now)
        if phase is Phase.REMARKING:
            self.leader_id = leader_id
        return [c for c in commands if not hasattr(c, "event")]

    patch.setattr(Relay, "_proceed", forgetful)


def _given_back_rows_are_not_reset(patch: MonkeyPatch) -> None:
    """P18: what stood behind a parked record goes back to the table."""
    patch.setattr(Relay, "_give_back", lambda self, ids: self.ledger.give_back(ids) and [])


def _surplus_rows_are_not_reset(patch: MonkeyPatch) -> None:
    """Rows that a result gives back have to go back to the table."""
    marked = Relay.marked

    def lazy(self: Relay, *arguments: Any) -> Any:
        return [command for command in marked(self, *arguments) if not isinstance(command, Reset)]

    patch.setattr(Relay, "marked", lazy)


def _no_bound_in_flight(patch: MonkeyPatch) -> None:
    """I3."""
    patch.setattr(Ledger, "room", lambda _self: 100)


def _no_remark_when_a_shard_dies(patch: MonkeyPatch) -> None:
    """I1."""

    def shrug(self: Relay, shard: int, now: float) -> Any:
        self.shards[shard].ready = False
        self._awaited.discard(shard)
        self.ledger.keep_only(shard, ())
        self.shards[shard].held.clear()
        return self._proceed(now)

    patch.setattr(Relay, "shard_died", shrug)


def _closed_keys_open_early(patch: MonkeyPatch) -> None:
    """P18: a key opens only with nothing of it unsettled."""
    remove = Ledger._remove

    def eager(self: Ledger, record_id: int) -> bool:
        key = self.key_of(record_id)
        removed = remove(self, record_id)
        if key in self._keys:
            self._closed.discard(key)
            self._keys[key].closed = False
        return removed

    patch.setattr(Ledger, "_remove", eager)


def _closed_keys_are_marked(patch: MonkeyPatch) -> None:
    """P18: marks leave closed keys out."""
    patch.setattr(Ledger, "closed", property(lambda _self: frozenset()))


def _term_is_taken_twice(patch: MonkeyPatch) -> None:
    """P8."""
    patch.setattr(Relay, "_term_asked", property(lambda _self: False, lambda _self, _value: None), raising=False)


def _emptied_too_early(patch: MonkeyPatch) -> None:
    """A key's rows may have been given back since the mark was sent."""
    closed_since = Ledger.closed_since

    class Blind(frozenset[bytes]):
        def __bool__(self) -> bool:
            return False

    patch.setattr(Ledger, "closed_since", lambda self, number: Blind(closed_since(self, number)))


def _switch_before_all_is_settled(patch: MonkeyPatch) -> None:
    """P17."""

    def scale(self: Relay, shards: int, deadline: float, now: float) -> Any:
        if self.phase is not Phase.LEADING:
            return []
        return [self._resize(shards), *self.remark("scaled", now)]

    patch.setattr(Relay, "scale", scale)


def _remark_keeps_queues(patch: MonkeyPatch) -> None:
    """P5: a remark drops what is queued."""
    patch.setattr(Barrier, "remark", lambda self: sorted(self._unsettled))


def _barrier_of_two(patch: MonkeyPatch) -> None:
    """I2: at most one record of a key is unsettled on the wire."""

    def offer(self: Barrier, entry: Entry) -> bool:
        if entry.key is not None:
            self._queues.setdefault(entry.key, __import__("collections").deque())
        entry.step = Step.WIRE
        self._unsettled[entry.id] = entry
        return True

    patch.setattr(Barrier, "offer", offer)


MUTATIONS: list[Callable[[MonkeyPatch], None]] = [
    _barrier_falls_at_the_ack,
    _keys_closed_since_are_taken,
    _parked_keys_are_not_refused,
    _ghosts_are_forgotten,
    _marks_before_all_answered,
    _wire_is_forgotten,
    _nothing_is_forgotten,
    _old_results_count,
    _leader_id_stays,
    _given_back_rows_are_not_reset,
    _surplus_rows_are_not_reset,
    _no_bound_in_flight,
    _no_remark_when_a_shard_dies,
    _closed_keys_open_early,
    _closed_keys_are_marked,
    _term_is_taken_twice,
    _emptied_too_early,
    _switch_before_all_is_settled,
    _remark_keeps_queues,
    _barrier_of_two,
]


def first_failure(histories: int) -> tuple[int, BaseException] | None:
    """The first history that breaks, and how: an invariant, or an assertion of the code itself."""
    for seed in range(histories):
        chance = random.Random(seed)
        try:
            World(chance.randbytes(chance.randrange(50, 500))).run()
        except (Broken, AssertionError, KeyError, ValueError) as error:
            return seed, error
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__.strip("_"))
def test_the_world_notices(mutation: Callable[[MonkeyPatch], None], monkeypatch: MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert first_failure(HISTORIES) is not None


def test_leader_ids_are_uuids_in_the_world() -> None:
    world = World(bytes(64)).run()
    assert all(isinstance(leader_id, UUID) for leader_id in world.leader_ids)
