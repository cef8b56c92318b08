"""The former home of `Statistics`, now in `harvester.coordination.settings`; kept for one release."""

from __future__ import annotations

import warnings

from harvester.coordination.settings import Statistics

__all__ = ["Statistics"]

warnings.warn("harvester.coordination.figures is harvester.coordination.settings now", DeprecationWarning, stacklevel=2)
