"""The plan of a load: limits and named examples; test_load_properties has the rest."""

from __future__ import annotations

from collections import Counter

import pytest

from harvester.errors import ConfigurationError
from harvester.verify.load import MIN_VALUE_BYTES, Ending, Load, due_s, plan


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
