"""Exposes a coordinated consumer's statistics to Prometheus, together with the application's own metrics.

    from prometheus_client import REGISTRY

    REGISTRY.register(ConsumerMetrics(consumer))

Counters start over with the consumer. Every sample carries its group and client id. Give each of several consumers in
one process its own registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from harvester.coordination.async_consumer import AsyncCoordinatedConsumer
from harvester.coordination.consumer import CoordinatedConsumer
from harvester.coordination.settings import PROCESSING_BOUNDS_S, Statistics

_WHO = ["group", "client"]
Samples = Iterable[tuple[tuple[str, ...], float]]


class ConsumerMetrics(Collector):
    """Collects the statistics of one consumer, from any thread; a closed consumer has no claims and no lag.

    For an asynchronous one, once it has been started (`async with`).
    """

    def __init__(self, consumer: CoordinatedConsumer | AsyncCoordinatedConsumer) -> None:
        self._consumer = consumer
        self._who = [consumer.settings.group, consumer.client.id]

    def collect(self) -> Iterator[Metric]:
        """All families."""
        done = self._consumer.statistics()
        held = self._consumer.claims()
        lag = self._consumer.lag()
        yield self._gauge("claims", "Partitions held.", [((), len(held))])
        text = "Records behind the last processed one, as of the last fetch, of each held partition."
        behind = [((topic, str(partition)), float(records)) for (topic, partition), records in sorted(lag.items())]
        yield self._gauge("lag_records", text, behind, "topic", "partition")
        found = sorted(self._consumer.open_records().items())
        text = "Records given to the application since the first uncommitted one, of each partition."
        samples = [((topic, str(partition)), float(each.records)) for (topic, partition), each in found]
        yield self._gauge("open_records", text, samples, "topic", "partition")
        text = "How long ago the first uncommitted record was given to the application, of each partition."
        samples = [((topic, str(partition)), each.age_s) for (topic, partition), each in found]
        yield self._gauge("oldest_open_seconds", text, samples, "topic", "partition")
        text = "How long ago the next record for the application was written, of each partition."
        ages = sorted(self._consumer.ages().items())
        samples = [((topic, str(partition)), age_s) for (topic, partition), age_s in ages]
        yield self._gauge("lag_seconds", text, samples, "topic", "partition")
        yield self._counter("records", "Records given to the application.", [((), done.records)])
        yield self._counter("failures", "How often the handler raised.", [((), done.failures)])
        yield self._counter("retries", "How often that led to another try.", [((), done.retries)])
        given_up = [(("dead-letter",), done.dead_letters), (("skip",), done.given_up - done.dead_letters)]
        yield self._counter("given_up", "Records settled by on_error, by outcome.", given_up, "how")
        yield self._gauge("parked_keys", "Keys that currently wait for a retry.", [((), done.parked)])
        yield self._processing(done)
        yield self._counter("batches", "At most once: batches that this consumer has claimed.", [((), done.batches)])
        claims = [(("won",), done.claims_won), (("missed",), done.claims_missed)]
        yield self._counter(
            "claims_made", "Claims by outcome; one that asks for a share counts as missed.", claims, "outcome"
        )
        ended = [(("released",), done.releases), (("lost",), done.losses)]
        yield self._counter("claims_ended", "Ended claims, by reason.", ended, "how")
        written = [((kind,), count) for kind, count in sorted(done.written.items())]
        yield self._counter("coordination_messages", "Messages written to the coordination topic.", written, "kind")
        text = "Messages that did not reach the coordination topic, or may not have."
        yield self._counter("coordination_unwritten", text, [((), done.unwritten)])
        yield self._counter(
            "coordination_bytes",
            "Size of the messages written to the coordination topic, in bytes.",
            [((), done.written_bytes)],
        )

    def _processing(self, done: Statistics) -> Metric:
        text = "Duration of handler calls."
        family = HistogramMetricFamily("harvester_consumer_processing_seconds", text, labels=_WHO)
        bounds = [*map(str, PROCESSING_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(done.processing), strict=True))
        family.add_metric(self._who, buckets, done.processing_s)
        return family

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"harvester_consumer_{name}", text, labels=[*_WHO, *labels]), samples)

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"harvester_consumer_{name}", text, labels=[*_WHO, *labels]), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
        for labels, value in samples:
            family.add_metric([*self._who, *labels], value)
        return family
