"""The judge against an oracle that looks at every pair of records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.verify.verdict import Delivery, judge

KEYS = ("a", "b", "c")
keys = st.sampled_from(KEYS)
counts = st.dictionaries(keys, st.integers(0, 8))
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


@given(counts, deliveries, standing, standing, counts)
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


@given(counts, st.randoms(use_true_random=False))
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


@given(counts, deliveries)
def test_the_order_among_keys_does_not_matter(committed: dict[str, int], log: list[Delivery]) -> None:
    by_key = sorted(log, key=lambda delivery: delivery[0])

    one, other = judge(committed, log), judge(committed, by_key)

    names = ("delivered", "lost", "duplicates", "order_violations", "unexpected")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
