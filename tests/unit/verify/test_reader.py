"""What the reader keeps of a log."""

from __future__ import annotations

import pytest

from harvester.verify.reader import History, percentile_ms


def value(seq: int, *, created_us: int = 0, kind: str = "c") -> bytes:
    return f"{seq}:{created_us}:{kind}:....".encode()


def test_numbers_come_back_in_log_order_with_their_positions() -> None:
    history = History()
    place = history.place("t", 3)
    for offset, seq in enumerate((1, 3, 2, 3)):
        history.add(place, 10 + offset, b"k", value(seq), 0)

    assert list(history.deliveries()) == [("k", 1), ("k", 3), ("k", 2), ("k", 3)]
    assert history.where("k", 3) == ["t[3]@11", "t[3]@13"]
    assert history.where("k", 9) == history.where("x", 1) == []
    assert history.scattered() == []


def test_a_key_in_two_partitions_is_found_with_true_positions() -> None:
    history = History()
    first, second = history.place("t", 0), history.place("t", 1)
    history.add(first, 5, b"k", value(1), 0)
    history.add(second, 7, b"k", value(2), 0)
    history.add(first, 6, b"k", value(3), 0)

    assert history.scattered() == ["k"]
    assert [*history.where("k", 1), *history.where("k", 2), *history.where("k", 3)] == ["t[0]@5", "t[1]@7", "t[0]@6"]


def test_what_the_pump_did_not_commit_is_foreign() -> None:
    history = History()
    place = history.place("t", 0)
    history.add(place, 0, b"k", b"something else", 0)
    history.add(place, 1, None, value(1), 0)
    history.add(place, 2, b"k", None, 0)
    history.add(place, 3, b"k", value(1, kind="r"), 0)

    assert history.foreign_records == 4
    assert list(history.deliveries()) == []
    assert history.foreign[0] == "t[0]@0: not from the pump"
    assert history.foreign[3] == "t[0]@3: rolled back by the pump"


def test_rate_and_latency_are_told_from_the_log_s_timestamps() -> None:
    history = History()
    place = history.place("t", 0)
    history.add(place, 0, b"k", value(1, created_us=990_000), 1_000)  # 10 ms
    history.add(place, 1, b"k", value(2, created_us=1_200_000), 1_500)  # 300 ms
    history.add(place, 2, b"k", value(2, created_us=1_200_000), 2_000)  # a repeat: no latency
    history.add(place, 3, b"k", value(3, created_us=0, kind="l"), 3_000)  # held open on purpose: no latency

    timing = history.timing()

    assert timing.rate_per_s == pytest.approx(2.0)  # 4 records in 2 s
    assert (timing.p50_ms, timing.p99_ms) == (10.0, 300.0)


def test_nothing_measured_is_none() -> None:
    history = History()
    history.add(history.place("t", 0), 0, b"k", value(1), -1)

    timing = history.timing()

    assert (timing.rate_per_s, timing.p50_ms, timing.p99_ms) == (None, None, None)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50.0), (0.99, 99.0), (0.001, 1.0), (1.0, 100.0)])
def test_percentiles_are_nearest_rank(share: float, expected: float) -> None:
    assert percentile_ms([rank * 1000 for rank in range(1, 101)], share) == expected
