"""The judge of histories can fail: each forged break is found out and named, a clean history passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign.relay import forging, logs
from tests.campaign.relay.history import Committed, Delivered, Fault, History, Led, Limits, Removed, Stuck
from tests.campaign.relay.judge import judge
from tests.campaign.relay.setup import AT_LEAST_ONCE, BOTH, EXACTLY_ONCE

Mutation = Callable[[History, random.Random], History]
seeds = st.integers(0, 2**32 - 1)
unhurried = settings(deadline=None, max_examples=40)


def names(history: History) -> set[str]:
    return {violation.invariant for violation in judge(history).violations}


# -- from chance


@unhurried
@given(seeds)
def test_a_legal_history_passes(seed: int) -> None:
    history = forging.legal(random.Random(seed))
    judgement = judge(history)
    assert judgement.sentence == "held"
    assert (judgement.committed, judgement.delivered, judgement.quarantined) == (60, 59, 1)
    assert judgement.repeats == len(history.delivered) - 59 == sum(judgement.repeats_by.values())


@pytest.mark.parametrize("mutation", forging.MUTATIONS, ids=lambda mutation: mutation.__name__)
@unhurried
@given(seed=seeds)
def test_a_mutation_is_found(mutation: Mutation, seed: int) -> None:
    rng = random.Random(seed)
    history = mutation(forging.legal(rng), rng)
    assert forging.MUTATIONS[mutation] in names(history)
    assert judge(history).sentence.startswith("broken: ")


@unhurried
@given(seed=seeds, delivery=st.sampled_from([EXACTLY_ONCE, BOTH]))
def test_a_legal_history_with_transactions_passes(seed: int, delivery: str) -> None:
    judgement = judge(forging.legal(random.Random(seed), delivery=delivery))
    assert judgement.sentence == "held"
    assert (judgement.committed, judgement.delivered, judgement.quarantined) == (60, 59, 1)
    assert delivery == BOTH or judgement.repeats == 0


@pytest.mark.parametrize("mutation", forging.ONCE_MUTATIONS, ids=lambda mutation: mutation.__name__)
@unhurried
@given(seed=seeds, delivery=st.sampled_from([EXACTLY_ONCE, BOTH]))
def test_a_mutation_is_found_where_leaders_deliver_exactly_once(mutation: Mutation, seed: int, delivery: str) -> None:
    rng = random.Random(seed)
    history = mutation(forging.legal(rng, delivery=delivery), rng)
    assert forging.ONCE_MUTATIONS[mutation] in names(history)
    assert judge(history).sentence.startswith("broken: ")


@unhurried
@given(seeds)
def test_what_at_least_once_may_repeat_exactly_once_may_not(seed: int) -> None:
    history = forging.legal(random.Random(seed))
    judgement = judge(replace(history, delivery=EXACTLY_ONCE))
    assert judgement.repeats == judge(history).repeats
    assert judgement.held == (judgement.repeats == 0)


# -- by hand: one line a record, so that a reader sees what is meant


def history(*log: tuple[str, int], **given: object) -> History:
    """A log of (key, number), each delivered a second after its commit and purged half a second later."""
    committed = {record: 1000.0 + index * 10 for index, record in enumerate(dict.fromkeys(log))}
    made = History(
        committed=[Committed(key, seq, at, round(at * 1e6)) for (key, seq), at in committed.items()],
        delivered=[
            Delivered(key, seq, "topic", 0, offset, 1001.0 + offset * 10, round(committed[key, seq] * 1e6))
            for offset, (key, seq) in enumerate(log)
        ],
        removed=[Removed(key, seq, at + 100.0) for (key, seq), at in committed.items()],
        limits=Limits(heartbeat_timeout_s=2.0, cap=1, recovery_s=5.0, flow_s=3.0),
    )
    return replace(made, **given)  # type: ignore[arg-type]


def said(checked: History) -> list[str]:
    return [str(violation) for violation in judge(checked).violations]


def test_a_clean_history_passes() -> None:
    assert judge(history(("a", 1), ("b", 1), ("a", 2))).sentence == "held"
    assert judge(history()).sentence == "held"


def test_a_lost_row_is_named() -> None:
    clean = history(("a", 1), ("a", 2), ("b", 1))
    checked = replace(clean, delivered=clean.delivered[1:])
    assert "I1 a #1: lost" in said(checked)
    assert "I5 a #1 was purged and never delivered" in said(checked)
    assert judge(checked).lost == 1


def test_a_swapped_pair_is_named() -> None:
    clean = history(("a", 1), ("a", 2), ("a", 3))
    one, two, three = clean.delivered
    (text,) = said(replace(clean, delivered=[one, three, two]))
    assert text.startswith("I2 a #2: delivered after a successor (#3): ")


def test_a_late_repeat_is_named_even_where_a_fault_explains_the_repeat() -> None:
    explained = (Fault("kill supervisor", "h1", 1005.0, 1030.0, repeats=True),)
    late = history(("a", 1), ("a", 2), ("a", 1), faults=explained)
    first, second, again = late.delivered
    late = replace(late, delivered=[replace(first, term=1), replace(second, term=2), replace(again, term=1)])
    assert said(late) == [
        "I2 a #1: repeated after a successor (#2): "
        f"#1 at {first.at:.3f} under term 1, #2 at {second.at:.3f} under term 2, #1 at {again.at:.3f} under term 1"
    ]
    assert said(history(("a", 1), ("a", 1), ("a", 2), faults=explained)) == []


def thawed(*log: tuple[str, int], late: int, **given: object) -> History:
    """Each #1 comes under term 1, each #2 under term 2; the last `late` ones as the leader of term 1 thaws."""
    made = history(*log, **given)
    kept = len(log) - late
    again_at = made.delivered[kept].at
    delivered = [replace(each, term=1 if each.seq == 1 else 2) for each in made.delivered[:kept]]
    delivered += [replace(each, term=1, at=again_at) for each in made.delivered[kept:]]
    frozen = ((1001.5, again_at - 0.01),)
    return replace(made, delivered=delivered, led=[Led("h1", "id-1", 1, 1000.0, again_at + 1.0, frozen)])


