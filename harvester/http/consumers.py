"""Exposes a coordinated consumer's figures to Prometheus, beside the application's own metrics.

    from prometheus_client import REGISTRY

    REGISTRY.register(ConsumerMetrics(consumer))

Counters begin anew with the consumer. Every sample carries its group and client id. Give each of several consumers in
one process a registry of its own.
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
    """Collects the figures of one consumer, from any thread; a closed consumer has no claims and no lag.

    Of an asynchronous one once it has begun (`async with`).
    """

    def __init__(self, consumer: CoordinatedConsumer | AsyncCoordinatedConsumer) -> None:
        self._consumer = consumer
        self._who = [consumer.settings.group, consumer.client.id]

    def collect(self) -> Iterator[Metric]:
        """All families."""
        done = self._consumer.statistics()
        held = self._consumer.claims()
        lag = self._consumer.lag()
        yield self._gauge("claims", "Partitions that it holds.", [((), len(held))])
        text = "Records behind the last processed one, as of the last fetch, of each partition that it holds."
        behind = [((topic, str(partition)), float(records)) for (topic, partition), records in sorted(lag.items())]
        yield self._gauge("lag_records", text, behind, "topic", "partition")
        found = sorted(self._consumer.open_records().items())
        text = "Records given to the application from the first one on that it has not committed, of each partition."
        samples = [((topic, str(partition)), float(each.records)) for (topic, partition), each in found]
        yield self._gauge("open_records", text, samples, "topic", "partition")
        text = "How long ago the first record that is not committed was given to the application, of each partition."
        samples = [((topic, str(partition)), each.age_s) for (topic, partition), each in found]
        yield self._gauge("oldest_open_seconds", text, samples, "topic", "partition")
        text = "How long ago the record that is given to the application next was written, of each partition."
        ages = sorted(self._consumer.ages().items())
        samples = [((topic, str(partition)), age_s) for (topic, partition), age_s in ages]
        yield self._gauge("lag_seconds", text, samples, "topic", "partition")
        yield self._counter("records", "Records given to the application.", [((), done.records)])
        yield self._counter("failures", "How often the handler raised.", [((), done.failures)])
        yield self._counter("retries", "How often that led to another try.", [((), done.retries)])
        given_up = [(("dead-letter",), done.dead_letters), (("skip",), done.given_up - done.dead_letters)]
        yield self._counter("given_up", "Records that on_error settled, by how.", given_up, "how")
        yield self._gauge("parked_keys", "Keys that wait for a retry now.", [((), done.parked)])
        yield self._processing(done)
        yield self._counter("batches", "At most once: batches that became its own.", [((), done.batches)])
        claims = [(("won",), done.claims_won), (("missed",), done.claims_missed)]
        yield self._counter(
            "claims_made", "Claims by their outcome; one that asks for a share is missed.", claims, "outcome"
        )
        ended = [(("released",), done.releases), (("lost",), done.losses)]
        yield self._counter("claims_ended", "Claims by how they ended.", ended, "how")
        written = [((kind,), count) for kind, count in sorted(done.written.items())]
        yield self._counter("coordination_messages", "Messages for the coordination topic.", written, "kind")
        text = "Messages that did not arrive in the coordination topic, or may not have."
        yield self._counter("coordination_unwritten", text, [((), done.unwritten)])
        yield self._counter("coordination_bytes", "What these were, in bytes.", [((), done.written_bytes)])

    def _processing(self, done: Statistics) -> Metric:
        text = "How long calls of the handler took."
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
