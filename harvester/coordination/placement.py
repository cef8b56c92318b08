"""Which partition of the coordination topic speaks of a place. Pure.

    murmur2(topic as UTF-8, then the partition as four bytes, most significant first) mod N

The hash is the one of Kafka's default partitioner, its sign bit left out. The group is not part of it: all groups'
claims of one partition of a topic lie in one partition of the log. N is fixed for the life of the coordination topic;
with another N two clients would look for the same claim in different places, and both would win it.
"""

from __future__ import annotations

from struct import pack

from harvester.coordination.messages import Place
from harvester.delivery.partitioner import murmur2


def log_partition(place: Place, partitions: int) -> int:
    """Of a coordination topic with so many partitions."""
    return murmur2(place.topic.encode() + pack(">i", place.partition)) % partitions
