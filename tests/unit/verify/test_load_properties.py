"""Every plan, whatever its figures, has exactly the records that were asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harvester.verify.load import (
    COMMITTED,
    LATE,
    MIN_VALUE_BYTES,
    PREFIX_BYTES,
    ROLLED_BACK,
    Ending,
    Load,
    Pumped,
    parse,
    plan,
)

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
