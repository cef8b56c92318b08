"""Claim checks: values that are too large for Kafka lie in a store, and their records say where (docs/large-values.md).

The relay puts a value away and then publishes a record that refers to it (`harvester.relay.put_away`); `ClaimChecks`
gets the value for whoever consumes the record.
"""

from harvester.claim_check.resolver import ClaimChecks, ResolvedRecord
from harvester.claim_check.settings import StoreSettings

__all__ = ["ClaimChecks", "ResolvedRecord", "StoreSettings"]