def test_what_a_thawed_leader_still_writes_is_counted_apart() -> None:
    late = thawed(("a", 1), ("a", 2), ("a", 1), late=1)
    judgement = judge(late)
    assert (judgement.sentence, judgement.late_of_thawed) == ("held", 1)
    assert (judgement.order_violations, judgement.repeats) == (0, 0)


def test_a_late_record_is_not_excused_without_all_that_the_limit_needs() -> None:
    late = thawed(("a", 1), ("a", 2), ("a", 1), late=1)
    (led,) = late.led
    (brief,) = (((again - 1.0, again),) for _, again in led.frozen)
    (early,) = (((frozen, again - 2.0),) for frozen, again in led.frozen)
    first, second, again = late.delivered
    for other in (
        replace(late, led=[replace(led, frozen=())]),
        replace(late, led=[replace(led, frozen=brief)]),
        replace(late, led=[replace(led, frozen=early)]),
        replace(late, led=[replace(led, term=3)]),
        replace(late, delivered=[first, replace(second, term=1), again]),
        replace(late, delivery=EXACTLY_ONCE),
    ):
        assert "I2" in names(other)


def test_a_thawed_leader_that_sends_its_queue_is_not_excused() -> None:
    keys = ("a", "b", "c")
    log = [*((key, 1) for key in keys), *((key, 2) for key in keys), *((key, 1) for key in keys)]
    assert judge(thawed(*log[:2], *log[3:5], *log[6:8], late=2)).held
    late = thawed(*log, late=3)
    assert judge(late).late_of_thawed == 0
    assert judge(late).order_violations == 3


def test_a_first_delivery_after_a_thaw_is_not_excused() -> None:
    swapped = thawed(("a", 1), ("a", 2), ("a", 1), late=1)
    first_is_late = replace(swapped, delivered=swapped.delivered[1:])
    assert "I2" in names(first_is_late)


def test_a_double_leader_is_named() -> None:
    old, new = Led("h1", "x", 1, 1000.0, 1010.0), Led("h2", "y", 2, 1005.0, 1020.0)
    assert said(history(led=[old, new])) == ["I4 h2 led under term 2 5.000 s before h1 ceased to under term 1"]
    assert said(history(led=[old, replace(new, began=1010.0)])) == []


