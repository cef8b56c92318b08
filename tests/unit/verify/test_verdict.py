"""The judge on forged histories of one or two keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.verify.verdict import MAX_FINDINGS, Delivery, Finding, Kind, Verdict, judge


def of(*seqs: int, key: str = "a") -> list[tuple[str, int]]:
    return [(key, seq) for seq in seqs]


def counts(verdict: Verdict) -> dict[str, int]:
    names = ("delivered", "lost", "duplicates", "order_violations", "quarantined", "unexpected", "pending", "scattered")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param(of(1, 2, 3, 4), {"delivered": 4}, id="perfect"),
        pytest.param(of(), {"lost": 4}, id="nothing arrived"),
        pytest.param(of(1, 2, 4), {"delivered": 3, "lost": 1}, id="one lost in the middle"),
        pytest.param(of(1, 2, 3), {"delivered": 3, "lost": 1}, id="the last one lost"),
        pytest.param(of(2, 3, 4), {"delivered": 3, "lost": 1}, id="the first one lost"),
        pytest.param(of(1, 3, 2, 4), {"delivered": 4, "order_violations": 1}, id="a swapped pair"),
        pytest.param(of(2, 3, 4, 1), {"delivered": 4, "order_violations": 1}, id="one far too late"),
        pytest.param(of(4, 3, 2, 1), {"delivered": 4, "order_violations": 3}, id="backwards"),
        pytest.param(of(1, 2, 2, 3, 4), {"delivered": 4, "duplicates": 1}, id="an adjacent repeat"),
        pytest.param(of(1, 1, 1, 2, 3, 4), {"delivered": 4, "duplicates": 2}, id="two adjacent repeats"),
        pytest.param(
            of(1, 2, 1, 3, 4), {"delivered": 4, "duplicates": 1, "order_violations": 1}, id="a repeat after a successor"
        ),
        pytest.param(
            of(1, 2, 1, 2, 3, 4),
            {"delivered": 4, "duplicates": 2, "order_violations": 1},
            id="a whole batch again: only what comes after a successor is out of order",
        ),
        pytest.param(of(1, 2, 4, 4), {"delivered": 3, "lost": 1, "duplicates": 1}, id="lost and repeated"),
        pytest.param(
            of(1, 3, 2, 2, 4), {"delivered": 4, "duplicates": 1, "order_violations": 2}, id="late, and repeated late"
        ),
        pytest.param(of(1, 2, 3, 4, 5), {"delivered": 4, "unexpected": 1}, id="a number never committed"),
        pytest.param(of(0, 1, 2, 3, 4), {"delivered": 4, "unexpected": 1}, id="zero is no number"),
        pytest.param(of(1, 2, 3, 10**15, 4), {"delivered": 4, "unexpected": 1}, id="an absurd number costs nothing"),
        pytest.param(
            [*of(1, 2, 3, 4), ("stranger", 1)], {"delivered": 4, "unexpected": 1}, id="a key that was never pumped"
        ),
    ],
)
def test_one_key_with_four_records(log: list[tuple[str, int]], expected: dict[str, int]) -> None:
    verdict = judge({"a": 4}, log)

    assert counts(verdict) == expected
    assert verdict.inserted == 4
    assert verdict.holds == (not expected.keys() & {"lost", "order_violations", "unexpected"})


def test_keys_do_not_see_each_other() -> None:
    log = [("a", 1), ("b", 1), ("b", 2), ("a", 2)]

    assert counts(judge({"a": 2, "b": 2}, log)) == {"delivered": 4}


def test_a_quarantined_record_is_not_lost_and_leaves_no_gap() -> None:
    verdict = judge({"a": 3}, of(1, 3), {"a": {2}})

    assert counts(verdict) == {"delivered": 2, "quarantined": 1}
    assert verdict.holds


def test_a_record_in_quarantine_and_in_the_log_counts_in_both() -> None:
    verdict = judge({"a": 2}, of(1, 2), {"a": {2}})

    assert counts(verdict) == {"delivered": 2, "quarantined": 1}


def test_quarantine_may_hold_only_what_was_committed() -> None:
    verdict = judge({"a": 2}, of(1, 2), {"a": {3}, "b": {1}})

    assert counts(verdict) == {"delivered": 2, "unexpected": 2}
    assert not verdict.holds


def test_what_waits_in_the_outbox_is_pending_not_lost() -> None:
    verdict = judge({"a": 5}, of(1, 2), pending={"a": {2, 3, 5}})

    # 2 was delivered and is not purged yet; 4 is nowhere.
    assert counts(verdict) == {"delivered": 2, "lost": 1, "pending": 2}
    assert not verdict.final


def test_records_committed_while_the_log_was_read_are_known_but_not_asked_for() -> None:
    verdict = judge({"a": 2}, of(1, 2, 3, 5, 6), known={"a": 5})

    assert verdict.inserted == 2
    assert counts(verdict) == {"delivered": 2, "unexpected": 1}


def test_their_order_is_judged_nevertheless() -> None:
    verdict = judge({"a": 2}, of(1, 2, 4, 3), known={"a": 4})

    assert counts(verdict) == {"delivered": 2, "order_violations": 1}


def test_foreign_records_and_scattered_keys_break_the_verdict() -> None:
    assert not judge({"a": 1}, of(1), foreign=2).holds
    assert judge({"a": 1}, of(1), foreign=2).unexpected == 2
    assert not judge({"a": 1}, of(1), scattered=["a"]).holds


def test_findings_name_the_records() -> None:
    verdict = judge({"a": 4, "b": 1}, [*of(1, 3, 2, 1, 3), ("c", 7)], scattered=["b"])

    assert set(verdict.findings) == {
        Finding(Kind.LATE, "a", 2, after=3),
        Finding(Kind.LATE_REPEAT, "a", 1, after=3),
        Finding(Kind.REPEAT, "a", 3),
        Finding(Kind.LOST, "a", 4),
        Finding(Kind.LOST, "b", 1),
        Finding(Kind.UNEXPECTED, "c", 7),
        Finding(Kind.SCATTERED, "b"),
    }
    assert str(Finding(Kind.LATE, "a", 2, after=3)) == "a #2: delivered after a successor (#3)"
    assert str(Finding(Kind.SCATTERED, "b")) == "b: in more than one partition"


def test_findings_are_few_however_much_is_wrong() -> None:
    verdict = judge({"a": 1000}, of(*range(1000, 500, -1)))

    kinds = [finding.kind for finding in verdict.findings]
    assert kinds.count(Kind.LOST) == MAX_FINDINGS
    assert kinds.count(Kind.LATE) == MAX_FINDINGS
    assert [finding.seq for finding in verdict.findings if finding.kind is Kind.LOST] == [*range(1, 11)]


KEYS = ("a", "b", "c")
keys = st.sampled_from(KEYS)
committed_counts = st.dictionaries(keys, st.integers(0, 8))
deliveries = st.lists(st.tuples(keys, st.integers(-1, 10)), max_size=40)
standing = st.dictionaries(keys, st.frozensets(st.integers(0, 10)))


def oracle(
    committed: dict[str, int],
    log: list[Delivery],
    quarantined: dict[str, frozenset[int]],
    pending: dict[str, frozenset[int]],
    more: dict[str, int],
) -> dict[str, int]:
    """The definitions word for word, in quadratic time."""
    known = {(key, seq) for key in KEYS for seq in range(1, committed.get(key, 0) + more.get(key, 0) + 1)}
    inserted = {(key, seq) for key, count in committed.items() for seq in range(1, count + 1)}
    good = [record for record in log if record in known]
    first = {record: good.index(record) for record in good}
    repeats = [index for index, record in enumerate(good) if first[record] != index]
    after_successor = [
        index for index, (key, seq) in enumerate(good) if any(k == key and s > seq for k, s in good[:index])
    ]
    aside = {(key, seq) for key, seqs in quarantined.items() for seq in seqs}
    waiting = {(key, seq) for key, seqs in pending.items() for seq in seqs}
    missing = inserted - set(good) - aside
    return {
        "inserted": len(inserted),
        "delivered": len(inserted & set(good)),
        "lost": len(missing - waiting),
        "pending": len(missing & waiting),
        "duplicates": len(repeats),
        "order_violations": len(after_successor),
        "quarantined": len(aside & known),
        "unexpected": len(log) - len(good) + len(aside - known),
    }


@given(committed_counts, deliveries, standing, standing, committed_counts)
def test_the_judge_agrees_with_the_oracle(
    committed: dict[str, int],
    log: list[Delivery],
    quarantined: dict[str, frozenset[int]],
    pending: dict[str, frozenset[int]],
    more: dict[str, int],
) -> None:
    known = {key: committed.get(key, 0) + more.get(key, 0) for key in KEYS}

    verdict = judge(committed, log, quarantined, pending=pending, known=known)

    expected = oracle(committed, log, quarantined, pending, more)
    assert {name: getattr(verdict, name) for name in expected} == expected


@given(committed_counts, st.randoms(use_true_random=False))
def test_any_interleaving_of_keys_in_order_is_perfect(committed: dict[str, int], random: object) -> None:
    log: list[Delivery] = []
    next_seq = dict.fromkeys(committed, 1)
    open_keys = [key for key, count in committed.items() if count]
    while open_keys:
        key = random.choice(open_keys)  # type: ignore[attr-defined]
        log.append((key, next_seq[key]))
        next_seq[key] += 1
        if next_seq[key] > committed[key]:
            open_keys.remove(key)

    verdict = judge(committed, log)

    assert verdict.holds
    assert verdict.delivered == verdict.inserted == sum(committed.values())
    assert verdict.duplicates == 0
    assert verdict.findings == ()


@given(committed_counts, deliveries)
def test_the_order_among_keys_does_not_matter(committed: dict[str, int], log: list[Delivery]) -> None:
    by_key = sorted(log, key=lambda delivery: delivery[0])

    one, other = judge(committed, log), judge(committed, by_key)

    names = ("delivered", "lost", "duplicates", "order_violations", "unexpected")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
