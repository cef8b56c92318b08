"""The former name of `harvester.coordination.settings`; kept for one release."""

from __future__ import annotations

import warnings

from harvester.coordination.settings import ConsumerSettings

__all__ = ["ConsumerSettings"]

warnings.warn(
    "harvester.coordination.consumer_settings is harvester.coordination.settings now", DeprecationWarning, stacklevel=2
)
