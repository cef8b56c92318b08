"""Putting records back, against an oracle that publishes everything and looks at the sequence that comes out."""

from __future__ import annotations

from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from harvester.outbox.key_order import KeyNeighbours, obstacle


class Fate(Enum):
    """Where each record of one key stands, by id."""

    PUBLISHED = "published"
    WAITING = "waiting"
    CHOSEN = "chosen"
    LEFT = "left"


@given(st.lists(st.sampled_from(Fate), min_size=1, max_size=12))
def test_what_may_go_back_comes_out_in_order(fates: list[Fate]) -> None:
    by_fate = {fate: [i for i, found in enumerate(fates) if found is fate] for fate in Fate}
    published, waiting, chosen, left = (by_fate[fate] for fate in Fate)
    others = KeyNeighbours(
        last_waiting=(0, max(waiting)) if waiting else None,
        first_left=(0, min(left)) if left else None,
        last_published=(0, max(published)) if published else None,
        archive_reaches=True,
    )
    allowed = [i for i in chosen if obstacle((0, i), others) is None]
    # The oracle: what waits goes out before what is put back, what is left may follow at any later time.
    outcome = [*published, *waiting, *chosen]
    keeps = outcome == sorted(outcome) and not any(i > later for i in chosen for later in left)
    if chosen:
        assert (allowed == chosen) == (keeps or _only_others_are_wrong(published, waiting, chosen, left))


def _only_others_are_wrong(published: list[int], waiting: list[int], chosen: list[int], left: list[int]) -> bool:
    """Published and waiting records may be out of order among themselves; that is not the redrive's doing."""
    before = [*published, *waiting]
    return all(i > other for i in chosen for other in before) and not any(i > later for i in chosen for later in left)
