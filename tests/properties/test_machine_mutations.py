"""Is the world of `test_machine` able to fail? Each rule is broken once, and the world has to notice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from harvester.relay.barrier import Barrier, Entry, Step
from harvester.relay.commands import Reset
from harvester.relay.intake import Intake
from harvester.relay.ledger import Ledger
from harvester.relay.machine import Phase, Relay
from tests.support.relay_shard import SimShard
from tests.support.relay_world import FAULTS, Broken, World

HISTORIES = 4000


def _barrier_falls_at_the_ack(patch: pytest.MonkeyPatch) -> None:
    """P1."""

    def acknowledge(self: SimShard, record_id: int) -> None:
        self.wire.pop(record_id).report(None, None)
        self.sender.purged([record_id])

    patch.setattr(SimShard, "_acknowledge", acknowledge)
    patch.setattr(SimShard, "_return", lambda self: setattr(self, "deleting", None))


def _keys_closed_since_are_taken(patch: pytest.MonkeyPatch) -> None:
    """P18."""
    patch.setattr(Ledger, "closed_since", lambda _self, _number: frozenset())


def _parked_keys_are_not_refused(patch: pytest.MonkeyPatch) -> None:
    """P5: frames that were on their way overtake what was dropped."""
    offer = Barrier.offer

    def welcome(self: Barrier, entry: Entry) -> bool | None:
        self._refusing.clear()
        return offer(self, entry)

    patch.setattr(Barrier, "offer", welcome)


def _given_up_keys_are_not_refused(patch: pytest.MonkeyPatch) -> None:
    """P5: a record that is given up must not be overtaken by frames that were on their way."""
    forget = Barrier.forget

    def careless(self: Barrier, record_id: int) -> list[int]:
        key = self._unsettled[record_id].key
        behind = forget(self, record_id)
        self._refusing -= {key}
        return behind

    patch.setattr(Barrier, "forget", careless)


def _what_stood_behind_a_given_up_record_stays(patch: pytest.MonkeyPatch) -> None:
    """P5: it would take the place on the wire, and nobody would send it."""

    def forget(self: Barrier, record_id: int) -> list[int]:
        self.settle(record_id, 0.0)
        return []

    patch.setattr(Barrier, "forget", forget)


def _ghosts_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """P3."""
    patch.setattr(Ledger, "knows", Ledger.__contains__)


def _marks_before_all_answered(patch: pytest.MonkeyPatch) -> None:
    """P5."""
    broadcast = Relay._broadcast

    def impatient(self: Relay, now: float) -> Any:
        commands = broadcast(self, now)
        self._awaited.clear()
        return commands

    patch.setattr(Relay, "_broadcast", impatient)


def _leads_before_all_answered(patch: pytest.MonkeyPatch) -> None:
    """P5: what was given up without a term is heard only with the second answer."""
    taken = Relay.term_taken

    def impatient(self: Relay, holder: UUID, term: int, now: float) -> Any:
        commands = taken(self, holder, term, now)
        self._awaited.clear()
        return [*commands, *self._proceed(now)]

    patch.setattr(Relay, "term_taken", impatient)


def _wire_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """P5: what is on the wire has to stay in the ledger."""
    keep = Ledger.keep_only
    patch.setattr(Ledger, "keep_only", lambda self, shard, _ids: keep(self, shard, ()))


def _nothing_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """P5: what a shard dropped has to leave the ledger."""
    patch.setattr(Ledger, "keep_only", lambda _self, _shard, _ids: [])


def _old_results_count(patch: pytest.MonkeyPatch) -> None:
    """P4."""
    patch.setattr(Intake, "abandon", lambda _self: None)


def _leader_id_stays(patch: pytest.MonkeyPatch) -> None:
    """P4: forgotten rows are found again by a new leader id only."""
    proceed = Relay._proceed

    def forgetful(self: Relay, now: float) -> Any:
        leader_id, phase = self.leader_id, self.phase
        commands = proceed(self, now)
        if phase is Phase.REMARKING:
            self.leader_id = leader_id
        return [c for c in commands if not hasattr(c, "event")]

    patch.setattr(Relay, "_proceed", forgetful)


def _given_back_rows_are_not_reset(patch: pytest.MonkeyPatch) -> None:
    """P18: what stood behind a parked record goes back to the table."""
    patch.setattr(Relay, "_give_back", lambda self, ids: self.ledger.give_back(ids) and [])


def _surplus_rows_are_not_reset(patch: pytest.MonkeyPatch) -> None:
    """Rows that a result gives back have to go back to the table."""
    marked = Relay.marked

    def lazy(self: Relay, *arguments: Any) -> Any:
        return [command for command in marked(self, *arguments) if not isinstance(command, Reset)]

    patch.setattr(Relay, "marked", lazy)


def _no_bound_in_flight(patch: pytest.MonkeyPatch) -> None:
    """I3."""
    patch.setattr(Ledger, "room", lambda _self: 100)


def _no_remark_when_a_shard_dies(patch: pytest.MonkeyPatch) -> None:
    """I1."""

    def shrug(self: Relay, shard: int, now: float) -> Any:
        self.intake.slices[shard].ready = False
        self._awaited.discard(shard)
        self.ledger.keep_only(shard, ())
        self.intake.slices[shard].held.clear()
        return self._proceed(now)

    patch.setattr(Relay, "shard_died", shrug)


def _closed_keys_open_early(patch: pytest.MonkeyPatch) -> None:
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


def _closed_keys_are_marked(patch: pytest.MonkeyPatch) -> None:
    """P18: marks leave closed keys out."""
    patch.setattr(Ledger, "closed", property(lambda _self: frozenset()))


def _term_is_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """P8."""
    patch.setattr(Relay, "_term_asked", property(lambda _self: False, lambda _self, _value: None), raising=False)


def _emptied_too_early(patch: pytest.MonkeyPatch) -> None:
    """A key's rows may have been given back since the mark was sent."""
    closed_since = Ledger.closed_since

    class Blind(frozenset[bytes]):
        def __bool__(self) -> bool:
            return False

    patch.setattr(Ledger, "closed_since", lambda self, number: Blind(closed_since(self, number)))


