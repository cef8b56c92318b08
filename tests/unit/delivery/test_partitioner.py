"""The hash that chooses a partition: Kafka's own examples, and what the producer really does."""

from __future__ import annotations

import pytest

from harvester.delivery.partitioner import murmur2


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_examples_of_kafka(key: bytes, signed: int) -> None:
    """From UtilsTest.testMurmur2 of Apache Kafka, where the hash has a sign."""
    assert murmur2(key) == signed & 0x7FFFFFFF
