"""Claim checks: values too large for Kafka are in a store, and their records refer to it (docs/large-values.md).

The relay stores a value and then publishes a record that refers to it (`harvester.relay.put_away`); `ClaimChecks` gets
the value for the record's consumer.
"""

from harvester.claim_check.reference import StoreSettings
from harvester.claim_check.resolver import ClaimChecks, ResolvedRecord

__all__ = ["ClaimChecks", "ResolvedRecord", "StoreSettings"]
