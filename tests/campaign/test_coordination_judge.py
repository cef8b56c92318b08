"""The campaign's judge: a forged history for everything that it has to find, and what it has to let pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.campaign.coordination.coverage import gaps, held, overlaps
from tests.campaign.coordination.history import Episode, History, Holding, Holds, Limits, Member, Processed, Span
from tests.campaign.coordination.judge import judge

LIMITS = Limits(interval_s=1.0)
_EPISODE = Episode("kill a", began=10.0, since=10.0, healed=10.5, until=30.0)


def member(
    name: str,
    *processed: tuple[float, int, int, int],
    holds: dict[float, dict[int, int]] | None = None,
    born: float = 0.0,
    ended: float = 100.0,
    frozen: tuple[Span, ...] = (),
    lost: frozenset[tuple[int, int]] = frozenset(),
) -> Member:
    """`processed`: time, partition, offset, generation; `holds`: claims from a time on."""
    changes = {0.0: {}} if holds is None else holds
    noted, held = [Processed(*each) for each in processed], [Holds(*each) for each in changes.items()]
    return Member(name, born, ended, noted, held, frozen, lost)


def history(*members: Member, at_most_once: bool = False, records: int | None = None) -> History:
    """Of one partition with so many records; by default those that were processed."""
    known = {(each.partition, each.offset) for each in (p for m in members for p in m.processed)}
    written = known if records is None else {(0, offset) for offset in range(records)}
    return History(at_most_once, 2, frozenset(written), members, LIMITS)


def sentence(found: History) -> str:
    return judge(found).sentence


# -- what was processed


def test_nothing_wrong() -> None:
    found = judge(history(member("a", (1.0, 0, 0, 5), (1.1, 0, 1, 5)), member("b", (9.0, 0, 2, 7))))
    assert (found.sentence, found.processed, found.repeats, found.never, found.generations) == ("held", 3, 0, 0, 2)


def test_a_record_that_nobody_processed() -> None:
    lost = history(member("a", (1.0, 0, 0, 5), (1.1, 0, 2, 5)), records=3)
    assert sentence(lost) == "broken: lost: 1 records, [0]@1"
    allowed = judge(replace(lost, at_most_once=True))
    assert (allowed.sentence, allowed.never) == ("held", 1)


def test_a_record_that_was_never_written() -> None:
    assert sentence(history(member("a", (1.0, 0, 9, 5)), records=0)) == (
        "broken: lost: [0]@9 was processed, and never written"
    )


def test_handlers_lose_what_they_had_in_hand_and_keep_the_order_of_a_key() -> None:
    keys = dict.fromkeys(((0, 0), (0, 2)), 1) | {(0, 1): 2}
    took = member("a", (1.0, 0, 0, 5), (1.1, 0, 1, 5), (1.2, 0, 2, 5))
    in_order = replace(took, done=((2.0, (0, 1)), (3.0, (0, 0)), (4.0, (0, 2))))
    assert sentence(replace(history(in_order), keys=keys)) == "held"
    again = member("b", (8.0, 0, 0, 7))
    repeated = replace(again, done=((9.0, (0, 0)),))
    assert sentence(replace(history(in_order, repeated), keys=keys)) == "held"
    passed = replace(took, done=((2.0, (0, 1)), (4.0, (0, 2))))
    assert sentence(replace(history(passed, repeated), keys=keys)) == (
        "broken: keys: [0]@2 was processed 5.000 s before [0]@0 of its key"
    )
    assert sentence(replace(history(passed, again), keys=keys)) == "broken: lost: 1 records, [0]@0"


def test_a_record_twice_at_most_once() -> None:
    twice = history(member("a", (1.0, 0, 0, 5)), member("b", (9.0, 0, 0, 7)), at_most_once=True)
    assert sentence(twice).startswith("broken: twice: [0]@0 by a under 5 and b under 7")
    assert sentence(replace(twice, at_most_once=False)) == "held"


def test_a_record_twice_under_one_generation() -> None:
    assert sentence(history(member("a", (1.0, 0, 0, 5), (2.0, 0, 0, 5)))) == (
        "broken: twice: [0]@0 under generation 5 alone"
    )


def test_repeats_of_one_interval_and_of_more() -> None:
    first = [(1.0 + offset / 10, 0, offset, 5) for offset in range(12)]
    again = [(9.0, 0, offset, 7) for offset in range(12)]
    found = judge(history(member("a", *first), member("b", *again)))
    assert (found.sentence, found.repeats, round(found.widest_repeat_s, 1)) == ("held", 12, 1.1)
    late = (3.0, 0, 12, 5)
    wide = history(member("a", *first, late), member("b", *again, (9.0, 0, 12, 7)))
    assert sentence(wide) == (
        "broken: repeats: 13 records of [0] under generation 5, by a, were handed out within 2.00 s and repeated"
    )
    frozen = history(member("a", *first, late, frozen=((2.05, 2.99),)), member("b", *again, (9.0, 0, 12, 7)))
    assert sentence(frozen) == "held"


def test_repeats_of_what_may_be_open_and_of_more() -> None:
    """One record is not committed, so all behind it is repeated."""
    first = [(1.0 + offset / 2, 0, offset, 5) for offset in range(12)]
    again = [(9.0, 0, offset, 7) for offset in range(12)]
    found = history(member("a", *first), member("b", *again))
    assert sentence(found).startswith("broken: repeats: 12 records of [0] under generation 5, by a")
    for most, expected in [(9, "held"), (8, "broken")]:
        assert sentence(replace(found, limits=replace(LIMITS, max_open_records=most))).startswith(expected)


# -- who held what


def test_at_most_once_an_old_holder_goes_on_after_its_successor_has_begun() -> None:
    old = member("a", (1.0, 0, 0, 5), (9.1, 0, 1, 5), (9.2, 0, 2, 5))
    new = member("b", (9.0, 0, 3, 7), (9.3, 0, 4, 7))
    assert sentence(history(old, new, at_most_once=True)) == (
        "broken: order: [0]@2 was handed out by a under generation 5, which it had given up, after generation 7 had"
        " begun (2 such)"
    )
    lost = replace(old, lost=frozenset({(0, 5)}))
    assert sentence(history(lost, new, at_most_once=True)) == "held"
    in_hand = member("a", (1.0, 0, 0, 5), (9.1, 0, 1, 5))
    assert sentence(history(in_hand, new, at_most_once=True)) == "held"


def test_a_record_under_a_generation_that_is_over() -> None:
    zombie = history(member("a", (1.0, 0, 0, 5), (9.1, 0, 1, 5)), member("b", (9.0, 0, 1, 7)))
    assert sentence(zombie) == (
        "broken: holders: [0]@1 was processed by a under generation 5 after generation 7 had begun"
    )
    one = member("a", (1.0, 0, 0, 5), (9.1, 0, 1, 5), frozen=((1.5, 9.05),))
    assert sentence(history(one, member("b", (9.0, 0, 1, 7)))) == "held"
    two = member("a", (1.0, 0, 0, 5), (9.1, 0, 1, 5), (9.11, 0, 2, 5), frozen=((1.5, 9.05),))
    assert "holders: [0]@2" in sentence(history(two, member("b", (9.0, 0, 1, 7), (9.3, 0, 2, 7))))


def test_at_most_once_generations_follow_the_offsets() -> None:
    late = member("a", (1.0, 0, 0, 5), (9.5, 0, 1, 5))  # what is ours stays ours
    assert sentence(history(late, member("b", (9.0, 0, 2, 7)), at_most_once=True)) == "held"
    back = history(member("a", (1.0, 0, 0, 5), (9.5, 0, 2, 5)), member("b", (9.0, 0, 1, 7)), at_most_once=True)
    assert "holders: [0]@2 was processed by a under generation 5" in sentence(back)


def test_two_who_believe_to_hold_at_once() -> None:
    one = member("a", holds={0.0: {0: 5}, 9.6: {}})
    other = member("b", holds={0.0: {}, 9.0: {0: 7}})
    assert sentence(history(one, other)) == "broken: holders: a and b both believed to hold [0] for 0.60 s"
    moment = member("a", holds={0.0: {0: 5}, 9.2: {}})
    assert sentence(history(moment, other)) == "held"
    frozen = member("a", holds={0.0: {0: 5}, 9.6: {}}, frozen=((2.0, 9.2),))
    assert sentence(history(frozen, other)) == "held"
    killed = member("a", holds={0.0: {0: 5}}, ended=8.0)
    assert sentence(history(killed, other)) == "held"


# -- how soon it was well again


def recovering(claimed_at: float, fair_at: float = 0.0, until: float = 30.0) -> History:
    """Of two partitions: a, which dies, has one, b the other, and then both until c gets one."""
    before = {0.0: {1: 1}, claimed_at: {0: 7, 1: 1}, fair_at or claimed_at + 0.1: {1: 1}}
    members = [
        member("a", holds={0.0: {0: 0}}, ended=10.0),
        member("b", holds=before),
        member("c", holds={(fair_at or claimed_at + 0.1) + 0.1: {0: 9}}, born=10.5),
    ]
    return replace(history(*members), episodes=[replace(_EPISODE, until=until)])


def test_how_soon_all_is_claimed_and_fair() -> None:
    [found] = judge(recovering(claimed_at=12.5, fair_at=14.0)).recoveries
    assert found.claimed_s == 2.5
    assert found.fair_s == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (recovering(claimed_at=14.5), "claimed: all partitions again after 4.50 s, not 4 s (kill a)"),
        (recovering(claimed_at=40.0), "claimed: all partitions again after never, not 4 s (kill a)"),
        (recovering(claimed_at=12.0, fair_at=15.5), "fair: shares after 3.60 s, not 3 s (kill a)"),
        (recovering(claimed_at=12.0, fair_at=40.0), "fair: shares never, not 3 s (kill a)"),
    ],
)
def test_too_late(found: History, said: str) -> None:
    assert sentence(found) == f"broken: {said}"


def test_an_accident() -> None:
    assert sentence(replace(history(), accidents=["c1-1 ended by itself"])) == (
        "broken: accident: c1-1 ended by itself"
    )


# -- parts


def test_holdings_leave_out_what_was_frozen() -> None:
    found = held([member("a", holds={1.0: {0: 5}, 2.0: {0: 5, 1: 6}, 8.0: {1: 6}}, frozen=((4.0, 6.0),), ended=9.0)])
    assert found[0] == [Holding(0, 1.0, 4.0, "a"), Holding(0, 6.0, 8.0, "a", resumed=True)]
    assert found[1] == [Holding(1, 2.0, 4.0, "a"), Holding(1, 6.0, 9.0, "a", resumed=True)]


def test_another_generation_is_another_holding() -> None:
    found = held([member("a", holds={1.0: {0: 5}, 2.0: {0: 6}}, ended=3.0)])
    assert found[0] == [Holding(0, 1.0, 2.0, "a"), Holding(0, 2.0, 3.0, "a")]


def test_gaps_and_overlaps() -> None:
    holdings = [Holding(0, 1.0, 3.0, "a"), Holding(0, 2.0, 4.0, "b"), Holding(0, 5.0, 6.0, "a")]
    assert list(gaps(holdings, 0.0, 8.0)) == [(0.0, 1.0), (4.0, 5.0), (6.0, 8.0)]
    assert list(gaps(holdings, 2.5, 5.5)) == [(4.0, 5.0)]
    assert [(both, one.by, other.by) for both, one, other in overlaps(holdings, 0.5)] == [(1.0, "a", "b")]
