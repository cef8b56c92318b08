"""A lake's cuts, in a small world of relays with transactions, partitions, and a lake that reads them step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.pipeline.lake.cuts import CutState, LowMark

P, Q, R = PLACES = [("orders", 0), ("orders", 1), ("payments", 0)]
I = "an incarnation"  # noqa: E741 - as in a formula


@dataclass
class World:
    """Records are (id, low watermark, lane). A lane's records are settled by its commit, which shows them later."""

    logs: dict[tuple[str, int], list[tuple[int, int, int]]] = field(default_factory=lambda: {one: [] for one in PLACES})
    sent: int = 0
    unsettled: dict[int, int] = field(default_factory=dict)  # id -> lane
    hidden: set[int] = field(default_factory=set)

    def send(self, place: tuple[str, int], lane: int = 0) -> None:
        """Lane 0 has no transactions: its record is acknowledged at once, before the next one is stamped."""
        self.sent += 1
        low = min(self.unsettled, default=self.sent)
        self.logs[place].append((self.sent, low, lane))
        if lane:
            self.unsettled[self.sent] = lane
            self.hidden.add(self.sent)

    def commit(self, lane: int) -> None:
        self.unsettled = {number: other for number, other in self.unsettled.items() if other != lane}

    def show(self) -> None:
        """The coordinator has written the markers of all transactions that have committed."""
        self.hidden &= self.unsettled.keys()

    def high(self, place: tuple[str, int]) -> int:
        return len(self.logs[place])

    def stable(self, place: tuple[str, int]) -> int:
        log = self.logs[place]
        return next((at for at, (number, _, _) in enumerate(log) if number in self.hidden), len(log))


@dataclass
class LakeModel:
    """Reads ends partition by partition; `rule`: by what it judges, the right one and two that are wrong."""

    world: World
    rule: str = "high watermarks"
    most: int = 100
    state: CutState = field(default_factory=CutState)
    started: bool = True
    read: dict[tuple[str, int], int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    cuts: list[int] = field(default_factory=list)
    planned: dict[tuple[str, int], int] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)

    def step(self, *, killed: bool = False) -> None:
        """Asks for the end of one more partition; once all are known, the batch ends. `killed`: it is begun again."""
        world = self.world
        if len(self.planned) < len(PLACES):
            place = PLACES[len(self.planned)]
            self.planned[place] = max(self.read[place], min(world.stable(place), self.read[place] + self.most))
        elif len(self.ends) < len(PLACES):
            place = PLACES[len(self.ends)]
            asked = world.stable if self.rule == "stable offsets" else world.high
            self.ends[place] = self.planned[place] if self.rule == "what was read" else asked(place)
        else:
            lows = [low for one in PLACES for _, low, _ in world.logs[one][self.read[one] : self.planned[one]]]
            marks = {I: LowMark(max(lows), 0)} if lows else {}
            ends = self.ends if self.state.needs_ends(marks, self.planned, started=self.started) else {}
            state, found = self.state.after(marks, self.planned, ends)
            self.cuts += [mark.id for mark in found.values()]
            self.ends, self.started = {}, killed
            if killed:  # after its cuts are written, before its state is
                proven = {**self.state.proven, **{name: mark.id for name, mark in found.items()}}
                self.state = CutState.restored(json.dumps({"cuts": self.state.to_json()}), proven)
                return
            self.state, self.read, self.planned = state, self.planned, {}
        self.check()

    def check(self) -> None:
        """What each cut says, if the batch that wrote it is complete."""
        inside = {number for one in PLACES for number, _, _ in self.world.logs[one][: self.read[one]]}
        for cut in self.cuts if not self.planned else ():
            missing = set(range(1, cut)) - inside
            assert not missing, f"the cut {cut} lacks {missing}"

    def batch(self) -> None:
        for _ in range(2 * len(PLACES) + 1):
            self.step()


_SEND = st.tuples(st.just("send"), st.sampled_from(PLACES), st.integers(0, 2))
_OTHERS = st.sampled_from([("commit", 1), ("commit", 2), ("show",), ("step",), ("step",), ("killed",)])