def _switch_before_all_is_settled(patch: pytest.MonkeyPatch) -> None:
    """P17."""

    def scale(self: Relay, shards: int, deadline: float, now: float) -> Any:
        if self.phase is not Phase.LEADING:
            return []
        return [self._resize(shards), *self.remark("scaled", now)]

    patch.setattr(Relay, "scale", scale)


def _remark_keeps_queues(patch: pytest.MonkeyPatch) -> None:
    """P5: a remark drops what is queued."""
    patch.setattr(Barrier, "remark", lambda self: sorted(self._unsettled))


def _barrier_of_two(patch: pytest.MonkeyPatch) -> None:
    """I2: at most one record of a key is unsettled on the wire."""

    def offer(self: Barrier, entry: Entry) -> bool:
        if entry.key is not None:
            self._queues.setdefault(entry.key, deque())
        entry.step = Step.WIRE
        self._unsettled[entry.id] = entry
        return True

    patch.setattr(Barrier, "offer", offer)


KAFKA = ("kafka",)
ONE_KEY = bytes([0, 0, 4, 4, 2, 2, 3])  # one shard, room for five, pipes of four frames
TWO_KEYS = bytes([1, *ONE_KEY[1:]])

# What is broken, the faults it takes to see it (None: all), and how the history begins.
MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...] | None, bytes]] = [
    (_barrier_falls_at_the_ack, None, b""),
    (_keys_closed_since_are_taken, None, b""),
    (_parked_keys_are_not_refused, KAFKA, ONE_KEY),
    (_given_up_keys_are_not_refused, ("poison", "usurper"), ONE_KEY),
    (_what_stood_behind_a_given_up_record_stays, ("poison", "usurper"), ONE_KEY),
    (_ghosts_are_forgotten, ("timeouts",), TWO_KEYS),
    (_marks_before_all_answered, None, b""),
    (_leads_before_all_answered, ("poison", "usurper"), TWO_KEYS),
    (_wire_is_forgotten, None, b""),
    (_nothing_is_forgotten, None, b""),
    (_old_results_count, None, b""),
    (_leader_id_stays, None, b""),
    (_given_back_rows_are_not_reset, None, b""),
    (_surplus_rows_are_not_reset, None, b""),
    (_no_bound_in_flight, None, b""),
    (_no_remark_when_a_shard_dies, None, b""),
    (_closed_keys_open_early, KAFKA, TWO_KEYS),
    (_closed_keys_are_marked, None, b""),
    (_term_is_taken_twice, None, b""),
    (_emptied_too_early, KAFKA, ONE_KEY),
    (_switch_before_all_is_settled, None, b""),
    (_remark_keeps_queues, None, b""),
    (_barrier_of_two, None, b""),
]


def first_failure(histories: int, faults: tuple[str, ...] | None, beginning: bytes) -> tuple[int, BaseException] | None:
    """The first history that breaks, and how: an invariant, or an assertion of the code itself."""
    for seed in range(histories):
        chance = random.Random(seed)
        try:
            World(beginning + chance.randbytes(chance.randrange(50, 500)), faults or FAULTS).run()
        except (Broken, AssertionError, KeyError, ValueError) as error:
            return seed, error
    return None


@pytest.mark.parametrize(
    ("mutation", "faults", "beginning"), MUTATIONS, ids=[m[0].__name__.strip("_") for m in MUTATIONS]
)
def test_the_world_notices(
    mutation: Callable[[pytest.MonkeyPatch], None],
    faults: tuple[str, ...] | None,
    beginning: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutation(monkeypatch)
    assert first_failure(HISTORIES, faults, beginning) is not None
