"""The relay machine's limits in records and seconds, from the configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from harvester.relay.ledger import Bounds

_ENOUGH_UNSETTLED = 10_000


@dataclass(frozen=True, slots=True)
class Settings:
    """See the module's text. Only `shards` changes while the relay runs (P17)."""

    shards: int
    max_in_flight_records: int
    max_unsettled_records: int  # with those that wait in shards behind another of their key
    mark_query_records: int
    send_buffer: int
    max_queued_per_key: int
    records_per_shard: int
    most_shards: int  # that are put to use at a time, unless all always are
    answer_timeout_s: float
    silence_timeout_s: float
    look_interval_s: float = 60.0
    exactly_once: bool = False
    expiry_s: float = 22.0  # S + H + D: what a dead shard had on the wire has arrived by then, or never does

    @property
    def bounds(self) -> Bounds:
        """The ledger's. In exactly-once mode rows are bounded, not keys: nothing waits for another of its key."""
        most = self.max_in_flight_records
        if self.exactly_once:
            return Bounds(most, most, most)
        return Bounds(most, self.max_unsettled_records, self.max_queued_per_key)


def max_unsettled(in_flight: int) -> int:
    """How many records may be unsettled where so many may be in flight: enough to find that many keys among them."""
    return max(2 * in_flight, min(6 * in_flight, _ENOUGH_UNSETTLED))
