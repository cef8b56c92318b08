"""What is counted for monitoring: latencies by bounds, troubles by source, what a dead shard may have sent."""

from __future__ import annotations

from harvester.relay.core.ledger import InFlightBounds, Ledger
from harvester.telemetry.latency import Histogram
from harvester.telemetry.metrics import Tally, source_of


def test_latencies_up_to_bounds() -> None:
    histogram = Histogram()
    histogram.add_all([500.0, 1_500.0, 1_600.0, 90_000.0, 9_000_000.0])  # microseconds
    assert histogram.counts_up_to([1.0, 2.0, 100.0, 1_000.0]) == [1, 3, 4, 4]
    assert len(histogram) == 5
    assert abs(histogram.total_ms() - 9_093.6) < 9_093.6 * 0.02
    assert Histogram().counts_up_to([1.0]) == [0]
    assert Histogram().total_ms() == 0


def test_sources_of_troubles() -> None:
    assert [source_of(text) for text in ("database", "group", "shard 12", "archive", "http")] == [
        "database",
        "kafka",
        "shard",
        "archive",
        "http",
    ]


def test_a_trouble_counts_when_it_begins_and_lasts_until_all_of_its_source_are_over() -> None:
    tally = Tally()
    tally.trouble("shard 1", new=True, over=False)
    tally.trouble("shard 2", new=True, over=False)
    tally.trouble("shard 1", new=False, over=False)  # said again
    assert tally.troubles["shard"] == 2
    tally.trouble("shard 1", new=False, over=True)
    assert tally.troubled == {"shard"}
    tally.trouble("shard 2", new=False, over=True)
    assert tally.troubled == frozenset()
    assert tally.troubles["shard"] == 2


def test_what_a_shard_may_have_sent_is_one_record_of_each_key() -> None:
    bounds = InFlightBounds(in_flight=10, unsettled=60, per_key=10)
    ledger, pipelined = Ledger(bounds), Ledger(bounds, pipelined=True)
    for each in (ledger, pipelined):
        for record_id, key, shard in ((1, b"a", 0), (2, b"a", 0), (3, None, 0), (4, None, 0), (5, b"b", 1)):
            each.add(record_id, key, shard)
    assert [ledger.in_flight_of(shard) for shard in (0, 1, 2)] == [3, 1, 0]
    assert [pipelined.in_flight_of(shard) for shard in (0, 1, 2)] == [4, 1, 0]
