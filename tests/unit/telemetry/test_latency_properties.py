"""The histogram against a sorted list, which is the truth it stands for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from harvester.telemetry.latency import ERROR, HIGHEST_MS, LOWEST_MS, Histogram

LATENCIES = st.lists(st.floats(LOWEST_MS, HIGHEST_MS), min_size=1, max_size=200)
MICROSECONDS = st.lists(st.integers(-(2**63), 2**63) | st.integers(0, 10**7), max_size=100)  # clocks may say anything


def of(latencies_ms: list[float]) -> Histogram:
    histogram = Histogram()
    for latency_ms in latencies_ms:
        histogram.add_all((latency_ms * 1000,))
    return histogram


@given(LATENCIES, st.integers(0, 100))
def test_a_percentile_is_within_the_error_of_the_sorted_lists(latencies: list[float], p: int) -> None:
    rank = max(1, math.ceil(len(latencies) * p / 100))
    truth = sorted(latencies)[rank - 1]
    estimate = of(latencies).percentile(p)
    assert estimate is not None
    assert abs(estimate - truth) <= (ERROR + 1e-9) * truth


@given(LATENCIES, LATENCIES)
def test_merging_is_the_same_as_one_histogram_of_both(some: list[float], others: list[float]) -> None:
    merged = of(some)
    merged.merge(of(others))
    assert merged == of(some + others)
    assert len(merged) == len(some) + len(others)


@given(st.lists(MICROSECONDS, max_size=4))
def test_many_at_once_are_as_many_single_ones(batches: list[list[int]]) -> None:
    at_once, singly = Histogram(), Histogram()
    for batch in batches:
        at_once.add_all(batch)
        for latency_us in batch:
            singly.add_all((latency_us,))
    assert at_once == singly
    assert len(at_once) == len(singly) == sum(map(len, batches))


@given(st.lists(st.integers(int(LOWEST_MS * 1000), int(HIGHEST_MS * 1000)), min_size=1), st.integers(0, 100))
def test_microseconds_are_counted_as_milliseconds(latencies_us: list[int], p: int) -> None:
    histogram = Histogram()
    histogram.add_all(latencies_us)
    truth = sorted(latencies_us)[max(1, math.ceil(len(latencies_us) * p / 100)) - 1] / 1000
    estimate = histogram.percentile(p)
    assert estimate is not None
    assert abs(estimate - truth) <= (ERROR + 1e-9) * truth


@given(LATENCIES)
def test_packing_loses_nothing(latencies: list[float]) -> None:
    histogram = of(latencies)
    unpacked = Histogram.unpack(histogram.pack())
    assert unpacked == histogram
    assert len(unpacked) == len(histogram)


@given(LATENCIES)
def test_percentiles_rise(latencies: list[float]) -> None:
    histogram = of(latencies)
    values = [histogram.percentile(p) or 0.0 for p in range(0, 101, 5)]
    assert values == sorted(values)
