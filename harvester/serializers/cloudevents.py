"""The former home of `cloud_event_headers`, now in `harvester.serializers.records`; kept for one release."""

from __future__ import annotations

import warnings

from harvester.serializers.records import CloudEvents, cloud_event_headers

__all__ = ["CloudEvents", "cloud_event_headers"]

warnings.warn(
    "harvester.serializers.cloudevents is harvester.serializers.records now", DeprecationWarning, stacklevel=2
)
