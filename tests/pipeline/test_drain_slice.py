"""A drain's decisions: shares of the lease, sizes of slices, rows that can be no record."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester import origin
from harvester.errors import ConfigurationError
from harvester.pipeline.drain.slices import (
    DrainRules,
    Share,
    TopicLimits,
    check,
    fetch_records,
    is_doubtful,
    next_records,
    sink_options,
    times,
    why_poison,
)
from harvester.record import KafkaRecord

RULES = DrainRules({"harvester.neli": "reserved"}, origin.HEADER, origin.SIZE)
TOPIC = TopicLimits(4, 1000)


@given(seconds=st.floats(6, 86_400), delivery_ms=st.none() | st.integers(1, 90_000_000))
def test_what_is_sent_arrives_before_the_lease_ends(seconds: float, delivery_ms: int | None) -> None:
    try:
        found = times(timedelta(seconds=seconds), delivery_ms)
    except ConfigurationError:
        assert delivery_ms is not None
        return
    assert found.sending >= found.slice > 0
    assert found.sending + found.block + found.delivery + 1 <= found.lease + 1e-6
    assert found.deadline_ms(1e9) <= (1e9 + found.lease - found.block - found.delivery - 1) * 1000 + 1


def test_a_lease_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="too short"):
        times(timedelta(seconds=5.9))
    with pytest.raises(ConfigurationError, match="at most 8750"):
        times(timedelta(seconds=15), 12_000)  # 15 s: 3.75 s for a slice, 1.5 s for room, 1 s for clocks


def test_slices_come_to_take_their_time_and_grow_not_at_once() -> None:
    assert next_records(20_000, 1.0, 15.0, 500_000) == 80_000
    assert next_records(80_000, 2.0, 15.0, 500_000) == 320_000
    assert next_records(500_000, 10.0, 15.0, 500_000) == 500_000
    assert next_records(500_000, 30.0, 15.0, 500_000) == 250_000
    assert next_records(1, 60.0, 15.0, 500_000) == 1_000
    assert next_records(1, 0.0, 15.0, 100) == 100


def test_rows_that_are_asked_for_at_once_fit_in_memory() -> None:
    assert [fetch_records(size) for size in (0, 300, 1 << 20, 1 << 30)] == [5_000, 5_000, 8, 1]


@pytest.mark.parametrize(
    ("share", "topic", "doubtful"),
    [
        (Share("t", 1, 10, 10, None, (0, 0), False), TOPIC, False),
        (Share("t", 1, 10, 1000, (0, 3), (0, 0), False), TOPIC, False),
        (Share("t", 1, 10, 1001, None, (0, 0), False), TOPIC, True),
        (Share("t", 1, 10, 10, (-1, 3), (0, 0), False), TOPIC, True),
        (Share("t", 1, 10, 10, (0, 4), (0, 0), False), TOPIC, True),
        (Share("t", 1, 10, 10, None, (0, 0), True), TOPIC, True),
        (Share("t", 1, 10, 10, None, (0, 0), False), None, True),
        (Share(None, 1, 10, 10, None, (0, 0), False), None, True),
        (Share("harvester.neli", 1, 10, 10, None, (0, 0), False), TOPIC, True),
    ],
)
def test_shares_are_looked_at_where_a_row_may_be_no_record(
    share: Share, topic: TopicLimits | None, doubtful: bool
) -> None:
    assert is_doubtful(share, topic, RULES) is doubtful


def test_a_limit_of_the_relay_counts_as_well() -> None:
    record = KafkaRecord(1, None, "t", None, [], -1, 0)
    strict = DrainRules({}, origin.HEADER, origin.SIZE, own_limit=500)
    assert why_poison(record, 400, {"t": TOPIC}, RULES) is None
    assert str(why_poison(record, 400, {"t": TOPIC}, strict)).startswith("MSG_SIZE_TOO_LARGE")


def test_options_that_guard_the_order_cannot_be_set() -> None:
    for name in ("acks", "enable.idempotence", "retries", "transactional.id", "partitioner.class", "compression.type"):
        with pytest.raises(ConfigurationError, match="cannot be set"):
            check({name: "1"})
    with pytest.raises(ConfigurationError, match="1 to 5"):
        check({"max.in.flight.requests.per.connection": "6"})
    assert check({"delivery.timeout.ms": "4000", "linger.ms": "50"}) == 4000
    options = sink_options({"linger.ms": "50"}, times(timedelta(seconds=20)), (2_000, 5 << 20))
    assert options.items() >= {
        ("kafka.acks", "all"), ("kafka.enable.idempotence", "true"), ("kafka.linger.ms", "50"),
        ("kafka.batch.size", "1500"), ("kafka.delivery.timeout.ms", "8000"), ("kafka.max.block.ms", "2000"),
    }  # fmt: skip
    assert int(options["kafka.max.request.size"]) > 5 << 20
    assert int(options["kafka.request.timeout.ms"]) + 50 < 8000