def test_a_frozen_leader_has_ceased_to_lead_when_its_trust_is_over() -> None:
    old, new = Led("h1", "x", 1, 1000.0, 1012.0, frozen=((1002.0, 1011.0),)), Led("h2", "y", 2, 1009.0, 1020.0)
    assert said(history(led=[old, new])) == []
    brief = replace(old, frozen=((1002.0, 1003.0),))
    assert said(history(led=[brief, new])) == ["I4 h2 led under term 2 3.000 s before h1 ceased to under term 1"]


def test_a_purge_before_its_acknowledgement_is_named() -> None:
    clean = history(("a", 1))
    assert said(replace(clean, removed=[Removed("a", 1, 1000.5)])) == [
        "I5 a #1 was purged 0.500 s before it was in the log"
    ]
    assert said(replace(clean, removed=[Removed("a", 1, 1001.0)])) == []


def test_a_repeat_is_counted_and_needs_a_reason_between_its_deliveries() -> None:
    repeated = history(("a", 1), ("a", 1), ("b", 1))  # delivered at 1001 and 1011
    assert said(repeated) == ["I8 a #1 at topic[0]@1 came again after 10.000 s, and no fault explains it"]
    crash = Fault("kill shard", "1 of h1", 1005.0, 1005.0, repeats=True)
    explained = judge(replace(repeated, faults=[crash]))
    assert (explained.sentence, explained.repeats, explained.repeats_by) == ("held", 1, {"kill shard": 1})
    planned = replace(crash, kind="leave", repeats=False)
    too_late, too_early = replace(crash, began=1012.0), replace(crash, began=900.0, ended=995.0)
    for wrong in (planned, too_late, too_early):
        assert names(replace(repeated, faults=[wrong])) == {"I8"}


def test_a_fault_explains_repeats_of_what_its_own_process_sent_while_it_led() -> None:
    repeated = history(("a", 1), ("a", 1), ("b", 1))  # delivered at 1001 and 1011
    crash = Fault("kill supervisor", "h1-1", 1005.0, 1005.0, repeats=True, names=frozenset({"h1-1"}))
    leader, standby = Led("h1-1", "x", 1, 1000.0, 1005.0), Led("h2-1", "y", 2, 1008.0, 1020.0)
    assert said(replace(repeated, faults=[crash], led=[leader, standby])) == []
    for innocent in (
        [replace(leader, name="h2-1"), replace(standby, name="h3-1")],  # a standby was killed
        [replace(leader, ended=994.0), standby],  # what it sent long before is settled
    ):
        assert names(replace(repeated, faults=[crash], led=innocent)) == {"I8"}


def test_a_truncated_row_need_not_be_delivered() -> None:
    whole = history(("a", 1), ("b", 1), ("a", 2))
    truncated = replace(whole, delivered=whole.delivered[1:], removed=whole.removed[1:])
    assert "I1 a #1: lost" in said(truncated)
    assert said(replace(truncated, truncated=[("a", 1)])) == []
    assert said(replace(whole, truncated=[("a", 1)])) == []  # it was on the wire


def test_a_record_of_an_undone_row_does_not_stand_for_the_row_that_got_its_number() -> None:
    whole = history(("a", 1), ("b", 1))
    undone = replace(whole.delivered[0], stamp=whole.delivered[0].stamp - 5)
    again = replace(whole.delivered[0], offset=7, at=1100.0)
    published = "I1 a #1 at topic[0]@0: a row was published whose transaction failed, or was undone by a crash"
    checked = said(replace(whole, delivered=[undone, whole.delivered[1]]))
    assert {"I1 a #1: lost", published, "I5 a #1 was purged and never delivered"} <= set(checked)
    late = replace(whole, delivered=[undone, whole.delivered[1], again], removed=whole.removed[1:])
    assert said(late) == [published]


