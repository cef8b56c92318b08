"""Consumers that come, leave and die at any time: few places move, and soon everybody has a share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.coordination.core.fair_share import Roster, Shedding
from tests.support.coordination import INTERVAL_S, Broken, Sim

STEP_S = 0.1
# what happens, to whom, and the pause after it in tenths of an interval
CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "join", "leave", "kill"]), st.integers(0, 99), st.integers(1, 40)), max_size=4
)


def come_and_go(places: int, changes: list[tuple[str, int, int]], shed_at_once: int | None = None) -> Sim:
    """Let it happen; whoever joins may cause as many moves as its share, whoever goes as many as it held."""
    sim = Sim(actors=2, places=places, shed_at_once=shed_at_once)
    sim.settle(3 * INTERVAL_S, step_s=STEP_S)
    allowed = places
    if sim.claims_won != allowed:
        raise Broken(f"{sim.claims_won} claims for {places} places at the start")
    for what, which, pause in changes:
        actor = sim.actors[which % len(sim.actors)]
        if what == "join":
            sim.actors.append(sim.born(len(sim.actors)))
            allowed += -(-places // len(sim.actors))
        elif len(sim.actors) > 1:
            sim.actors.remove(actor)
            allowed += len(actor.coordinator.holds)
            if what == "leave":
                sim.perform(actor, actor.coordinator.close(sim.local(actor)))
                sim.turn(actor)
        sim.settle(pause / 10 * INTERVAL_S, step_s=STEP_S)
        if sim.claims_won > allowed:
            raise Broken(f"{sim.claims_won} claims were won for {allowed} places that had to move")
    sim.settle(6 * INTERVAL_S, step_s=STEP_S)  # as those that died are present for a while, too
    if sim.claims_won > allowed:
        raise Broken(f"{sim.claims_won} claims were won for {allowed} places that had to move")
    held = sorted(sim.held().values())
    if sum(held) != places or held[-1] - held[0] > 1:
        raise Broken(f"shares of {places} places: {held}")
    return sim


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 10), CHANGES)
def test_no_more_moves_than_have_to_and_everybody_has_a_share(places: int, changes: list[tuple[str, int, int]]) -> None:
    come_and_go(places, changes)


Patch = pytest.MonkeyPatch


def _shed_without_end(patch: Patch) -> None:
    """Whoever has more than the lowest gives all, whoever asks."""
    patch.setattr(Shedding, "due", lambda self, has_to_give, now: True)
    patch.setattr(Roster, "moves", lambda self: dict(self.counts))


def _claims_at_once_after_shedding(patch: Patch) -> None:
    patch.setattr(Shedding, "may_claim", lambda self, now: True)
    patch.setattr(Roster, "may_claim", lambda self, mine: True)


def _nobody_sheds(patch: Patch) -> None:
    patch.setattr(Shedding, "due", lambda self, has_to_give, now: False)


@pytest.mark.parametrize("mutation", [_shed_without_end, _claims_at_once_after_shedding, _nobody_sheds])
def test_the_judges_notice(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    with pytest.raises(Broken):
        come_and_go(12, [("join", 0, 30), ("join", 0, 30), ("join", 0, 30)])