@given(actions=st.lists(_SEND | _OTHERS, max_size=120), most=st.sampled_from([1, 2, 100]))
def test_a_cut_lacks_nothing_whatever_happens_while_a_batch_is_planned(actions: list[Any], most: int) -> None:
    world = World()
    lake = LakeModel(world, most=most)
    for name, *given_ in actions:
        if name == "step":
            lake.step()
        elif name == "killed":
            lake.step(killed=True)
        else:
            getattr(world, name)(*given_)
    assert lake.cuts == sorted(set(lake.cuts)), "each is written once, and they ascend"

    # Once all is settled and seen, the highest watermark is a cut after two batches at most, but for their bound.
    for lane in (1, 2):
        world.commit(lane)
    world.show()
    world.send(Q)
    lake.most = 1000
    while lake.planned:  # what is under way
        lake.step()
    world.send(Q)
    for _ in range(2):
        lake.batch()
    assert lake.cuts[-1] == world.sent


def _asked_one_after_the_other(world: World, lake: LakeModel) -> None:
    """The example of the module: 1 is appended to a partition whose end was read, then 2 to one whose end was not."""
    lake.step()
    world.send(P)
    world.send(Q)
    for _ in range(2 * len(PLACES)):
        lake.step()


def _behind_an_open_transaction(world: World, lake: LakeModel) -> None:
    """1 is committed, but its marker is not written yet; 2 says that it is settled."""
    world.send(R, 2)
    world.commit(2)
    world.send(Q)
    lake.batch()


@pytest.mark.parametrize(
    ("rule", "scene"),
    [("what was read", _asked_one_after_the_other), ("stable offsets", _behind_an_open_transaction)],
)
def test_what_the_batch_itself_has_read_proves_nothing(rule: str, scene: Callable[[World, LakeModel], None]) -> None:
    wrong = World()
    with pytest.raises(AssertionError, match=r"the cut 2 lacks \{1\}"):
        scene(wrong, LakeModel(wrong, rule))
    world = World()
    lake = LakeModel(world)
    scene(world, lake)
    assert lake.cuts == []
    world.show()
    lake.batch()
    world.send(P)
    lake.batch()
    assert lake.cuts[0] == 2


def test_a_topic_that_was_added_or_retired_voids_what_waits() -> None:
    mark = {I: LowMark(5, 0)}
    waiting, found = CutState().after(mark, {P: 1}, {P: 2})
    assert (found, waiting.waiting is not None) == ({}, True)
    assert waiting.after({I: LowMark(6, 0)}, {P: 1}, {P: 9}) == (waiting, {}), "the first one waits"
    assert CutState({I: 5}).after(mark, {P: 2}, {P: 2}) == (CutState({I: 5}), {}), "a cut is made once"
    for read in ({P: 2, R: 0}, {}):
        state, found = waiting.after({}, read, {})
        assert (found, state.waiting) == ({}, None)
    # A partition that was added has nothing from before; one that the batch does not know of may have.
    assert waiting.after({}, {P: 2, Q: 0}, {})[1] == mark
    assert CutState().after(mark, {P: 2}, {P: 2, Q: 1})[1] == {}
    assert CutState().after(mark, {P: 2}, {P: 2, Q: 0})[1] == mark


def test_what_waits_for_offsets_that_a_log_has_no_more_is_void_once_a_run_begins() -> None:
    """P had 50 records and got 10 more. It was recreated, and has 9: the lake reads from 0 on."""
    waiting, _ = CutState().after({I: LowMark(50, 0)}, {P: 50, Q: 1}, {P: 60, Q: 1})
    read, mark = {P: 9, Q: 1}, {I: LowMark(61, 0)}
    assert waiting.needs_ends(mark, read, started=True)
    assert not waiting.needs_ends(mark, read), "while it runs, a log has all that it had"
    assert waiting.after(mark, read, {P: 9, Q: 1}) == (CutState({I: 61}), mark), "nothing is left of what waited"
    state, found = waiting.after(mark, read, {P: 10, Q: 1})
    assert found == {}
    assert state.after({}, {P: 10, Q: 1}, {})[1] == mark
    assert waiting.after({}, {P: 9}, {P: 60}) == (CutState(), {}), "a partition is gone"
    # One that still has them all is as good as it was.
    assert waiting.after(mark, read, {P: 60, Q: 1}) == (waiting, {})
    assert CutState().needs_ends({}, read, started=True) is False


def test_the_state_survives_in_text_and_text_of_others_is_none() -> None:
    state, _ = CutState({I: 3}).after({I: LowMark(5, 77), "other": LowMark(-4, 0)}, {P: 1, R: 0}, {P: 2, R: 0})
    assert CutState.restored(json.dumps({"cuts": state.to_json()}), {I: 3}) == state
    for text in (None, "", "{}", '{"again": 3}', '{"cuts": null}', '{"cuts": {"marks": 3}}'):
        assert CutState.restored(text, {I: 3}) == CutState({I: 3})