def test_the_order_of_a_key_is_judged_across_topics() -> None:
    clean = history(("a", 1), ("a", 2), ("a", 3))
    spread = [replace(each, topic=f"topic-{each.seq % 2}", offset=0) for each in clean.delivered]
    assert said(replace(clean, delivered=[spread[1], spread[0], spread[2]])) == []  # topics are read one by one
    overtaken = [spread[0], replace(spread[1], at=spread[2].at + 1.0), spread[2]]
    (text,) = said(replace(clean, delivered=overtaken))
    assert text.startswith("I2 a #2: delivered after a successor (#3): ")
    # A transaction's records have no order by the clock; that of each topic is judged all the same.
    assert said(replace(clean, delivered=overtaken, delivery=EXACTLY_ONCE)) == []
    # But no transaction lasts that long.
    long_after = [spread[0], replace(spread[1], at=spread[2].at + clean.limits.unclear_s + 0.5), spread[2]]
    (text,) = said(replace(clean, delivered=long_after, delivery=EXACTLY_ONCE))
    assert text.startswith("I2 a #2 at topic-0[0]@0 was appended 5.500 s after #3 in topic-1")
    swapped = [spread[2], spread[1], replace(spread[0], offset=1)]
    assert names(replace(clean, delivered=swapped, delivery=EXACTLY_ONCE)) == {"I2"}
    scattered = [spread[0], spread[1], replace(spread[2], partition=1)]
    assert said(replace(clean, delivered=scattered)) == ["I2 a: in more than one partition"]


def test_a_standby_that_is_replaced_unseats_nobody() -> None:
    replaced = Fault("replace standby", "h2-1", 1005.0, 1005.5, repeats=False)
    fenced = Fault("fenced", "h1-1", 1008.0, 1008.0, repeats=True, names=frozenset({"h1-1"}))
    clean = history(("a", 1))
    assert said(replace(clean, faults=[replaced, fenced])) == ["I4 h1-1 was fenced when the standby h2-1 was replaced"]
    assert said(replace(clean, faults=[replaced])) == []
    outage = Fault("stop kafka", "kafka", 1004.0, 1006.0, repeats=True)
    assert said(replace(clean, faults=[outage, replaced, fenced])) == []
    assert said(replace(clean, faults=[replaced, replace(fenced, began=1030.0, ended=1030.0)])) == []


def test_repeats_are_bounded_by_what_can_be_in_flight() -> None:
    crash = Fault("kill supervisor", "h1", 1015.0, 1015.0, repeats=True)
    log = (("a", 1), ("b", 1), ("c", 1), ("a", 1), ("b", 1))
    repeats = history(*log, faults=[crash], limits=Limits(cap=2, recovery_s=5.0))
    assert names(repeats) == set()
    assert said(replace(repeats, limits=Limits(cap=1, recovery_s=5.0))) == [
        "I8 2 repeats because of kill supervisor of h1"
    ]
    lost = [Led("h1", "x", 1, 900.0, 1016.0)]
    assert names(replace(repeats, limits=Limits(cap=1, recovery_s=5.0), led=lost)) == set()
    one_key = history(("a", 1), ("a", 2), ("a", 1), ("a", 2), faults=[crash], limits=Limits(cap=1000, recovery_s=5.0))
    assert "I8 2 repeats because of kill supervisor of h1" in said(one_key)


def test_a_repeat_of_what_was_sent_exactly_once_has_no_excuse() -> None:
    crash = Fault("kill supervisor", "h1", 1005.0, 1005.0, repeats=True)
    repeated = history(("a", 1), ("a", 1), faults=[crash])  # delivered at 1001 and 1011
    assert said(repeated) == []
    assert said(replace(repeated, delivery=EXACTLY_ONCE)) == [
        "I6 a #1 at topic[0]@1 came again after 10.000 s, although it was sent exactly once"
    ]


