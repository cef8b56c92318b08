"""Histogram and window: the edges, and what a broken pipe could bring."""

from __future__ import annotations

import math

import pytest

from harvester.errors import WireError
from harvester.telemetry.latency import ERROR, HIGHEST_MS, LOWEST_MS, Histogram, LatencyWindow


def of(*latencies_ms: float) -> Histogram:
    histogram = Histogram()
    for latency_ms in latencies_ms:
        histogram.add_all((latency_ms * 1000,))
    return histogram


def test_an_empty_one_has_no_percentile() -> None:
    assert Histogram().percentile(50) is None
    assert Histogram().pack() == b""
    assert len(Histogram()) == 0


@pytest.mark.parametrize("low", [0.0, -5.0, -math.inf, math.nan, LOWEST_MS])
def test_below_the_range_counts_at_its_lower_end(low: float) -> None:
    assert of(low).percentile(50) == pytest.approx(LOWEST_MS, rel=ERROR + 1e-9)


@pytest.mark.parametrize("high", [HIGHEST_MS, HIGHEST_MS * 100, math.inf])
def test_above_the_range_counts_at_its_upper_end(high: float) -> None:
    assert of(high).percentile(50) == pytest.approx(HIGHEST_MS, rel=2 * ERROR)


def test_p50_and_p99_of_a_known_list() -> None:
    histogram = of(*range(1, 1_001))
    assert histogram.percentile(50) == pytest.approx(500, rel=ERROR)
    assert histogram.percentile(99) == pytest.approx(990, rel=ERROR)
    assert histogram.percentile(0) == pytest.approx(1, rel=ERROR)
    assert histogram.percentile(100) == pytest.approx(1_000, rel=ERROR)


def test_many_at_once_are_as_many_single_ones() -> None:
    """In microseconds, as a shard has them."""
    histogram = Histogram()
    histogram.add_all([5_000, 5_000, 7_000])
    histogram.add_all([])
    histogram.add_all((5_000.0,))
    assert histogram == of(5.0, 5.0, 7.0, 5.0)
    assert len(histogram) == 4


def test_many_at_once_may_lie_outside_the_range() -> None:
    histogram = Histogram()
    histogram.add_all([math.nan, -math.inf, -1, 0, int(LOWEST_MS * 1000), int(HIGHEST_MS * 1000), 10**18, math.inf])
    assert histogram == of(*[LOWEST_MS] * 5, *[HIGHEST_MS] * 3)


def test_the_last_bucket_is_the_last() -> None:
    """One step below the end rounding must not reach beyond it: nobody would unpack that."""
    histogram = of(math.nextafter(HIGHEST_MS, 0.0))
    histogram.add_all([math.nextafter(HIGHEST_MS * 1000, 0.0), HIGHEST_MS * 1000 - 1])
    assert Histogram.unpack(histogram.pack()) == histogram


def test_a_thousand_records_around_one_latency_pack_small() -> None:
    assert len(of(*(10 + number / 100 for number in range(1_000))).pack()) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        of(5.0).pack() + b"x",
        of(5.0).pack() * 2,  # a bucket twice
        of(50.0).pack() + of(5.0).pack(),  # not in order
        b"\xff\xff" + b"\x01" + b"\x00" * 7,  # no such bucket
        b"\x01\x00" + b"\x00" * 8,  # a count of none
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="histogram"):
        Histogram.unpack(data)


def test_the_first_interval_is_shown_while_it_fills() -> None:
    window = LatencyWindow(5.0)
    assert not len(window.current(0.0))
    window.add(of(1.0), 1.0)
    assert window.current(2.0) == of(1.0)


def test_a_complete_interval_is_shown_until_the_next_one_is_complete() -> None:
    window = LatencyWindow(5.0)
    window.add(of(1.0), 0.0)
    window.add(of(2.0), 6.0)
    assert window.current(9.9) == of(1.0)
    assert window.current(10.0) == of(2.0)


def test_idle_intervals_replace_nothing() -> None:
    window = LatencyWindow(5.0)
    window.add(of(1.0), 0.0)
    window.add(of(2.0), 6.0)
    assert window.current(1_000.0) == of(2.0)
    assert window.current(1_100.0) == of(2.0)
    window.add(of(3.0), 1_101.0)
    assert window.current(1_102.0) == of(2.0)
    assert window.current(1_106.0) == of(3.0)


def test_adding_nothing_does_not_begin_an_interval() -> None:
    window = LatencyWindow(5.0)
    window.add(Histogram(), 0.0)
    window.add(of(1.0), 4.0)
    window.add(of(2.0), 8.0)
    assert window.current(8.5) == of(1.0, 2.0)
