"""Loads: the plan, its limits, and the form of the records; any plan has exactly the records that were asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import ConfigurationError
from harvester.verify.load import (
    COMMITTED,
    LATE,
    MIN_VALUE_BYTES,
    PREFIX_BYTES,
    ROLLED_BACK,
    Ending,
    Load,
    Pumped,
    due_s,
    key_name,
    parse,
    plan,
)


def test_a_seed_names_one_plan() -> None:
    load = Load(records=500, topics=("t",), late=0.2, rollbacks=0.2, rows_per_transaction=3, skew=1.0, seed=7)
    again = Load(records=500, topics=("t",), late=0.2, rollbacks=0.2, rows_per_transaction=3, skew=1.0, seed=8)

    assert list(plan(load)) == list(plan(load))
    assert list(plan(load)) != list(plan(again))


def test_rolled_back_records_come_on_top() -> None:
    load = Load(records=100, topics=("t",), rollbacks=0.5)

    endings = Counter(transaction.ending for transaction in plan(load))

    assert endings[Ending.COMMIT] == 100
    assert endings[Ending.ROLLBACK] > 50


def test_skew_prefers_the_first_keys() -> None:
    hits = Counter(key for t in plan(Load(records=5000, topics=("t",), keys=100, skew=1.2)) for key in t.keys)
    flat = Counter(key for t in plan(Load(records=5000, topics=("t",), keys=100)) for key in t.keys)

    assert hits[0] > 10 * hits[50]
    assert flat[0] < 3 * flat[50]


def test_under_a_rate_a_transaction_is_due_after_the_records_before_it() -> None:
    load = Load(records=10, topics=("t",), rows_per_transaction=5, rate_per_s=10.0)

    assert [due_s(load, transaction) for transaction in plan(load)] == [0.0, 0.5]
    assert due_s(Load(records=10, topics=("t",)), list(plan(load))[1]) == 0.0


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Load(records=-1, topics=(), keys=0, rate_per_s=0, value_bytes=MIN_VALUE_BYTES - 1, late=2, headers=-1)

    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"--records", "--topic", "--keys", "--rate", "--size", "--late", "--headers"}


@pytest.mark.parametrize("name", ["", "with space", ".", "..", "a" * 250, "ü"])
def test_names_that_kafka_refuses_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--topic"):
        Load(records=1, topics=("good", name))


def test_one_writer_cannot_be_overtaken() -> None:
    with pytest.raises(ConfigurationError, match="--writers"):
        Load(records=1, topics=("t",), writers=1, late=0.1)


loads = st.builds(
    Load,
    records=st.integers(0, 300),
    topics=st.just(("t",)),
    keys=st.integers(1, 50),
    rows_per_transaction=st.integers(1, 40),
    skew=st.floats(0, 3),
    late=st.floats(0, 0.5),
    rollbacks=st.floats(0, 0.5),
    seed=st.integers(0, 1000),
)


@given(loads)
def test_a_plan_has_its_records_and_nothing_beyond_its_bounds(load: Load) -> None:
    transactions = list(plan(load))

    committed = [t for t in transactions if t.ending is not Ending.ROLLBACK]
    assert sum(len(t.keys) for t in committed) == load.records
    assert all(1 <= len(t.keys) <= load.rows_per_transaction for t in transactions)
    assert all(0 <= key < load.keys for t in transactions for key in t.keys)
    before = 0
    for transaction in transactions:
        assert transaction.first == before
        if transaction.ending is not Ending.ROLLBACK:
            before += len(transaction.keys)
    if load.late == 0:
        assert not any(t.ending is Ending.LATE for t in transactions)
    if load.rollbacks == 0:
        assert len(committed) == len(transactions)


@given(st.integers(1, 10**18 - 1), st.integers(10**15, 10**16 - 1), st.sampled_from([COMMITTED, LATE, ROLLED_BACK]))
def test_a_value_of_the_smallest_size_can_be_parsed(seq: int, created_us: int, kind: str) -> None:
    value = f"{seq}:{created_us}:{kind}:".ljust(MIN_VALUE_BYTES, ".")[:MIN_VALUE_BYTES]

    assert parse(value.encode()) == Pumped(seq, created_us, kind)
    assert parse(value.encode() + b"." * 1000) == parse((value.encode() + b"." * 1000)[:PREFIX_BYTES])


@given(st.one_of(st.none(), st.binary(max_size=80), st.text(alphabet="019:clr.-", max_size=30).map(str.encode)))
def test_junk_is_never_an_error_and_never_a_record_without_its_three_fields(value: bytes | None) -> None:
    pumped = parse(value)

    assert pumped is None or (value is not None and value.count(b":") >= 3 and pumped.kind in "clr")


def test_a_value_says_number_time_and_kind() -> None:
    assert parse(b"12:1700000000000000:c:....") == Pumped(12, 1_700_000_000_000_000, "c")


@pytest.mark.parametrize(
    "value", [None, b"", b"1:2:c", b"1:2:x:", b":2:c:", b"1::c:", b"-1:2:c:", b"1:2.5:c:", b"a:2:c:"]
)
def test_anything_else_is_not_ours(value: bytes | None) -> None:
    assert parse(value) is None


def test_keys_are_numbered_from_zero() -> None:
    assert [key_name(0), key_name(123), key_name(1_234_567)] == ["k-000000", "k-000123", "k-1234567"]