def test_who_led_at_the_first_delivery_decides_about_a_repeat() -> None:
    crash = Fault("kill supervisor", "h1", 1005.0, 1005.0, repeats=True)
    one, other = Led("h1", "x", 1, 1000.0, 1005.0), Led("h2", "y", 2, 1007.0, 1020.0, delivery=EXACTLY_ONCE)
    repeated = history(("a", 1), ("a", 1), faults=[crash], led=[one, other], delivery=BOTH)
    assert judge(repeated).repeats_by == {"kill supervisor": 1}
    assert said(repeated) == []
    turned = [replace(one, delivery=EXACTLY_ONCE), replace(other, delivery=AT_LEAST_ONCE)]
    assert names(replace(repeated, led=turned)) == {"I6"}
    assert names(replace(repeated, faults=[])) == {"I8"}


def test_a_stuck_key_may_not_stop_others() -> None:
    slow = history(("a", 1), ("b", 1), stuck=[Stuck("a", 1005.0, 1020.0)])
    late = replace(slow, delivered=[slow.delivered[0], replace(slow.delivered[1], at=1014.0)])
    assert said(slow) == []
    assert said(late) == ["I7 1 records of other keys, b #1 first, waited for a"]
    assert said(replace(late, stuck=[Stuck("b", 1005.0, 1020.0)])) == []
    outage = Fault("stop kafka", "kafka", 1009.0, 1012.0, repeats=True)
    assert said(replace(late, faults=[outage])) == []


def test_accidents_and_strangers_break_a_history() -> None:
    assert said(history(accidents=["h1 ended by itself"])) == ["accident h1 ended by itself"]
    assert said(history(foreign=["topic[0]@3: b'?'"])) == ["I1 topic[0]@3: b'?': nobody wrote that"]


# -- logs


def line(at: str, message: str, level: str = "info") -> str:
    return f'{{"at": "2025-01-01T00:00:{at}Z", "level": "{level}", "name": "h1", "message": "{message}"}}'


START = 1735689600.0


def test_leaderships_are_read_from_logs() -> None:
    log = [
        "starting",
        line("01.000", "leads as x under term 1"),
        line("02.500", "fenced: no heartbeat came back"),
        line("05.000", "leads as y under term 3"),
        line("07.000", "leads as z under term 4"),
        line("08.000", "marks again as w under term 4: a shard died"),
        '{"at": "2025-01-01T00:0',
    ]
    assert list(logs.leaderships("h1", log, START + 9.0, [(START + 5.5, START + 6.0)])) == [
        Led("h1", "x", 1, START + 1.0, START + 2.5),
        Led("h1", "y", 3, START + 5.0, START + 7.0, ((START + 5.5, START + 6.0),)),
        Led("h1", "z", 4, START + 7.0, START + 9.0),
    ]
    assert logs.is_leading(log) == 4
    assert logs.is_leading([*log, line("09.000", "leadership is revoked")]) is None


def test_losses_are_read_from_logs() -> None:
    log = [
        line("02.500", "fenced: late"),
        line("03.000", "ended unexpectedly (exit code -9)", "error"),
        line("04.000", "stopped"),
    ]
    assert [(loss.kind, loss.began - START) for loss in logs.losses("h1", log)] == [
        ("fenced", 2.5),
        ("shard lost", 3.0),
    ]
    assert logs.last_error(log) == "ended unexpectedly (exit code -9)"


def test_deliveries_that_time_out_are_a_loss_until_it_is_over() -> None:
    late = "record 7 failed (attempts 0) and will be retried: _MSG_TIMED_OUT: Local: Message timed out"
    over = "records that failed: recovered after 3 s (9 reports)"
    log = [
        line("01.000", over),
        line("02.000", late),
        line("05.000", over),
        line("06.000", late),
        line("08.000", "stops"),
    ]
    assert [(loss.kind, loss.began - START, loss.ended - START) for loss in logs.losses("h1", log)] == [
        ("delivery timed out", 2.0, 2.0),
        ("delivery timed out", 2.0, 5.0),
        ("delivery timed out", 6.0, 6.0),
        ("delivery timed out", 6.0, 8.0),
    ]


def test_a_thread_that_failed_is_read_from_logs() -> None:
    log = [
        line("01.000", "ends: _FATAL: the producer is of no use", "error"),  # what a producer's own end is called
        line("02.000", "ends: the transactor failed: KeyError(1)", "error"),
    ]
    assert list(logs.failures("h1", log)) == ["h1: a shard ends: the transactor failed: KeyError(1)"]
